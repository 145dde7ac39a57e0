"""The step of a layer whose transport needs sizes on the host: one function for autograd, of several programs.

Forward is a program of the router, the wait for the sizes of the step, the exchange of lists by code, and a program of
dispatch, experts and combine (experts_trace.py). Backward is a program of the latter, and then one of the router.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sonic_ep.dispatch.checkpoint_regions import SavingForward
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.expert_parallel_mlp import Call
from sonic_ep.first_order import Context, first_order
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.program.program import Program, without_autocast
from sonic_ep.kernels.program.trace import Slot, Trace
from sonic_ep.routers.rounding import max_rows
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, Routing
from sonic_ep.steps.experts_step import ExpertsCode, ExpertsPrograms, ExpertsStep, MoECall
from sonic_ep.steps.experts_trace import MoEWeights
from sonic_ep.steps.layer_step import StepCall
from sonic_ep.steps.programs import Later, Programs, Sizes, numbers_of, slots_of
from sonic_ep.steps.router_trace import Kind, LayerWeights, traced_route, traced_route_gradients, traced_weights

_NUM_PLAN, _NUM_COUNTS = len(RankPlan._fields), len(GroupCounts._fields)
_NO_BUFFERS = None, None  # to which backward adds: a layer has none


@dataclass(slots=True)
class RoutedStep:
    """One step. programs: of the router, with their sizes. of_experts: where those of the rest are found.

    arriving: returns the sizes of the step once the router has run, see `BoundedSteps`. meanwhile: called before the
    host waits for them, to launch other work.
    """

    programs: Programs
    kind: Kind
    sizes: Sizes
    call: StepCall
    of_experts: ExpertsPrograms
    arriving: Callable[[], AsyncSplitSizes]
    meanwhile: Callable[[], None] | None = None

    def run(self, *tensors: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `run` in layer_step.py. A collective."""
        y_TH, loss = _RoutedStep.apply(self, *tensors)
        return y_TH, loss, self.call.statistics

    def route(self, x_TH: Tensor, weights: LayerWeights) -> tuple[Tensor, Routing, RankPlan, list[Tensor]]:
        """Returns the loss, the routing, this rank's plan of it, and what the router's backward needs."""
        kind, call, ranks = self.kind, self.call, self.kind.ranks
        assert ranks is not None
        given = [x_TH, *weights.of_router, *([] if call.expert_bias_E is None else [call.expert_bias_E])]
        given += [call.extra[name] for name in self.programs.forward.extra]
        loss, entropy_T, token_ids_N, weights_N, *rest = self.programs.forward.run(self.sizes, given)
        plan, rest = RankPlan._make(rest[:_NUM_PLAN]), rest[_NUM_PLAN:]
        counts, later = GroupCounts._make(rest[:_NUM_COUNTS]), rest[_NUM_COUNTS:]
        call.statistics = [entropy_T, token_ids_N, *counts]
        if self.meanwhile is not None:
            self.meanwhile()
        group, config, T = ranks.group, kind.config, x_TH.shape[0]
        most = max_rows(config.rounding, T, config.K, config.E, group.size, training=kind.training)
        return loss, Routing(weights_N, token_ids_N, counts, T, most, split_sizes=self.arriving()), plan, later

    def rest(
        self, x_TH: Tensor, routing: Routing, plan: RankPlan, weights: MoEWeights, *, needs_output: bool
    ) -> tuple[Tensor, ExpertsStep | ExpertsCode, list[Tensor]]:
        """Returns y_TH, what has run dispatch, experts and combine, and what their backward needs."""
        config, ranks, has_backward = self.kind.config, self.kind.ranks, any(self.kind.needs)
        assert ranks is not None
        activation = activation_named(config.activation)
        call = Call(ranks.transport, ranks.group, activation, config.save_dispatched, routing.tile_aligned)
        prepared = ranks.transport.prepare(routing, plan)
        given = MoECall(x_TH, routing, weights, _NO_BUFFERS, call, "interleaved")
        experts = self.of_experts.step(given, ranks, prepared=prepared, has_backward=has_backward)
        experts = experts or ExpertsCode(call, "interleaved", routing, prepared)
        y_TH, saved = experts.forward(x_TH, routing.weights_N, weights, needs_output=needs_output)
        return y_TH, experts, saved


_ForBackward = tuple[Programs, Kind, Sizes, ExpertsStep | ExpertsCode, int, int]


