"""`RecordedCalls`: runs a differentiable function once for each signature of its inputs, and from then on repeats its
launches with almost no host time.

A signature is all that the launches depend on besides the addresses and values of tensors. A call that records runs
forward and backward, so that all kernels are compiled, records them, and compares a repetition with that run, bit for
bit. `Steps` decides which calls record.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from sonic_ep.checks import ROW_ALIGNMENT
from sonic_ep.groups.lost_ranks import in_backward
from sonic_ep.kernels.experts.tile_counter import counter_of_stream, recording_for
from sonic_ep.kernels.launch_sequence.driver import raw_stream
from sonic_ep.kernels.launch_sequence.recorder import leaves_of, record
from sonic_ep.kernels.launch_sequence.replay import HasAddress, Replay, kind_of

_LOG = logging.getLogger("sonic_ep.launches")

_MAX_SIGNATURES = 12  # of one layer; with more, as where lengths change in every step, the code runs
_MAX_COUNTED = 1024  # signatures that were called once


class Code(NamedTuple):
    """What a recording needs to know of a layer's function. The first argument of each is the layer.

    compute: the function, from its inputs to a flat list of outputs. The first input is x.
    state: the tensors besides the inputs that the function reads or changes.
    undone: a context that undoes the changes of the function to the state: two runs find the same there.
    problem: why the launches for these inputs depend on more than addresses, or None.
    again: computes the outputs of a step anew, by the function's code on the same routing. The step exceeded its bound.
    """

    compute: Callable[[Any, list[Tensor]], list[Tensor]]
    state: Callable[[Any], list[Tensor]]
    undone: Callable[[Any], AbstractContextManager[object]]
    problem: Callable[[Any, list[Tensor]], str | None]
    again: Callable[[Any, list[Tensor], list[Tensor], Any], list[Tensor]]


class _Step(NamedTuple):
    key: object = None


class Steps:
    """The steps of a layer; a step is one call. This class is for one rank, where sizes follow from the inputs.

    The first call with a signature runs the code alone, because lengths may change in every step. The second records.
    A copy starts without any.
    """

    def __init__(self) -> None:
        self._called: set[object] = set()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), ()

    def begin(self, layer: Any) -> Any:
        """Returns a step, with a `key` that its launches depend on. None if the code has to run."""
        return _Step()

    def may_record(self, step: Any, signature: object, *, known: bool) -> bool:
        """Returns True if this call may record. signature: None if it cannot. known: whether it cannot be new."""
        if known or signature is None:
            return False
        # Activation checkpointing compares what its two calls save, so that both must be of the same kind.
        if signature in self._called or has_saved_tensor_hooks():
            return True
        if len(self._called) == _MAX_COUNTED:
            self._called.clear()
        self._called.add(signature)
        return False

    def agreed(self, layer: Any, problem: str | None, *, known: bool = False) -> bool:
        """Returns True, on every rank, if no rank has a problem and not all know the signature."""
        return problem is None

    def problem_with_call(self, step: Any, num_tokens: int) -> str | None:
        """Returns why this call cannot repeat launches."""
        return None

    def bounded(self, step: Any) -> AbstractContextManager[object]:
        """Returns a context in which the code runs with the sizes of the step."""
        return nullcontext()

    def captured(self) -> AbstractContextManager[object]:
        """Returns the context of captures."""
        return nullcontext()

    def state(self, step: Any) -> Sequence[HasAddress]:
        """Returns the tensors besides those of the layer that launches refer to."""
        return []

    def start(self) -> Callable[[], None] | None:
        """Is called before launches are repeated. Returns what to call when the backward of these begins, or None."""
        return None

    def finish(self, step: Any) -> Any:
        """Is called after that. Returns None, or the sizes if they exceed those of the step."""
        return None

    def observe(self, split_sizes: Any) -> None:
        """Is called after the code has run a step."""


def has_saved_tensor_hooks() -> bool:
    """Returns True inside torch.autograd.graph.saved_tensors_hooks, which activation checkpointing uses."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]


class _NotRecordedError(RuntimeError):
    """Raised where the launches of a step cannot be recorded."""


