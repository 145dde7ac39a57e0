"""The programs of `moe`: what they depend on, and how the code of both passes is traced.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, e local experts, N pairs this rank sends,
P rows of the pair buffer.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib import import_module
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import DispatchHandle, HandleSizes, PreparedDispatch, Splits
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward, backward, forward
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace
from sonic_ep.kernels.route.status.reference import HEADER
from sonic_ep.routing import INDEX_DTYPE, AsyncSplitSizes, GroupCounts, Routing, SplitSizes
from sonic_ep.steps.programs import USUAL_TOKENS, Later, Programs, Ranks, Sizes, numbers_of, slots_of
from sonic_ep.symmetric_memory import parts_made_by

Dtypes = tuple[torch.dtype | None, ...]
_EXPERT_STARTS = 4  # its place in DispatchHandle.lists


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

    @classmethod
    def of_layer(cls, w1: Tensor, w2: Tensor, b1_eJ: Tensor | None, b2_eH: Tensor | None) -> Self:
        """Returns those of a layer, which has no others."""
        return cls(w1, None, w2, b1_eJ, b2_eH)

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
        split_gate_up = import_module("sonic_ep.kernels.experts.split_gate_up")
        gate, up = split_gate_up.readable(self.w1, self.up_eIH)
        return self._replace(w1=gate, up_eIH=up)

    def with_distance(self, sizes: Sequence[int]) -> Sizes:
        """Returns the sizes, with the bytes from gate to up if they are split. If up is in front, those of a copy."""
        if self.up_eIH is None:
            return (*sizes,)
        distance = self.up_eIH.data_ptr() - self.w1.data_ptr()
        return (*sizes, distance if distance > 0 else self.w1.nbytes)


class ExpertsKind(NamedTuple):
    """All that the programs of a step depend on, besides sizes.

    rounded: whether `Routing.max_rows` bounds the rows. same_counts: rows and pairs are counted by one tensor.
    weights_dtype: of the weights of pairs. prepared: of what the code has prepared, if the host knows its sizes.
    shapes: of `MoEWeights`, None for what does not exist. needs: see `backward` in expert_parallel_mlp.py. into: dtypes
    of the buffers to which backward adds dW1 and dW2. has_backward: whether there is one.
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
    into: Dtypes
    has_backward: bool
    device: torch.device
    ranks: Ranks | None
    prepared: "PreparedKind | None" = None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens and pairs of this rank; the bound of its rows, if rounded; on several ranks the bound of all
        sizes, or the rows of static buffers; and the distance of split gate/up weights."""
        T, N = USUAL_TOKENS, self.K * USUAL_TOKENS
        sizes = {"T": T, "N": N}
        if self.prepared is not None:
            sizes |= self.prepared.usual_sizes(N)
        elif self.rounded:
            sizes["R"] = N
        if self.ranks is not None and self.prepared is None:
            sizes |= {"C": N} if self.ranks.is_static else {"M": T, "P": N, "V": N}
        return sizes | ({"D": 0} if self.shapes[1] is not None else {})


class PreparedKind(NamedTuple):
    """The code's preparation. splits: how many split sizes the fields of Splits have. num_lists: of the handle.

    Their sizes are "A", the rows that arrive, "l0", "l1", ... for the lengths of the lists, "w" for the length of the
    weights, and "s0", "s1", ... for all split sizes.
    """

    splits: tuple[int, ...]
    num_lists: int

    @classmethod
    def of(cls, handle: DispatchHandle) -> Self:
        return cls(tuple(map(len, _fields_of(handle.splits))), len(handle.lists()))

    def usual_sizes(self, N: int) -> dict[str, int]:
        lists = {f"l{number}": N for number in range(self.num_lists)}
        return {"A": N, **lists, "w": N, **{f"s{number}": N for number in range(sum(self.splits))}}

    @staticmethod
    def sizes(prepared: PreparedDispatch) -> list[int]:
        handle = prepared.handle
        lengths = [len(each) for each in (*handle.lists(), prepared.weights_P)]
        return [handle.num_rows, *lengths, *[size for field in _fields_of(handle.splits) for size in field]]

    def traced(self, trace: Trace, kind: "ExpertsKind") -> tuple[PreparedDispatch, list[Slot]]:
        """Returns slots in place of its tensors, and those that a run is given."""
        assert kind.shapes[0] is not None
        lengths = [trace.size(f"l{number}") for number in range(self.num_lists)]
        lengths[_EXPERT_STARTS] = kind.shapes[0][0] + 1
        inputs, weights_dtype = [trace.input((length,), INDEX_DTYPE) for length in lengths], kind.weights_dtype
        weights_P, number, parts = trace.input((trace.size("w"),), weights_dtype), 0, list[tuple[int, ...]]()
        for length in self.splits:
            parts.append(tuple([trace.size(f"s{each}") for each in range(number, number + length)]))
            number += length
        T, N, A = (trace.size(name) for name in ("T", "N", "A"))
        sizes = HandleSizes(splits=Splits(*parts), num_tokens=T, num_rows=A, num_listed=N)
        handle = sizes.with_lists(cast(list[Tensor], inputs))
        return PreparedDispatch(handle, cast(Tensor, weights_P)), [*inputs, weights_P]


def _fields_of(splits: Splits) -> list[tuple[int, ...]]:
    return [getattr(splits, each.name) for each in fields(splits)]


def dtypes_of(into: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Dtypes:
    """Returns the dtypes of the buffers to which backward adds dW1 and dW2. needs: see `ExpertsKind`."""
    return tuple([None if each is None or not need else each.dtype for each, need in zip(into, needs[:2], strict=True)])


def traced(kind: ExpertsKind, sizes: Sizes) -> Programs:
    """Traces the programs of this kind. sizes: of the traced step."""
    device, ranks, alone, usual = kind.device, kind.ranks, EPGroup.alone(), kind.usual_sizes
    transport = LocalTransport() if ranks is None else ranks.transport
    trace = Trace(device, dict(zip(usual, sizes, strict=True)), usual)
    activation = activation_named(kind.activation)
    call = Call(transport, alone, activation, kind.save_dispatched, tile_aligned=kind.rounded)
    with trace, ExitStack() as stack:
        x = cast(Tensor, trace.input((trace.size("T"), kind.H), kind.dtype))
        if ranks is not None:
            stack.enter_context(parts_made_by(trace.fixed_part))
        if kind.prepared is not None:
            prepared, lists = kind.prepared.traced(trace, kind)
            weights, read = _weights(trace, kind)
        else:
            routing, lists = _routing(trace, kind)
            weights, read = _weights(trace, kind)
            if ranks is not None and ranks.symmetric is not None and not ranks.is_static:
                bound = [trace.size(name) for name in ("M", "P", "V")]
                stack.enter_context(ranks.symmetric.bounded_by(SizeBound(*bound)))
            rank = 0 if ranks is None else ranks.group.rank
            prepared = transport.prepare(routing, plan_for(routing.counts, rank), x)
            del routing
        given = numbers_of([x, *lists, *read])
        del lists, read
        out, saved = forward(x, prepared, weights.of_experts(kind.layout), call)
        del prepared
        handle_sizes, later = saved.handle.without_lists(), list[Slot]()
        if kind.has_backward:
            rows = saved.rows if kind.save_dispatched else None
            later = slots_of([rows, saved.h_PJ, saved.weights_P, *saved.handle.lists()])
        is_input = [slot.buffer.index in given for slot in later]
        inputs = [slot for slot, found in zip(later, is_input, strict=True) if found]
        own = [slot for slot, found in zip(later, is_input, strict=True) if not found]
        trace.finish()
    program = Program(trace, given, slots_of([out]), own)
    saved_inputs = tuple([given.index(number) for number in numbers_of(inputs)])
    generation = 0 if ranks is None or ranks.symmetric is None else ranks.symmetric.generation
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
) -> tuple[Trace, list[int], list[Slot]]:
    """of_inputs, later: what forward leaves, in two parts; is_input: their order."""
    trace = Trace.like(of_forward)
    T = trace.sizes[0]
    with trace, parts_made_by(trace.fixed_part):
        dout = cast(Tensor, trace.input((T, kind.H), kind.dtype))
        x = None if kind.save_dispatched else cast(Tensor, trace.input((T, kind.H), kind.dtype))
        weights, read = _weights(trace, kind)
        shapes = kind.shapes[0], kind.shapes[2]
        into = [
            None if dtype is None else cast(Tensor, trace.input(tuple(cast(torch.Size, shape)), dtype))
            for shape, dtype in zip(shapes, kind.into, strict=True)
        ]
        of_forward_inputs = [trace.input(each.shape, each.dtype, each.strides) for each in of_inputs]
        saved, own = Later.inputs(trace, later)
        buffers = [each for each in into if each is not None]
        inputs = numbers_of([dout, *([] if x is None else [x]), *read, *buffers, *of_forward_inputs, *own])
        left = cast(list[Tensor], [(of_forward_inputs if found else saved).pop(0) for found in is_input])
        del own, saved, of_forward_inputs, buffers, read
        rows = left.pop(0) if x is None else x
        h, weights_P, *lists = left
        del left
        state = SavedForBackward(rows, h, weights_P, handle_sizes.with_lists(lists))
        del h, weights_P, rows, x
        grads = backward(dout, state, weights.of_experts(kind.layout), call, kind.needs, (into[0], into[1]))
        dw1, dw2 = (None if dtype is not None else each for each, dtype in zip(grads[2:4], kind.into, strict=True))
        found = grads.dx_TH, grads.dweights_N, dw1, dw2, grads.db1_eJ, grads.db2_eH, *grads.lora.tensors()
        outputs = slots_of(found)
        trace.finish()
    return trace, inputs, outputs


def _routing(trace: Trace, kind: ExpertsKind) -> tuple[Routing, list[Slot]]:
    """Returns a routing of slots, and those that a run is given."""
    ranks, N = kind.ranks, trace.size("N")
    S = 1 if ranks is None else ranks.group.size
    weights_N, token_ids_N = trace.input((N,), kind.weights_dtype), trace.input((N,), INDEX_DTYPE)
    rows_SE = trace.input((S, kind.E), torch.int64)
    pairs_SE = rows_SE if kind.same_counts else trace.input((S, kind.E), torch.int64)
    tokens_S = rows_SE if ranks is None else trace.input((S,), torch.int64)
    lists = [weights_N, token_ids_N, rows_SE, *([] if kind.same_counts else [pairs_SE])]
    lists += [] if ranks is None else [tokens_S]
    fields = cast(list[Tensor], [rows_SE, rows_SE, pairs_SE, tokens_S, tokens_S, tokens_S])
    is_bounded = ranks is not None and not ranks.is_static
    sizes = cast(AsyncSplitSizes, _SizesOnDevice(trace, S)) if is_bounded else None
    R, C = (trace.size(name) if name in trace.names else None for name in "RC")
    weights, tokens = cast(list[Tensor], [weights_N, token_ids_N])
    return Routing(weights, tokens, GroupCounts(*fields), trace.size("T"), R, C, sizes), lists


class _SizesOnDevice:
    """In place of AsyncSplitSizes: the sizes of the step, which nobody reads while it is traced."""

    exchange, may_launch_unchecked = 0, True

    def __init__(self, trace: Trace, num_ranks: int) -> None:
        length = SplitSizes.num_values(num_ranks, HEADER)
        self.on_device = trace.named("sizes", (length,), torch.int64)


def _weights(trace: Trace, kind: ExpertsKind) -> tuple[MoEWeights, list[Slot]]:
    """Returns slots for the weights, and those that a run is given."""
    names = MoEWeights._fields
    slots = {
        name: None if shape is None or name == "up_eIH" else trace.input(tuple(shape), kind.dtype)
        for name, shape in zip(names, kind.shapes, strict=True)
    }
    read = [each for each in slots.values() if each is not None]
    if kind.shapes[1] is not None:
        gate = read[0]
        slots["up_eIH"] = Slot(gate.buffer, gate.shape, gate.strides, trace.size("D") // kind.dtype.itemsize)
    return MoEWeights(**cast(dict[str, Tensor], slots)), read
