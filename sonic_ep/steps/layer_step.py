"""The step of a layer as programs: from x and all weights to y and the auxiliary loss, one function for autograd.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward, backward, forward
from sonic_ep.first_order import Context, first_order
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace, by_torch
from sonic_ep.kernels.route.interface import LossGradient, PairGradients, RouterLinear, RouterOperations
from sonic_ep.routers.fused import kernels_of_route
from sonic_ep.routers.route import RoutingContext, decide_pairs, pairs_of_one_rank
from sonic_ep.routers.topk import fused_topk
from sonic_ep.routers.weights_and_losses import fused_weights_and_losses
from sonic_ep.routing import GroupCounts, Routing
from sonic_ep.steps.programs import USUAL_TOKENS, Later, Programs, Ranks, Sizes, numbers_of, slots_of
from sonic_ep.symmetric_memory import parts_made_by

_NUM_STATISTICS = 2 + len(GroupCounts._fields)
MAX_TOKENS = 2**20


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """All that the programs of a step depend on, besides sizes. needs: whether x and the present weights need
    gradients. present: which of `LayerWeights` are. router: the dtype of the router's weight, and of its bias.
    """

    config: MoEConfig
    training: bool
    needs: tuple[bool, ...]
    present: tuple[bool, ...]
    dtype: torch.dtype
    router: tuple[torch.dtype, ...]
    device: torch.device
    ranks: Ranks | None = None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens of this rank and of a sequence; on several ranks also the order of backwards; and unless
        buffers are static the most tokens of a rank, rows of the pair buffer, and pairs that a rank sends or receives.
        """
        sizes, rows = {"T": USUAL_TOKENS, "L": USUAL_TOKENS}, self.config.K * USUAL_TOKENS
        if self.ranks is not None:
            sizes |= {} if self.ranks.is_static else {"M": USUAL_TOKENS, "P": rows, "V": rows}
            sizes["order"] = 0
        return sizes


class LayerWeights(NamedTuple):
    """The weights of a layer. Biases are None without one."""

    router: Tensor
    router_bias: Tensor | None
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None

    @property
    def present(self) -> list[Tensor]:
        return [each for each in self if each is not None]

    @property
    def of_experts(self) -> ExpertWeights:
        return ExpertWeights(*self[2:])

    def with_experts_in(self, dtype: torch.dtype) -> Self:
        """Returns these with the experts' weights cast."""
        b1, b2 = (None if each is None else each.to(dtype) for each in self[4:])
        return self._replace(w1=self.w1.to(dtype), w2=self.w2.to(dtype), b1=b1, b2=b2)


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
        y_TH, loss, *rest = programs.forward.run(sizes, given)
        call.statistics, later = rest[:_NUM_STATISTICS], rest[_NUM_STATISTICS:]
        call.lists = functools.partial(programs.lists, later, sizes) if programs.num_lists else None
        if programs.backward:
            ctx.save_for_backward(*inputs, *programs.saved(later))
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


@functools.cache
def kernels_compute(dtype: torch.dtype, of_router: torch.dtype, device: torch.device, config: MoEConfig) -> bool:
    """Returns True if kernels compute all of a layer with rows of this dtype, and with such a weight of the router."""
    rows, w2 = (torch.empty(size, dtype=dtype, device=device) for size in ((1, config.d), (1, config.d, config.n)))
    router = torch.empty(config.E, config.d, dtype=of_router, device=device)
    computes = operations_for(rows, w2, activation_named(config.activation))
    return computes is not reference and kernels_of_route(rows, router, config) is not None


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
        weights = _weights(trace, kind)
        bias_E = cast(Tensor, trace.input((config.E,), torch.float32)) if config.router.expert_bias else None
        updates = None
        if ranks is not None:
            trace.mailbox = ranks.mailbox
            stack.enter_context(parts_made_by(trace.fixed_part))
            assert ranks.symmetric is not None
            if not ranks.is_static:
                stack.enter_context(ranks.symmetric.bounded_by(SizeBound(*bound[:-1])))
            updates = None if bias_E is None else cast(Tensor, trace.named("updates", (), torch.int64))
        kernels = kernels_of_route(x, weights.router, config)
        assert kernels is not None
        linear, operations = kernels
        logits = linear.logits(x, weights.router, weights.router_bias)
        topk = fused_topk(operations, logits, bias_E, config.K, config.router)
        context = RoutingContext(
            config=config,
            group=alone if ranks is None else ranks.group,
            dtype=kind.dtype,
            training=kind.training,
            exchange=None if ranks is None else ranks.transport,
            layer=0 if ranks is None else ranks.layer,
            needs_backward=any(kind.needs),
            bias_updates=updates,
        )
        pairs = pairs_of_one_rank(topk, context, None) if ranks is None else decide_pairs(None, topk, None, context)
        weights_N, losses = fused_weights_and_losses(operations, logits, topk.scores_TE, pairs, L, config.router)
        entropy_T = topk.entropy_T()
        topk = replace(topk, scores_TE=x, ranking_TE=x)  # frees the scores
        routing = Routing.of(pairs, weights_N, T)
        prepared = transport.prepare(routing, plan_for(routing.counts, context.group.rank), x)
        call = replace(call, tile_aligned=routing.tile_aligned)
        y, saved = forward(x, prepared, weights.of_experts, call)
        del prepared
        given = numbers_of([x, *weights.present, *([] if bias_E is None else [bias_E])])
        later = []
        handle_sizes = saved.handle.without_lists()
        if any(kind.needs):
            later = [logits, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N]
            later += [] if losses.dshares_BE is None else [losses.dshares_BE]
            later += [saved.rows] if call.save_dispatched else []
            later += [saved.h_PJ, saved.weights_P, *saved.handle.lists()]
        lists = [] if ranks is None else [pairs.topk_ids_TK, pairs.expert_ids_N, pairs.chosen_N]
        lists += [] if ranks is None else (pairs.balance_counts or ())
        later = slots_of([*later, *lists])
        outputs = slots_of([y, losses.value, entropy_T, pairs.token_ids_N])
        packed = slots_of(pairs.counts)
        has_shares = losses.dshares_BE is not None
        trace.finish()
    program, backwards = Program(trace, given, outputs, later, packed), {}
    if any(kind.needs):
        saved = Later.of(later, program)[: len(later) - len(lists)]
        for has_loss in (False, True):
            of_backward = _traced_backward(kind, trace, saved, handle_sizes, call, kernels, has_loss, has_shares)
            backwards[has_loss] = Program(*of_backward)
    generation = 0 if ranks is None or ranks.symmetric is None else ranks.symmetric.generation
    return Programs(program, backwards, generation, num_lists=len(lists))


