"""The step of a layer as programs: from x and all weights to y and the auxiliary loss, one function for autograd.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from sonic_ep.dispatch.checkpoint_regions import SavingForward
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward, backward, forward
from sonic_ep.first_order import Context, first_order
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace
from sonic_ep.routing import GroupCounts
from sonic_ep.steps.programs import Later, Programs, Sizes, numbers_of, slots_of
from sonic_ep.steps.router_trace import Kind, traced_route, traced_route_gradients, traced_weights
from sonic_ep.symmetric_memory import parts_made_by

_NUM_STATISTICS = 2 + len(GroupCounts._fields)
MAX_TOKENS = 2**20


@dataclass(slots=True)
class StepCall:
    """One call. expert_bias_E: if there is one. extra: inputs by name. begin_backward: called before each backward.

    statistics, lists: of its routing, once it has been called.
    """

    expert_bias_E: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    begin_backward: Callable[[], None] | None = None
    statistics: list[Tensor] = field(default_factory=list)
    lists: Callable[[], list[Tensor]] | None = None


def run(
    programs: Programs, kind: Kind, sizes: Sizes, call: StepCall, *tensors: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns y_TH, the auxiliary loss, and entropy_T, token_ids_N and the fields of GroupCounts.

    programs: of `StepPrograms.find`. call: gets the lists of pairs. tensors: x_TH, then the weights that are present.
    """
    y_TH, loss = _Step.apply(programs, kind, sizes, call, *tensors)
    return y_TH, loss, call.statistics