class _RoutedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[_ForBackward], step: RoutedStep, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x_TH, weights = inputs[0], step.kind.weights_of(inputs[1:])
        assert step.kind.ranks is not None
        num_ranks = step.kind.ranks.group.size
        saving = SavingForward.present(has_backward=any(step.kind.needs), num_ranks=num_ranks)
        with without_autocast(x_TH.device.type):
            loss, routing, plan, of_router = step.route(x_TH, weights)
            of_experts = MoEWeights.of_layer(*weights[2:])
            y_TH, experts, saved = step.rest(x_TH, routing, plan, of_experts, needs_output=saving.needs_output)
        if any(step.kind.needs):
            ctx.save_for_backward(*saving.noted([*inputs, *of_router, *saved]))
        ctx.call = step.programs, step.kind, step.sizes, experts, len(of_router), routing.token_ids_N.shape[0]
        ctx.set_materialize_grads(False)
        return y_TH, loss

    @staticmethod
    @first_order
    def backward(ctx: Context[_ForBackward], *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        programs, kind, sizes, experts, num_of_router, N = ctx.call
        dy_TH, dloss = grad_outputs
        x_TH, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # has no effect if the graph is retained
        first = sum(kind.present)
        weights, of_router = kind.weights_of(saved[:first]), saved[first : first + num_of_router]
        saved = saved[first + num_of_router :]
        needs = kind.all_needs
        if dy_TH is None:  # the experts have no gradient, and the ranks exchange nothing, as in the code
            dx_TH, dweights_N, grads = torch.zeros_like(x_TH), weights.router.new_zeros(N, dtype=torch.float32), None
        else:
            rows, of_experts = x_TH if experts.saves_x else None, MoEWeights.of_layer(*weights[2:])
            with without_autocast(x_TH.device.type):
                grads = experts.backward(dy_TH, rows, saved, of_experts, _NO_BUFFERS, (*needs[3:], False, False))
            dx_TH, dweights_N = grads.dx_TH, grads.dweights_N
        found = list[Tensor]()
        if any(needs[:3]):
            given = [dweights_N, *([dx_TH] if needs[0] else []), *([] if dloss is None else [dloss])]
            inputs = [*given, x_TH, weights.router, *of_router]
            del of_router, given, dweights_N
            found = programs.backward[dloss is not None].run(sizes, inputs)
            if len(found) > sum(needs[1:3]):
                dx_TH = found.pop(0)  # the router's program has not added to dx_TH in place
        of_weight, of_bias = (found.pop(0) if needed else None for needed in needs[1:3])
        by_weight = of_weight, of_bias, *((None,) * 4 if grads is None else grads[2:6])
        by_weight = [each for each, is_there in zip(by_weight, kind.present, strict=True) if is_there]
        return None, dx_TH if needs[0] else None, *by_weight


def traced_router(kind: Kind, sizes: Sizes) -> Programs:
    """Traces the programs of the router of this kind. sizes: of the traced step."""
    config, ranks, usual = kind.config, kind.ranks, kind.usual_sizes
    assert ranks is not None
    trace = Trace(kind.device, dict(zip(usual, sizes, strict=True)), usual)
    T, L = cast(tuple[int, int], trace.sizes[:2])
    trace.mailbox = ranks.mailbox
    with trace:
        x = cast(Tensor, trace.input((T, config.d), kind.dtype))
        weights = traced_weights(trace, kind)
        bias_E, updates = None, None
        if config.router.expert_bias:
            bias_E = cast(Tensor, trace.input((config.E,), torch.float32))
            updates = cast(Tensor, trace.named("updates", (), torch.int64))
        route = traced_route(kind, x, weights, bias_E, updates, L)
        routing = route.routing
        plan = plan_for(routing.counts, ranks.group.rank)
        given = numbers_of([x, *weights.of_router, *([] if bias_E is None else [bias_E])])
        later = slots_of(route.for_backward if any(kind.needs) else [])
        outputs = slots_of([route.loss, route.entropy_T, routing.token_ids_N, routing.weights_N, *plan])
        packed, num_pairs = slots_of(routing.counts), routing.token_ids_N.shape[0]
        trace.finish()
    program = Program(trace, given, outputs, later, packed)
    described, backwards = Later.of(later, program), dict[object, Program]()
    if any(kind.all_needs[:3]):
        for has_loss in (False, True):
            of_backward = _traced_backward(kind, trace, described, num_pairs, has_loss=has_loss)
            backwards[has_loss] = Program(*of_backward)
    return Programs(program, backwards, 0)


def _traced_backward(
    kind: Kind, of_forward: Trace, later: list[Later], num_pairs: int, *, has_loss: bool
) -> tuple[Trace, list[int], list[Slot]]:
    config, (T, *_), needs = kind.config, of_forward.sizes, kind.all_needs
    trace = Trace.like(of_forward)
    with trace:
        dweights = cast(Tensor, trace.input((num_pairs,), torch.float32))
        dx = cast(Tensor, trace.input((T, config.d), kind.dtype))
        dloss = cast(Tensor, trace.input((), torch.float32)) if has_loss else None
        x = cast(Tensor, trace.input((T, config.d), kind.dtype))
        weights = traced_weights(trace, kind)
        saved, own = cast(tuple[list[Tensor], list[Tensor]], Later.inputs(trace, later))
        given = [dweights, *([dx] if needs[0] else []), *([] if dloss is None else [dloss]), x, weights.router, *own]
        inputs = numbers_of(given)
        del own, given
        found = traced_route_gradients(kind, saved, dweights, dloss, x, weights.router, dx, needs[:3])
        in_place = found[0] is None or numbers_of([found[0]]) == numbers_of([dx])
        outputs = slots_of(found[1:] if in_place else found)
        trace.finish()
    return trace, inputs, outputs