def _traced_backward(
    kind: Kind,
    of_forward: Trace,
    later: list[Later],
    handle_sizes: HandleSizes,
    call: Call,
    kernels: tuple[RouterLinear, RouterOperations],
    has_loss: bool,
    has_shares: bool,
) -> tuple[Trace, list[int], list[Slot]]:
    config, (T, *_) = kind.config, of_forward.sizes
    linear, operations = kernels
    trace = Trace.like(of_forward)
    with trace, parts_made_by(trace.fixed_part):
        dy = cast(Tensor, trace.input((T, config.d), kind.dtype))
        dloss = cast(Tensor, trace.input((), torch.float32)) if has_loss else None
        x = cast(Tensor, trace.input((T, config.d), kind.dtype))
        weights = _weights(trace, kind)
        saved, own = cast(tuple[list[Tensor], list[Tensor]], Later.inputs(trace, later))
        inputs = numbers_of([dy, *([] if dloss is None else [dloss]), x, *weights.present, *own])
        del own
        logits, ids, token_ids, expert_ids, *rest = saved
        del saved
        dshares = rest.pop(0) if has_shares else None
        rows = rest.pop(0) if call.save_dispatched else x
        h, weights_P, *lists = rest
        del rest
        state = SavedForBackward(rows, h, weights_P, handle_sizes.with_lists(lists))
        del h, weights_P, rows
        left = [*kind.needs]
        of_x, of_router, of_bias, *needs = left.pop(0), *[is_there and left.pop(0) for is_there in kind.present]
        grads = backward(dy, state, weights.of_experts, call, (*needs, False, False))
        loss = None if dloss is None else LossGradient(dloss, dshares)
        gradients = PairGradients(token_ids, expert_ids, grads.dweights_N)
        dlogits = operations.logits_gradient(logits, ids, gradients, loss, config.router)
        dx, drouter = linear.gradients(
            dlogits, x, weights.router, of_x=of_x, of_weight=of_router, dx_others_TH=grads.dx_TH if of_x else None
        )
        dbias = by_torch(_sum_of_tokens, (config.E,), torch.float32, dlogits) if of_bias else None
        found = dx, drouter, dbias, grads.dw1, grads.dw2, grads.db1_eJ, grads.db2_eH
        outputs = slots_of(found)
        trace.finish()
    return trace, inputs, outputs


def _sum_of_tokens(dlogits_TE: Tensor) -> Tensor:
    return dlogits_TE.sum(0)


def _weights(trace: Trace, kind: Kind) -> LayerWeights:
    """Returns slots for the weights. The code takes slots for tensors."""
    c = kind.config
    J = 2 * c.n if activation_named(c.activation).gated else c.n
    e = c.E if kind.ranks is None else c.E // kind.ranks.group.size
    shapes = (c.E, c.d), (c.E,), (e, J, c.d), (e, c.d, c.n), (e, J), (e, c.d)
    dtypes = kind.router[0], kind.router[-1], *[kind.dtype] * 4
    slots = [
        cast(Tensor, trace.input(shape, dtype)) if is_there else None
        for shape, dtype, is_there in zip(shapes, dtypes, kind.present, strict=True)
    ]
    return LayerWeights._make(slots)
