"""The step of `moe` as programs: what follows a routing that somebody else has made, forward and backward.

Legend: T tokens on this rank, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, cast, final

import torch
from torch import Tensor

from sonic_ep.dispatch.bounded_steps import Step
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes, PreparedDispatch
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.expert_parallel_mlp import Call, Gradients, SavedForBackward, backward, forward
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import Forward
from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.routing import AsyncSplitSizes, Routing
from sonic_ep.steps.experts_trace import ExpertsKind, MoEWeights, PreparedKind, dtypes_of, traced
from sonic_ep.steps.programs import Programs, Ranks, Sizes, StepPrograms, may_run
from sonic_ep.steps.topk_step import TopKStep
from sonic_ep.transports import GroupTransport


class MoECall(NamedTuple):
    """The arguments of `moe` in one call. into: the buffers to which backward adds dW1 and dW2."""

    x_TH: Tensor
    routing: Routing
    weights: MoEWeights
    into: tuple[Tensor | None, Tensor | None]
    call: Call
    layout: str


@final
class ExpertsPrograms:
    """The programs of one layer's experts. A copy starts without any.

    K: about how many experts a token has.
    """

    def __init__(self, K: int) -> None:
        self._K = K
        self._programs = StepPrograms(traced)

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self._K,)

    @property
    def num_programs(self) -> int:
        return self._programs.num_programs

    def step(
        self,
        given: MoECall,
        ranks: Ranks | None = None,
        bound: SizeBound | None = None,
        prepared: PreparedDispatch | None = None,
        *,
        has_backward: bool | None = None,
    ) -> "ExpertsStep | None":
        """Returns what runs this step, or None where the code has to.

        ranks, bound: on several; no bound with static buffers. prepared: by the transport, if that needs its sizes on
        the host. has_backward: whether one follows; default: whether something given needs a gradient.
        """
        x_TH, routing, weights, into, call, layout = given
        if not _may_run(x_TH, routing, weights, call, ranks):
            return None
        of_prepared = [] if prepared is None else PreparedKind.sizes(prepared)
        if prepared is not None and not all(of_prepared[: len(prepared.handle.lists()) + 2]):
            return None  # there is a list without an entry
        counts, grad = routing.counts, torch.is_grad_enabled() if has_backward is None else has_backward
        has = [grad and each is not None and each.requires_grad for each in weights]
        needs = has[0] or has[1], *has[2:5], has[5] or has[6], has[7] or has[8]
        if has_backward is None:
            has_backward = grad and (any(needs) or x_TH.requires_grad or routing.weights_N.requires_grad)
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
            into=dtypes_of(into, needs),
            has_backward=has_backward,
            device=x_TH.device,
            ranks=None if ranks is None else self._programs.known(ranks),
            prepared=None if prepared is None else PreparedKind.of(prepared.handle),
        )
        sizes = [routing.num_tokens, routing.token_ids_N.shape[0], *of_prepared]
        if prepared is None and routing.max_rows is not None:
            sizes.append(routing.max_rows)
        if ranks is not None and prepared is None:
            sizes += [routing.max_received or 0] if bound is None else bound
        programs = self._programs.find(kind, weights.with_distance(sizes))
        return None if programs is None else ExpertsStep(programs, kind, tuple(sizes), routing, prepared)


@dataclass(slots=True)
class ExpertsStep:
    """One step. sizes: without the distance of split weights, which may change until backward.

    begin_backward: what the group does in front of each.
    """

    programs: Programs
    kind: ExpertsKind
    sizes: Sizes
    routing: Routing | None
    prepared: PreparedDispatch | None = None
    begin_backward: Callable[[Tensor], None] | None = None

    @property
    def saves_x(self) -> bool:
        """Whether backward needs x."""
        return not self.kind.save_dispatched

    def forward(
        self, x_TH: Tensor, weights_N: Tensor, weights: MoEWeights, *, needs_output: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns out_TH and what backward needs, besides x and the weights. Called once.

        needs_output: see `forward` in expert_parallel_mlp.py.
        """
        routing, prepared, self.routing, self.prepared = self.routing, self.prepared, None, None
        assert routing is not None
        programs, ranks, weights = self.programs, self.kind.ranks, weights.in_place()
        given = [x_TH, *self._lists(routing, weights_N, prepared), *weights.read]
        given = [each.contiguous() for each in given]
        if ranks is not None:
            forward = routing.forward_in(ranks.group)
            self.begin_backward = _BeginBackward(ranks.group, forward._replace(waits=ranks.symmetric is None))
        if ranks is not None and ranks.symmetric is not None:
            ranks.symmetric.raise_if_lost()
            symmetric, split_sizes = ranks.symmetric, routing.split_sizes
            tokens = routing.num_tokens if ranks.is_static else self.sizes[-3]
            extra: dict[str, Callable[[], Tensor]] = {
                "regions": lambda: symmetric.starts_of_regions(tokens, x_TH.device),
                "sizes": lambda: cast(AsyncSplitSizes, split_sizes).on_device,
            }
            given += [extra[name]() for name in programs.forward.extra]
        saved = [given[number] for number in programs.saved_inputs]
        run = programs.forward.run if needs_output else programs.forward.run_without_output
        out_TH, *later = run(weights.with_distance(self.sizes), given)
        return out_TH, [*saved, *later]

    def _lists(self, routing: Routing, weights_N: Tensor, prepared: PreparedDispatch | None) -> list[Tensor]:
        if prepared is not None:
            return [*prepared.handle.lists(), prepared.weights_P]
        counts = routing.counts
        lists = [weights_N, routing.token_ids_N, counts.rows_SE]
        lists += [] if self.kind.same_counts else [counts.pairs_SE]
        return lists if self.kind.ranks is None else [*lists, counts.tokens_S]

    def backward(
        self,
        dout_TH: Tensor,
        rows: Tensor | None,
        saved: list[Tensor],
        weights: MoEWeights,
        into: tuple[Tensor | None, Tensor | None],
        needs: Sequence[bool],
    ) -> Gradients:
        """Returns the gradients. rows: x_TH, or None if the received rows are in `saved`. saved: of forward; is
        emptied, so that memory is freed. needs: see `backward` in expert_parallel_mlp.py."""
        if self.begin_backward is not None:
            self.begin_backward(dout_TH)
        kind, programs, ranks, weights = self.kind, self.programs, self.kind.ranks, weights.in_place()
        dtypes, sizes = dtypes_of(into, kind.needs), weights.with_distance(self.sizes)
        moved = False
        if ranks is not None and ranks.symmetric is not None:
            ranks.symmetric.raise_if_lost()
            moved = ranks.symmetric.generation != programs.generation
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


