"""The step of `moe` as programs: what follows a routing that somebody else has made, forward and backward.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, e local experts, N pairs this rank sends,
P rows of the pair buffer.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor

from sonic_ep.dispatch.bounded_steps import Step, exact_bound
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes
from sonic_ep.dispatch.speculation import SizeBound
from sonic_ep.expert_parallel_mlp import Call, Gradients, SavedForBackward, backward, forward
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import Forward
from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace
from sonic_ep.routing import INDEX_DTYPE, AsyncSplitSizes, GroupCounts, Routing, SplitSizes
from sonic_ep.steps.programs import USUAL_TOKENS, Later, Programs, Ranks, Sizes, StepPrograms, numbers_of
from sonic_ep.symmetric_memory import parts_made_by
from sonic_ep.transports import GroupTransport

_Dtypes = tuple[torch.dtype | None, ...]


class MoEWeights(NamedTuple):
    """The tensors of `moe` that are weights, as it takes them; lora: A1, B1, A2 and B2."""

    w1: Tensor
    up_eIH: Tensor | None
    w2: Tensor
    b1_eJ: Tensor | None
    b2_eH: Tensor | None
    lora_a1: Tensor | None = None
    lora_b1: Tensor | None = None
    lora_a2: Tensor | None = None
    lora_b2: Tensor | None = None

    def of_experts(self, layout: str) -> ExpertWeights:
        """layout: of w1 and w2, see `moe`."""
        w1, up_eIH, w2, b1_eJ, b2_eH, *lora = self
        if layout == "transposed":
            w1, w2 = w1.mT, w2.mT
        if layout == "concatenated":
            w1, up_eIH = w1.chunk(2, 1)
        updates = None if all(each is None for each in lora) else ExpertsLoRA(*lora)
        return ExpertWeights(w1, w2, b1_eJ, b2_eH, up_eIH, updates, transposed=layout == "transposed")

    @property
    def read(self) -> list[Tensor]:
        """Those that a program is given: up is read at its distance from the gate weights."""
        return [each for name, each in zip(self._fields, self, strict=True) if each is not None and name != "up_eIH"]

    def in_place(self) -> Self:
        """Returns these with split gate/up weights where kernels can read them."""
        if self.up_eIH is None:
            return self
        split_gate_up: Any = import_module("sonic_ep.kernels.experts.split_gate_up")
        gate, up = split_gate_up.readable(self.w1, self.up_eIH)
        return self._replace(w1=gate, up_eIH=up)

    def with_distance(self, sizes: Sequence[int]) -> Sizes:
        """Returns the sizes, with the bytes from gate to up if they are split."""
        return (*sizes,) if self.up_eIH is None else (*sizes, self.up_eIH.data_ptr() - self.w1.data_ptr())


class ExpertsKind(NamedTuple):
    """What the programs of a step depend on, besides sizes.

    rounded: whether `Routing.max_rows` bounds the rows. same_counts: rows and pairs are counted by one tensor.
    weights_dtype: of the weights of pairs. shapes: of `MoEWeights`, None for what does not exist. needs: see `backward`
    in expert_parallel_mlp.py. into: dtypes of the buffers to which backward adds dW1 and dW2. has_backward: whether
    there is one.
    """

    activation: str
    layout: str
    save_dispatched: bool
    rounded: bool
    same_counts: bool
    E: int
    H: int
    K: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    shapes: tuple[torch.Size | None, ...]
    needs: tuple[bool, ...]
    into: _Dtypes
    has_backward: bool
    device: torch.device
    ranks: Ranks | None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens and pairs of this rank; the bound of its rows, if rounded; on several ranks the bound of all
        sizes, or the rows of static buffers; and the distance of split gate/up weights."""
        T, N = USUAL_TOKENS, self.K * USUAL_TOKENS
        sizes = {"T": T, "N": N}
        sizes |= {"R": N} if self.rounded else {}
        if self.ranks is not None:
            sizes |= {"C": N} if self.ranks.is_static else {"M": T, "P": N, "V": N}
        return sizes | ({"D": 0} if self.shapes[1] is not None else {})