_ForBackward = tuple[Programs, Kind, Sizes, Callable[[], None] | None]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[_ForBackward], programs: Programs, kind: Kind, sizes: Sizes, call: StepCall, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = [*inputs] if call.expert_bias_E is None else [*inputs, call.expert_bias_E]
        given += [call.extra[name] for name in programs.forward.extra]
        saving = SavingForward.present(
            has_backward=bool(programs.backward), num_ranks=1 if kind.ranks is None else kind.ranks.group.size
        )
        run = programs.forward.run if saving.needs_output else programs.forward.run_without_output
        y_TH, loss, *rest = run(sizes, given)
        call.statistics, later = rest[:_NUM_STATISTICS], rest[_NUM_STATISTICS:]
        call.lists = functools.partial(programs.lists, later, sizes) if programs.num_lists else None
        if programs.backward:
            ctx.save_for_backward(*saving.noted([*inputs, *programs.saved(later)]))
        ctx.call = programs, kind, sizes, call.begin_backward
        ctx.set_materialize_grads(False)
        return y_TH, loss

    @staticmethod
    @first_order
    def backward(ctx: Context[_ForBackward], *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        programs, kind, sizes, begin_backward = ctx.call
        if begin_backward is not None:
            begin_backward()
        dy_TH, dloss = grad_outputs
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # has no effect if the graph is retained
        if dy_TH is None:
            dy_TH = torch.zeros_like(saved[0])
        given = [dy_TH.contiguous()] if dloss is None else [dy_TH.contiguous(), dloss]
        inputs = [*given, *saved]
        del saved, given, dy_TH, grad_outputs
        ranks = kind.ranks
        if ranks is not None and ranks.symmetric is not None:
            ranks.symmetric.raise_if_lost()
            if ranks.symmetric.generation != programs.generation:
                programs = traced(kind, sizes)  # larger buffers have taken the place of forward's
        found = iter(programs.backward[dloss is not None].run(sizes, inputs))
        return None, None, None, None, *[next(found) if needed else None for needed in ctx.needs_input_grad[4:]]


def traced(kind: Kind, sizes: Sizes) -> Programs:
    """Traces the programs of this kind. sizes: of the traced step."""
    config, device, ranks, alone = kind.config, kind.device, kind.ranks, EPGroup.alone()
    transport = LocalTransport() if ranks is None else ranks.transport
    call = Call(
        transport,
        alone,  # the order of backwards is noted by whoever runs the programs
        activation_named(config.activation),
        config.save_dispatched and ranks is not None,
        config.rounding.mode != "off" or config.rounding.capacity_factor is not None,
    )
    usual = kind.usual_sizes
    trace = Trace(device, dict(zip(usual, sizes, strict=True)), usual)
    T, L, *bound = cast(list[int], trace.sizes)  # the code takes sizes for numbers, and slots for tensors
    with trace, ExitStack() as stack:
        x = cast(Tensor, trace.input((T, config.d), kind.dtype))
        weights = traced_weights(trace, kind)
        bias_E = cast(Tensor, trace.input((config.E,), torch.float32)) if config.router.expert_bias else None
        updates = None
        if ranks is not None:
            trace.mailbox = ranks.mailbox
            stack.enter_context(parts_made_by(trace.fixed_part))
            assert ranks.symmetric is not None
            if not ranks.is_static:
                stack.enter_context(ranks.symmetric.bounded_by(SizeBound(*bound[:-1])))
            updates = None if bias_E is None else cast(Tensor, trace.named("updates", (), torch.int64))
        route = traced_route(kind, x, weights, bias_E, updates, L)
        rank = 0 if ranks is None else ranks.group.rank
        prepared = transport.prepare(route.routing, plan_for(route.routing.counts, rank), x)
        call = replace(call, tile_aligned=route.routing.tile_aligned)
        y, saved = forward(x, prepared, weights.of_experts, call)
        del prepared
        given = numbers_of([x, *weights.present, *([] if bias_E is None else [bias_E])])
        later = []
        handle_sizes = saved.handle.without_lists()
        if any(kind.needs):
            later = [*route.for_backward]
            later += [saved.rows] if call.save_dispatched else []
            later += [saved.h_PJ, saved.weights_P, *saved.handle.lists()]
        pairs = route.pairs
        lists = [] if ranks is None else [pairs.topk_ids_TK, pairs.expert_ids_N, pairs.chosen_N]
        lists += [] if ranks is None else (pairs.balance_counts or ())
        later = slots_of([*later, *lists])
        outputs = slots_of([y, route.loss, route.entropy_T, pairs.token_ids_N])
        packed, num_of_route = slots_of(pairs.counts), len(route.for_backward)
        trace.finish()
    program, backwards = Program(trace, given, outputs, later, packed), {}
    if any(kind.needs):
        saved = Later.of(later, program)[: len(later) - len(lists)]
        for has_loss in (False, True):
            of_backward = _traced_backward(kind, trace, saved, handle_sizes, call, has_loss, num_of_route)
            backwards[has_loss] = Program(*of_backward)
    generation = 0 if ranks is None or ranks.symmetric is None else ranks.symmetric.generation
    return Programs(program, backwards, generation, num_lists=len(lists))


def _traced_backward(
    kind: Kind,
    of_forward: Trace,
    later: list[Later],
    handle_sizes: HandleSizes,
    call: Call,
    has_loss: bool,
    num_of_route: int,
) -> tuple[Trace, list[int], list[Slot]]:
    config, (T, *_) = kind.config, of_forward.sizes
    trace = Trace.like(of_forward)
    with trace, parts_made_by(trace.fixed_part):
        dy = cast(Tensor, trace.input((T, config.d), kind.dtype))
        dloss = cast(Tensor, trace.input((), torch.float32)) if has_loss else None
        x = cast(Tensor, trace.input((T, config.d), kind.dtype))
        weights = traced_weights(trace, kind)
        saved, own = cast(tuple[list[Tensor], list[Tensor]], Later.inputs(trace, later))
        inputs = numbers_of([dy, *([] if dloss is None else [dloss]), x, *weights.present, *own])
        del own
        of_route, rest = saved[:num_of_route], saved[num_of_route:]
        del saved
        rows = rest.pop(0) if call.save_dispatched else x
        h, weights_P, *lists = rest
        del rest
        state = SavedForBackward(rows, h, weights_P, handle_sizes.with_lists(lists))
        del h, weights_P, rows
        needs = kind.all_needs
        grads = backward(dy, state, weights.of_experts, call, (*needs[3:], False, False))
        dx, drouter, dbias = traced_route_gradients(
            kind, of_route, grads.dweights_N, dloss, x, weights.router, grads.dx_TH, needs[:3]
        )
        found = dx, drouter, dbias, grads.dw1, grads.dw2, grads.db1_eJ, grads.db2_eH
        outputs = slots_of(found)
        trace.finish()
    return trace, inputs, outputs