@final
class RecordedCalls:
    """The recordings of one layer's function, by input signature. A copy of it, as of its layer, starts without any.

    A layer is any object with an attribute `training`; besides that, `code` and `steps` alone know what it is.
    """

    def __init__(self, code: Code, steps: Steps) -> None:
        self._code, self._steps = code, steps
        self._replays: dict[object, Replay | None] = {}  # None where the code runs

    def __reduce__(self) -> tuple[type[Self], tuple[Code, Steps]]:
        return type(self), (self._code, self._steps)

    @property
    def num_recorded(self) -> int:
        """The number of signatures with a recording."""
        return sum(replay is not None for replay in self._replays.values())

    def forget(self) -> None:
        """Forgets all recordings."""
        self._replays.clear()

    def outputs(
        self, layer: Any, inputs: list[Tensor], num_tokens: int, problem: str | None, *, settings: object = None
    ) -> list[Tensor] | None:
        """Returns the outputs of the function by repeating its launches, or None where its code has to run.

        A collective of the layer's ranks. Not while a CUDA graph is captured. problem: why this call cannot repeat
        launches, or None; with a problem, the inputs are not used. settings: what the launches depend on besides.
        """
        step = self._steps.begin(layer)
        if step is None:
            return None
        problem = problem or problem_with_x(inputs[0]) or self._steps.problem_with_call(step, num_tokens)
        signature = None if problem is not None else _signature(layer, inputs, (step.key, settings))
        known = signature in self._replays or len(self._replays) == _MAX_SIGNATURES
        # Not in a recomputation of activation checkpointing, by a thread of autograd: a process died at the start of
        # such a recording. So under reentrant checkpointing that runs the code, unless the layer has recorded before.
        if self._steps.may_record(step, signature, known=known) and not in_backward():
            self._record(layer, inputs, step, signature, problem)
        replay = self._replays.get(signature)
        if replay is None or any(tensor.data_ptr() % ROW_ALIGNMENT for tensor in inputs):
            return None
        begin_backward = self._steps.start()
        outputs = replay(inputs, lambda: self._state(layer, step), begin_backward)
        sizes = self._steps.finish(step)
        return outputs if sizes is None else self._code.again(layer, inputs, outputs, sizes)

    def observe(self, split_sizes: Any) -> None:
        """Is called after the code has run because `outputs` returned None. split_sizes: of its routing."""
        self._steps.observe(split_sizes)

    def _state(self, layer: Any, step: Any) -> list[HasAddress]:
        return [*self._code.state(layer), *self._steps.state(step)]

    def _record(self, layer: Any, inputs: list[Tensor], step: Any, signature: object, problem: str | None) -> None:
        """Records this signature, unless a rank has a problem. A collective of the layer's ranks."""
        known = signature in self._replays
        if problem is None and not known:
            problem = self._code.problem(layer, inputs) or _problem_with(inputs)
            problem = problem or ("there are too many" if len(self._replays) == _MAX_SIGNATURES else None)
        if self._steps.agreed(layer, problem, known=known):
            # Hooks of the caller, as those of activation checkpointing, must not see what the recording saves.
            start = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
                replay, problem = self._recorded(layer, inputs, step)
            _LOG.debug("%s and %s took %.2f s to record", type(layer).__name__, step.key, time.perf_counter() - start)
            if replay is not None or problem is not None:
                self._replays[signature] = replay
        elif problem is not None and signature is not None and len(self._replays) < _MAX_SIGNATURES:
            self._replays[signature] = None
        if problem is not None:
            _LOG.info("the code of %s runs, launches are not recorded: %s", type(layer).__name__, problem)

    def _captured(
        self,
        layer: Any,
        function: Callable[[list[Tensor]], list[Tensor]],
        inputs: list[Tensor],
        step: Any,
        differentiable: list[int],
    ) -> Replay:
        """Returns the recording. Nothing runs here. Raises _NotRecordedError, whatever fails."""
        device = inputs[0].device
        stream = raw_stream(device)
        counters = counter_of_stream(device, stream)
        try:
            with recording_for(stream), self._steps.captured():
                state = [*self._state(layer, step), *counters]
                recording = record(function, inputs, state, differentiable)
            kinds = [kind_of(each) for each in state[: len(state) - len(counters)]]
            return Replay(recording, differentiable, device, counters, kinds)
        except Exception as error:
            raise _NotRecordedError(f"{type(error).__name__}: {error}") from error

    def _recorded(self, layer: Any, inputs: list[Tensor], step: Any) -> tuple[Replay | None, str | None]:
        """Returns a replay, or the problem with it. Both are None if another rank has one, or this step is too large.

        A collective of the layer's ranks.
        """
        code = self._code

        def function(tensors: list[Tensor]) -> list[Tensor]:
            for tensor, given in zip(tensors, inputs, strict=True):  # attributes, as allreduce of experts' weights
                vars(tensor).update(vars(given))
            return code.compute(layer, tensors)

        replay, problem = None, None
        expected: list[Tensor | None] = []
        with self._steps.bounded(step):
            try:
                with code.undone(layer):  # everything is compiled here, which a capture does not allow
                    expected, differentiable = _step(function, inputs)
                    expected += [tensor.clone() for tensor in code.state(layer)]
                replay = self._captured(layer, function, inputs, step, differentiable)
            except (torch.OutOfMemoryError, OSError, _NotRecordedError) as error:  # of this rank; others wait for it
                problem = str(error)
        if not self._steps.agreed(layer, problem):
            return None, problem
        assert replay is not None
        begin_backward = self._steps.start()
        with code.undone(layer):
            repeated, _ = _step(
                lambda tensors: replay(tensors, lambda: self._state(layer, step), begin_backward), inputs
            )
            if self._steps.finish(step) is not None:
                return None, None
            repeated += code.state(layer)
            different = [i for i, pair in enumerate(zip(expected, repeated, strict=True)) if not _same_bits(*pair)]
        if different:
            problem = f"repeated launches gave other results than the code, numbers {different}"
        return (replay, None) if self._steps.agreed(layer, problem) else (None, problem)