@final
class ExpertsPrograms:
    """The programs of one layer's experts. A copy starts without any.

    K: about how many experts a token has. group, transport: of the experts.
    """

    def __init__(self, K: int) -> None:
        self._K = K
        self._programs = StepPrograms(traced)
        self._ranks: Ranks | None = None
        self._generation = 0

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self._K,)

    @property
    def num_programs(self) -> int:
        return self._programs.num_programs

    def step(
        self,
        x_TH: Tensor,
        routing: Routing,
        weights: MoEWeights,
        into: tuple[Tensor | None, Tensor | None],
        call: Call,
        layout: str,
        ranks: Ranks | None = None,
        bound: SizeBound | None = None,
    ) -> "ExpertsStep | None":
        """Returns what runs this step, or None where the code has to.

        into: to which backward adds. call, layout: see functional.py. ranks, bound: on several; no bound with static
        buffers.
        """
        if _problem_with(x_TH, routing, weights, call, ranks) is not None:
            return None
        generation = 0 if ranks is None else ranks.symmetric.generation
        if self._ranks is None or ranks is None or not _same(self._ranks, ranks) or self._generation != generation:
            if ranks is not self._ranks:
                self._programs = StepPrograms(traced)
            self._ranks, self._generation = ranks, generation
        counts, grad = routing.counts, torch.is_grad_enabled()
        has = [grad and each is not None and each.requires_grad for each in weights]
        needs = has[0] or has[1], *has[2:5], has[5] or has[6], has[7] or has[8]
        kind = ExpertsKind(
            activation=call.activation.name,
            layout=layout,
            save_dispatched=call.save_dispatched and ranks is not None,
            rounded=routing.max_rows is not None,
            same_counts=counts.rows_SE is counts.pairs_SE,
            E=counts.rows_SE.shape[1],
            H=x_TH.shape[1],
            K=self._K,
            dtype=x_TH.dtype,
            weights_dtype=routing.weights_N.dtype,
            shapes=tuple([None if each is None else each.shape for each in weights]),
            needs=needs,
            into=_dtypes_of(into, needs),
            has_backward=grad and (any(needs) or x_TH.requires_grad or routing.weights_N.requires_grad),
            device=x_TH.device,
            ranks=self._ranks,
        )
        sizes = [routing.num_tokens, routing.token_ids_N.shape[0]]
        if routing.max_rows is not None:
            sizes.append(routing.max_rows)
        if ranks is not None:
            sizes += [routing.max_received or 0] if bound is None else bound
        programs = self._programs.find(kind, weights.with_distance(sizes))
        return None if programs is None else ExpertsStep(programs, kind, tuple(sizes), routing)


