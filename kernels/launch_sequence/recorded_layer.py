"""`RecordedLayer`: runs a layer's Python code once for each signature of its inputs, and from then on repeats its
launches with almost no host time.

A signature is all that the launches depend on besides the addresses and values of tensors. The first call with a new
one runs forward and backward first, so that all kernels are compiled, then records them, and compares a repetition with
the first run, bit for bit.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sonic_ep.checks import ROW_ALIGNMENT
from sonic_ep.kernels.experts.tile_counter import counter_of_stream, recording_for
from sonic_ep.kernels.launch_sequence.driver import UnavailableError, raw_stream
from sonic_ep.kernels.launch_sequence.recorder import UnrecordableError, leaves_of, record
from sonic_ep.kernels.launch_sequence.replay import Replay

_LOG = logging.getLogger("sonic_ep.launches")

_MAX_SIGNATURES = 16  # of one layer; with more, as where lengths change in every step, the code runs
_MIN_CALLS = 3  # without gradients, where lengths change more often, recorded in the third call with a signature


class LayerCode(NamedTuple):
    """What a recording needs to know of a layer.

    compute: the layer's code, from x to a flat list of outputs.
    state: the tensors besides parameters that the code reads or changes.
    undone: a context that undoes the changes of the code to the state.
    problem: why the launches of a layer on this x depend on more than addresses, or None.
    """

    compute: Callable[[Any, Tensor], list[Tensor]]
    state: Callable[[Any], list[Tensor]]
    undone: Callable[[Any], AbstractContextManager[object]]
    problem: Callable[[Any, Tensor], str | None]


class _Parts:
    """The submodules and parameters of a layer, found once: nn.Module needs longer for it than a pass for launching."""

    def __init__(self, layer: nn.Module) -> None:
        modules = dict(layer.named_modules())
        self._members = [(module._modules, dict(module._modules)) for module in modules.values()]
        self._submodules = [module for module in modules.values() if module is not layer]
        self._places = [
            (module._parameters, name)
            for module in modules.values()
            for name, p in module._parameters.items()
            if p is not None
        ]
        self.names = [name for name, _ in layer.named_parameters(remove_duplicate=False)]

    def are_current(self) -> bool:
        """Returns True unless a submodule was replaced, added or removed."""
        return all(now == before for now, before in self._members)

    def have_hooks(self) -> bool:
        return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in self._submodules)

    def parameters(self) -> list[Tensor]:
        return [parameters[name] for parameters, name in self._places]  # pyright: ignore[reportReturnType]


@final
class RecordedLayer:
    """The recordings of one layer, by input signature. A copy of it, as of its layer, starts without any."""

    def __init__(self, code: LayerCode) -> None:
        self._code = code
        self._parts: _Parts | None = None
        self._replays: dict[object, Any] = {}  # a Replay, the number of calls so far, or None where the code runs

    def __reduce__(self) -> tuple[type[Self], tuple[LayerCode]]:
        return type(self), (self._code,)

    @property
    def num_recorded(self) -> int:
        """The number of signatures with a recording."""
        return sum(isinstance(replay, Replay) for replay in self._replays.values())

    def outputs(self, layer: nn.Module, x: Tensor) -> list[Tensor] | None:
        """Returns the outputs of the layer's code by repeating its launches, or None where the code has to run."""
        if type(x) is not Tensor or not x.is_cuda or not x.is_contiguous() or _is_watched(x):
            return None
        if self._parts is None or not self._parts.are_current():
            self._parts = _Parts(layer)
            self._replays.clear()
        if self._parts.have_hooks():
            return None
        inputs = [x, *self._parts.parameters()]
        signature = _signature(layer, inputs)
        replay = self._replays.get(signature, 0)
        if isinstance(replay, int):
            replay = self._recorded(layer, inputs, signature, replay + 1)
        if replay is None or any(tensor.data_ptr() % ROW_ALIGNMENT for tensor in inputs):
            return None
        return replay(inputs, self._code.state(layer))

    def _recorded(self, layer: nn.Module, inputs: list[Tensor], signature: object, call: int) -> Any:
        """Returns the new recording of this signature, or None if it cannot or need not be recorded."""
        if not torch.is_grad_enabled() and call < _MIN_CALLS:
            self._replays[signature] = call
            return None
        problem = self._code.problem(layer, inputs[0]) or _problem_with(inputs)
        replay = None
        if problem is None and len(self._replays) < _MAX_SIGNATURES:
            try:
                # Hooks of the caller, as those of activation checkpointing, must not see what the recording saves.
                with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
                    replay = self._record(layer, inputs)
            except (UnavailableError, UnrecordableError, torch.OutOfMemoryError) as error:
                problem = str(error)
        if problem is not None:
            _LOG.info("the code of %s runs in every step, launches are not recorded: %s", type(layer).__name__, problem)
        self._replays[signature] = replay
        return replay

    def _record(self, layer: nn.Module, inputs: list[Tensor]) -> Any:
        assert self._parts is not None
        names, body, code = (
            [f"layer.{name}" for name in self._parts.names],
            _Body(layer, self._code.compute),
            self._code,
        )

        def function(tensors: list[Tensor]) -> list[Tensor]:
            return functional_call(body, dict(zip(names, tensors[1:], strict=True)), (tensors[0],))

        with code.undone(layer):  # everything is compiled here, which a capture does not allow
            expected, differentiable = _step(function, inputs)
        device = inputs[0].device
        stream = raw_stream(device)
        counters = counter_of_stream(device, stream)
        with recording_for(stream):
            recording = record(function, inputs, [*code.state(layer), *counters], differentiable)
        replay = Replay(recording, differentiable, device, counters)
        with code.undone(layer):
            repeated, _ = _step(lambda tensors: replay(tensors, code.state(layer)), inputs)
        if not all(map(_same_bits, expected, repeated)):
            raise UnrecordableError("repeated launches gave other results than the code")
        return replay


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


def _is_watched(x: Tensor) -> bool:
    """Returns True if something else follows what the layer's code does, or launches for another device."""
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.cuda.is_current_stream_capturing()
        or x.device.index != torch.cuda.current_device()
    )


def _problem_with(inputs: Sequence[Tensor]) -> str | None:
    device = inputs[0].device
    for tensor in inputs:
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.device != device or not tensor.is_contiguous():
            return f"a parameter is a {type(tensor).__name__} on {tensor.device}, contiguous: {tensor.is_contiguous()}"
    return None


def _signature(layer: nn.Module, inputs: Sequence[Tensor]) -> object:
    """Returns what the launches depend on besides the addresses and values of tensors, for comparison."""
    return (
        layer.training,
        torch.is_grad_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        raw_stream(inputs[0].device),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *[(tensor.shape, tensor.dtype, tensor.requires_grad, type(tensor)) for tensor in inputs],
    )


class _Body(nn.Module):
    """The code of a layer without the layer's own hooks."""

    def __init__(self, layer: nn.Module, compute: Callable[[Any, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.layer, self._compute = layer, compute

    def forward(self, x: Tensor) -> list[Tensor]:
        return self._compute(self.layer, x)