def _step(
    function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[int]]:
    """Returns the outputs followed by the gradients of inputs for gradients of ones; and which outputs have one."""
    leaves = leaves_of(inputs)
    outputs = function(leaves)
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not differentiable:
        return [*outputs], []
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    results = [outputs[index] for index in differentiable]
    # By this thread, as in the recording, because cuBLAS has a handle for each thread.
    with torch.autocast("cuda", enabled=False), torch.autograd.set_multithreading_enabled(False):
        grads = torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)
    return [*outputs, *grads], differentiable


def _same_bits(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(bits), two.detach().view(bits))


def problem_with_x(x: Tensor) -> str | None:
    """Returns why a call cannot repeat launches: x is of another kind, or something follows what the code does.

    x: anything that a user passed; a nested tensor, for one, has no shape.
    """
    if type(x) is not Tensor or x.is_nested or not x.is_cuda or not x.is_contiguous():
        return "x is no contiguous tensor on a GPU"
    if x.device.index != torch.cuda.current_device():
        return "x is not on the current device"
    is_watched = torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0
    return "inference or dispatch mode" if is_watched else None


def _problem_with(inputs: Sequence[Tensor]) -> str | None:
    device = inputs[0].device
    for tensor in inputs:
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.device != device or not tensor.is_contiguous():
            return f"a weight is a {type(tensor).__name__} on {tensor.device}, contiguous: {tensor.is_contiguous()}"
    return None


def _gemm_settings() -> tuple[object, ...]:
    """Returns the settings of torch that cuBLAS's GEMMs depend on."""
    matmul = torch.backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return matmul.fp32_precision, *reduced, torch.backends.cuda.preferred_blas_library()


def _signature(layer: Any, inputs: Sequence[Tensor], key: object) -> object:
    """Returns what the launches depend on besides the addresses and values of tensors, for comparison."""
    return (
        key,
        layer.training,
        torch.is_grad_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        raw_stream(inputs[0].device),
        torch.are_deterministic_algorithms_enabled(),
        _gemm_settings(),
        *[(t.shape, t.dtype, t.requires_grad, type(t), t.get_device(), t.is_contiguous()) for t in inputs],
    )