@dataclass(slots=True)
class ExpertsStep:
    """One step. sizes: without the distance of split weights, which may change until backward.

    begin_backward: what the group does in front of each.
    """

    programs: Programs
    kind: ExpertsKind
    sizes: Sizes
    routing: Routing | None
    begin_backward: Callable[[Tensor], None] | None = None

    def forward(self, x_TH: Tensor, weights_N: Tensor, weights: MoEWeights) -> tuple[Tensor, list[Tensor]]:
        """Returns out_TH and what backward needs, besides x and the weights. Called once."""
        routing, self.routing = self.routing, None
        assert routing is not None
        programs, ranks, counts, weights = self.programs, self.kind.ranks, routing.counts, weights.in_place()
        lists = [routing.token_ids_N, counts.rows_SE, *([] if self.kind.same_counts else [counts.pairs_SE])]
        given = [x_TH, weights_N, *lists, *([] if ranks is None else [counts.tokens_S]), *weights.read]
        given = [each.contiguous() for each in given]
        extra: dict[str, Callable[[], Tensor]] = {}
        if ranks is not None:
            ranks.symmetric.raise_if_lost()
            group, split_sizes = ranks.group, routing.split_sizes
            forward = routing.forward_in(group)
            self.begin_backward = _BeginBackward(group, forward._replace(waits=False))
            tokens = routing.num_tokens if ranks.is_static else self.sizes[-3]
            extra["regions"] = lambda: ranks.symmetric.starts_of_regions(tokens, x_TH.device)
            extra["sizes"] = lambda: cast(AsyncSplitSizes, split_sizes).on_device
        given += [extra[name]() for name in programs.forward.extra]
        saved = [given[number] for number in programs.saved_inputs]
        out_TH, *later = programs.forward.run(weights.with_distance(self.sizes), given)
        return out_TH, [*saved, *later]

    def backward(
        self,
        dout_TH: Tensor,
        rows: Tensor | None,
        saved: list[Tensor],
        weights: MoEWeights,
        into: tuple[Tensor | None, Tensor | None],
    ) -> Gradients:
        """Returns the gradients. rows: x_TH, or None if the received rows are in `saved`. saved: of forward; is
        emptied, so that memory is freed."""
        if self.begin_backward is not None:
            self.begin_backward(dout_TH)
        kind, programs, ranks, weights = self.kind, self.programs, self.kind.ranks, weights.in_place()
        dtypes, sizes = _dtypes_of(into, kind.needs), weights.with_distance(self.sizes)
        if ranks is not None:
            ranks.symmetric.raise_if_lost()
        moved = ranks is not None and ranks.symmetric.generation != programs.generation
        if moved or dtypes != kind.into:  # not those that forward has found
            programs = traced(kind._replace(into=dtypes), sizes)
        buffers = [each for each, dtype in zip(into, dtypes, strict=True) if each is not None and dtype is not None]
        inputs = [dout_TH.contiguous(), *([] if rows is None else [rows]), *weights.read, *buffers, *saved]
        saved.clear()
        found = iter(programs.backward[dtypes].run(sizes, inputs))
        dx_TH, dweights_N = next(found), next(found)
        of_w1, of_w2, of_b1, of_b2, of_lora1, of_lora2 = kind.needs
        dw = [
            given if dtype is not None else next(found) if needed else None
            for needed, given, dtype in zip((of_w1, of_w2), into, dtypes, strict=True)
        ]
        others = [next(found) if needed else None for needed in (of_b1, of_b2, of_lora1, of_lora1, of_lora2, of_lora2)]
        return Gradients(dx_TH, dweights_N, dw[0], dw[1], others[0], others[1], ExpertsLoRA(*others[2:]))


class _BeginBackward(NamedTuple):
    group: EPGroup
    forward: Forward

    def __call__(self, dout_TH: Tensor) -> None:
        self.group.begin_backward(self.forward, dout_TH)


def _problem_with(x_TH: Tensor, routing: Routing, weights: MoEWeights, call: Call, ranks: Ranks | None) -> str | None:
    """Returns why the code has to run, or None. x and weights have passed the checks of `moe`."""
    sizes = routing.split_sizes
    if ranks is not None and (sizes is None or not sizes.may_launch_unchecked):
        return "the routing has to be checked first"
    if not x_TH.is_cuda or x_TH.get_device() != torch.cuda.current_device():
        return "x is not on the current GPU"
    if not x_TH.shape[0] or not routing.token_ids_N.shape[0]:
        return "there is no pair"
    if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return "inference or dispatch mode"
    if any(each is not None and not each.is_contiguous() for each in weights):
        return "a weight is not contiguous"
    if operations_for(x_TH, weights.w2, call.activation) is reference:
        return "there are no kernels"
    return None