@dataclass(slots=True)
class ExpertsCode:
    """A step that the code runs. layout: of the weights. prepared: by the transport, if it has been called."""

    call: Call
    layout: str
    routing: Routing | None
    prepared: PreparedDispatch | None = None
    handle_sizes: HandleSizes | None = None

    @property
    def saves_x(self) -> bool:
        """See `ExpertsStep`."""
        return not self.call.save_dispatched

    def forward(
        self, x_TH: Tensor, weights_N: Tensor, weights: MoEWeights, *, needs_output: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """See `ExpertsStep`."""
        call, routing, prepared, self.routing, self.prepared = self.call, self.routing, self.prepared, None, None
        if prepared is None:
            assert routing is not None
            prepared = call.transport.prepare(routing, plan_for(routing.counts, call.group.rank), x_TH)
        out_TH, state = forward(x_TH, prepared, weights.of_experts(self.layout), call, needs_output=needs_output)
        self.handle_sizes = state.handle.without_lists()
        rows = [state.rows] if call.save_dispatched else []
        return out_TH, [*rows, *state.pop(), *state.handle.lists()]

    def backward(
        self,
        dout_TH: Tensor,
        rows: Tensor | None,
        saved: list[Tensor],
        weights: MoEWeights,
        into: tuple[Tensor | None, Tensor | None],
        needs: Sequence[bool],
    ) -> Gradients:
        """See `ExpertsStep`."""
        rows = saved.pop(0) if rows is None else rows
        h_PJ, weights_P, *lists = saved
        saved.clear()
        assert self.handle_sizes is not None
        state = SavedForBackward(rows, h_PJ, weights_P, self.handle_sizes.with_lists(lists))
        del h_PJ, weights_P, rows
        return backward(dout_TH, state, weights.of_experts(self.layout), self.call, needs, into)


class _BeginBackward(NamedTuple):
    group: EPGroup
    forward: Forward

    def __call__(self, dout_TH: Tensor) -> None:
        self.group.begin_backward(self.forward, dout_TH)


def _may_run(x_TH: Tensor, routing: Routing, weights: MoEWeights, call: Call, ranks: Ranks | None) -> bool:
    """Returns False if the code has to run. x and weights have passed the checks of `moe`."""
    sizes = routing.split_sizes
    if ranks is not None and ranks.symmetric is not None and (sizes is None or not sizes.may_launch_unchecked):
        return False
    if not may_run(x_TH) or not routing.token_ids_N.shape[0]:
        return False
    if any(each is not None and not each.is_contiguous() for each in weights):
        return False
    return operations_for(x_TH, weights.w2, call.activation) is not reference


@dataclass(slots=True)
class RunsAs:
    """How one call of `moe` may run. ranks, step: on several; see bounded_steps.py.

    as_program: whether it has. prepared: what the transport has prepared, if the host has to know sizes. routes: how
    the routing may run, if it is of a framework's top-K.
    """

    programs: ExpertsPrograms
    ranks: Ranks | None = None
    step: Step | None = None
    as_program: bool = False
    prepared: PreparedDispatch | None = None
    routes: TopKStep | None = None

    @classmethod
    def of(
        cls, programs: ExpertsPrograms, group: EPGroup, transport: LocalTransport | GroupTransport, step: Step | None
    ) -> Self:
        """step: None where there is no bound."""
        if isinstance(transport, LocalTransport):
            return cls(programs)
        if step is None:
            return cls(programs, Ranks(group, transport, None))
        return cls(programs, Ranks(group, transport, step.via.transport, step.via.is_static), step)

    def find(self, given: MoECall) -> ExpertsStep | None:
        """Returns `ExpertsPrograms.step` of this call. A collective if a transport sends its lists."""
        bound, step, (x_TH, routing, *_) = None, self.step, given
        if self.ranks is not None and step is None:
            self._prepare(x_TH, routing, self.ranks)
            if self.prepared is None:
                return None  # symmetric memory, of which no sizes are known yet
        if self.ranks is not None and step is not None:
            bound = step.bound
            if not self.ranks.is_static and x_TH.shape[0] > step.tokens:
                return None
        found = self.programs.step(given, self.ranks, bound, self.prepared)
        self.as_program = found is not None
        return found

    def _prepare(self, x_TH: Tensor, routing: Routing, ranks: Ranks) -> None:
        """Lets a transport over torch.distributed send its lists, on GPUs."""
        if x_TH.is_cuda and isinstance(ranks.transport.chosen(x_TH.device), CollectiveTransport):
            with torch.no_grad():
                self.prepared = ranks.transport.prepare(routing, plan_for(routing.counts, ranks.group.rank))

    def exceeded(self, routing: Routing) -> bool:
        """Returns True if the program has computed nothing, as the step needed more. Call it once that is checked."""
        if not self.as_program or self.step is None or routing.split_sizes is None:
            return False
        return not self.step.holds(routing.split_sizes.read())