@dataclass(slots=True)
class RunsAs:
    """How one call of `moe` may run. ranks, step: on several; see bounded_steps.py. as_program: whether it has."""

    programs: ExpertsPrograms
    ranks: Ranks | None = None
    step: Step | None = None
    as_program: bool = False

    @classmethod
    def of(
        cls, programs: ExpertsPrograms, group: EPGroup, transport: LocalTransport | GroupTransport, step: Step | None
    ) -> Self | None:
        """Returns None where the code has to run: on several ranks without a step."""
        if isinstance(transport, LocalTransport):
            return cls(programs)
        via = None if step is None else step.via
        return None if via is None else cls(programs, Ranks(group, transport, via.transport, via.is_static), step)

    def find(
        self,
        x_TH: Tensor,
        routing: Routing,
        weights: MoEWeights,
        into: tuple[Tensor | None, Tensor | None],
        call: Call,
        layout: str,
    ) -> ExpertsStep | None:
        """Returns `ExpertsPrograms.step` of these arguments. A collective if the step is exact: the host waits."""
        bound, step = None, self.step
        if self.ranks is not None and step is not None:
            bound = step.bound
            if step.is_exact and routing.split_sizes is not None:
                bound = exact_bound(routing.split_sizes.read())
                step.via.transport.reserve(x_TH.shape[1] * x_TH.element_size(), bound)
            elif not self.ranks.is_static and x_TH.shape[0] > step.tokens:
                return None
        found = self.programs.step(x_TH, routing, weights, into, call, layout, self.ranks, bound)
        self.as_program = found is not None
        return found

    def exceeded(self, routing: Routing) -> bool:
        """Returns True if the program has computed nothing, as the step needed more. Call it once that is checked."""
        if not self.as_program or self.step is None or routing.split_sizes is None:
            return False
        return not self.step.holds(routing.split_sizes.read())


def _same(one: Ranks, two: Ranks) -> bool:
    fields = "group", "transport", "symmetric", "is_static"
    return all(getattr(one, name) is getattr(two, name) for name in fields)


def _dtypes_of(into: Sequence[Tensor | None], needs: tuple[bool, ...]) -> _Dtypes:
    return tuple([None if each is None or not need else each.dtype for each, need in zip(into, needs[:2], strict=True)])


def traced(kind: ExpertsKind, sizes: Sizes) -> Programs:
    """Traces the programs of this kind. The sizes are those of the traced step."""
    device, ranks, alone, usual = kind.device, kind.ranks, EPGroup.alone(), kind.usual_sizes
    transport = LocalTransport() if ranks is None else ranks.transport
    trace = Trace(device, dict(zip(usual, sizes, strict=True)), usual)
    activation = activation_named(kind.activation)
    call = Call(transport, alone, activation, kind.save_dispatched, tile_aligned=kind.rounded)
    S, rank = (1, 0) if ranks is None else (ranks.group.size, ranks.group.rank)
    T, N = trace.sizes[:2]
    with trace, ExitStack() as stack:
        x: Any = trace.input((T, kind.H), kind.dtype)
        weights_N, token_ids_N = trace.input((N,), kind.weights_dtype), trace.input((N,), INDEX_DTYPE)
        rows_SE: Any = trace.input((S, kind.E), torch.int64)
        pairs_SE: Any = rows_SE if kind.same_counts else trace.input((S, kind.E), torch.int64)
        tokens_S: Any = rows_SE if ranks is None else trace.input((S,), torch.int64)
        weights, read = _weights(trace, kind)
        counted = [rows_SE, *([] if kind.same_counts else [pairs_SE]), *([] if ranks is None else [tokens_S])]
        given = numbers_of([x, weights_N, token_ids_N, *counted, *read])
        del counted, read
        split_sizes = None
        if ranks is not None:
            stack.enter_context(parts_made_by(trace.fixed_part))
            if not ranks.is_static:
                bound = [trace.size(name) for name in ("M", "P", "V")]
                stack.enter_context(ranks.symmetric.bounded_by(SizeBound(*bound)))
                split_sizes = _SizesOnDevice(trace, S)
        counts = GroupCounts(rows_SE, rows_SE, pairs_SE, tokens_S, tokens_S, tokens_S)
        routing = Routing(
            *cast(tuple[Any, Any], (weights_N, token_ids_N)),
            counts,
            cast(int, T),
            cast(int | None, trace.size("R")),
            cast(int | None, trace.size("C")),
            cast(AsyncSplitSizes | None, split_sizes),
        )
        prepared = transport.prepare(routing, plan_for(counts, rank), x)
        out, saved = forward(x, prepared, weights.of_experts(kind.layout), call)
        del prepared
        handle_sizes, later, inputs = saved.handle.without_lists(), list[Any](), list[Slot]()
        if kind.has_backward:
            later += [saved.rows] if kind.save_dispatched else []
            later += [saved.h_PJ, saved.weights_P, *saved.handle.lists()]
        is_input = [slot.buffer.index in given for slot in later]
        inputs = [slot for slot, found in zip(later, is_input, strict=True) if found]
        own = [slot for slot, found in zip(later, is_input, strict=True) if not found]
        trace.finish()
    program = Program(trace, given, cast(list[Slot], [out]), own)
    saved_inputs = tuple([given.index(number) for number in numbers_of(inputs)])
    generation = 0 if ranks is None else ranks.symmetric.generation
    if not kind.has_backward:
        return Programs(program, {}, generation, saved_inputs)
    described = [Later(slot.shape, slot.dtype, slot.strides, None) for slot in inputs], Later.of(own, program)
    of_backward = _traced_backward(kind, trace, *described, is_input, handle_sizes, call)
    return Programs(program, {kind.into: Program(*of_backward)}, generation, saved_inputs)


def _traced_backward(
    kind: ExpertsKind,
    of_forward: Trace,
    of_inputs: list[Later],
    later: list[Later],
    is_input: list[bool],
    handle_sizes: HandleSizes,
    call: Call,
) -> tuple[Trace, list[int], list[Any]]:
    """of_inputs, later: what forward leaves, in two parts; is_input: their order."""
    trace = Trace.like(of_forward)
    T = trace.sizes[0]
    with trace, parts_made_by(trace.fixed_part):
        dout: Any = trace.input((T, kind.H), kind.dtype)
        x: Any = None if kind.save_dispatched else trace.input((T, kind.H), kind.dtype)
        weights, read = _weights(trace, kind)
        shapes = kind.shapes[0], kind.shapes[2]
        into: list[Any] = [
            None if dtype is None else trace.input(tuple(cast(torch.Size, shape)), dtype)
            for shape, dtype in zip(shapes, kind.into, strict=True)
        ]
        of_forward_inputs = [trace.input(each.shape, each.dtype, each.strides) for each in of_inputs]
        saved, own = Later.inputs(trace, later)
        buffers = [each for each in into if each is not None]
        inputs = numbers_of([dout, *([] if x is None else [x]), *read, *buffers, *of_forward_inputs, *own])
        left: list[Any] = [(of_forward_inputs if found else saved).pop(0) for found in is_input]
        del own, saved, of_forward_inputs, buffers, read
        rows: Any = left.pop(0) if kind.save_dispatched else x
        h, weights_P, *lists = left
        del left
        state = SavedForBackward(rows, h, weights_P, handle_sizes.with_lists(lists))
        del h, weights_P, rows, x
        grads = backward(dout, state, weights.of_experts(kind.layout), call, kind.needs, (into[0], into[1]))
        dw1, dw2 = (None if dtype is not None else each for each, dtype in zip(grads[2:4], kind.into, strict=True))
        found = grads.dx_TH, grads.dweights_N, dw1, dw2, grads.db1_eJ, grads.db2_eH, *grads.lora.tensors()
        outputs: list[Any] = [each for each in found if each is not None]
        trace.finish()
    return trace, inputs, outputs


class _SizesOnDevice:
    """In place of AsyncSplitSizes: the sizes of the step, which nobody reads while it is traced."""

    exchange, is_ready, may_launch_unchecked = 0, False, True

    def __init__(self, trace: Trace, num_ranks: int) -> None:
        length = SplitSizes.num_values(num_ranks, import_module("sonic_ep.kernels.route.status.reference").HEADER)
        self.on_device = trace.named("sizes", (length,), torch.int64)


def _weights(trace: Trace, kind: ExpertsKind) -> tuple[MoEWeights, list[Slot]]:
    """Returns slots for the weights, and those that a run is given."""
    names = MoEWeights._fields
    slots: dict[str, Any] = {
        name: None if shape is None or name == "up_eIH" else trace.input(tuple(shape), kind.dtype)
        for name, shape in zip(names, kind.shapes, strict=True)
    }
    read = [each for each in slots.values() if each is not None]
    if kind.shapes[1] is not None:
        gate = slots["w1"]
        slots["up_eIH"] = Slot(gate.buffer, gate.shape, gate.strides, trace.size("D") // kind.dtype.itemsize)
    return MoEWeights(**slots), read
