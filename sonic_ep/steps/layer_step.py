"""`LayerStep`: the step of a layer on one rank, as programs (kernels/program/): one for forward, one for backward.

The layer's code is traced once for each kind of step: config, mode, dtypes, and which tensors need gradients. The
programs then run for every length. Autograd sees one function, from x and the weights to y and the auxiliary loss.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import copies_recorded
from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes
from sonic_ep.dispatch.speculation import SizeBound
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward, backward, forward
from sonic_ep.first_order import first_order
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.program.native import launcher
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace
from sonic_ep.kernels.route.interface import LossGradient, PairGradients
from sonic_ep.routers.fused import kernels_of_route
from sonic_ep.routers.route import RoutingContext, decide_pairs, pairs_of_one_rank
from sonic_ep.routers.topk import fused_topk
from sonic_ep.routers.weights_and_losses import fused_weights_and_losses
from sonic_ep.routing import GroupCounts, Routing
from sonic_ep.symmetric_memory import parts_made_by
from sonic_ep.transports import GroupTransport

_LOG = logging.getLogger("sonic_ep.launches")
_NUM_STATISTICS = 2 + len(GroupCounts._fields)
MAX_TOKENS, _USUAL_TOKENS = 2**20, 8192


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The EP group of a step of several ranks. symmetric: what `transport` has chosen. layer: the number of the layer.

    sizes: pinned memory to which a run copies the sizes of the step.
    """

    group: EPGroup
    transport: GroupTransport
    symmetric: SymmetricTransport
    layer: int
    sizes: Tensor


class _OrderSize(NamedTuple):
    """In place of a tensor: launches get the integer."""

    size: Any

    def data_ptr(self) -> Any:
        return self.size


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """What the programs of a step depend on, besides sizes. needs: whether x, the router's weight, w1 and w2 need
    gradients. router: the dtype of the router's weight.
    """

    config: MoEConfig
    training: bool
    needs: tuple[bool, bool, bool, bool]
    dtype: torch.dtype
    router: torch.dtype
    device: torch.device
    ranks: Ranks | None = None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens of this rank and of a sequence; on several ranks also the most tokens of a rank, rows of the
        pair buffer, pairs that a rank sends or receives, and the order of backwards."""
        T = _USUAL_TOKENS
        sizes = {"T": T, "L": T, "M": T, "P": self.config.K * T, "V": self.config.K * T, "order": 0}
        return sizes if self.ranks is not None else {"T": T, "L": T}


class Programs(NamedTuple):
    """forward: x, state, weights -> y, loss, statistics, what backward needs. backward: by whether the loss has a
    gradient. num_lists: how many of the later tensors backward does not need, the last ones. generation: of the buffers
    whose addresses they know.
    """

    forward: Program
    backward: dict[bool, Program]
    num_lists: int
    generation: int

    def lists(self, later: list[Tensor], sizes: tuple[int, ...]) -> list[Tensor]:
        """Returns them, from what a run of forward returned behind its outputs."""
        starts = self.forward.in_block
        own = iter(later)
        found = [
            next(own) if start is None else self.forward.part_of_block(number, later[-1], sizes)
            for number, start in enumerate(starts)
        ]
        return found[len(found) - self.num_lists :]

    def saved(self, later: list[Tensor]) -> list[Tensor]:
        """Returns what backward needs of them."""
        own_lists = sum(start is None for start in self.forward.in_block[-self.num_lists or len(later) * 2 :])
        num_own = sum(start is None for start in self.forward.in_block)
        return later if not own_lists else [*later[: num_own - own_lists], *later[num_own:]]


@final
class LayerStep:
    """The programs of one layer. A copy of it starts without any."""

    def __init__(self) -> None:
        self._programs: dict[Kind, list[Programs]] = {}
        self._failed: set[Kind] = set()
        self._last: tuple[Kind | None, tuple[int, ...], Programs | None] = None, (), None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    @property
    def num_programs(self) -> int:
        return sum(map(len, self._programs.values()))

    def find(self, kind: Kind, sizes: tuple[int, ...]) -> Programs | None:
        """Returns the programs of such a step, traced at the first one; None if they cannot be.

        sizes: see `Kind.usual_sizes`.
        """
        last_kind, last_sizes, programs = self._last
        if kind is last_kind and sizes == last_sizes:
            return programs
        known = self._programs.setdefault(kind, [])
        programs = next((each for each in known if each.forward.fits(*sizes)), None)
        if programs is None:
            if kind in self._failed:
                return None
            try:
                launcher()
                programs = _traced(kind, sizes)
            except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):  # the code can still run
                _LOG.warning("a layer runs its code, because its steps cannot run as programs", exc_info=True)
                self._failed.add(kind)
                return None
            known.append(programs)
        self._last = kind, sizes, programs
        return programs


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
    programs: Programs, kind: Kind, sizes: tuple[int, ...], call: StepCall, *tensors: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns y_TH, the auxiliary loss, and entropy_T, token_ids_N and the fields of GroupCounts.

    programs: of `LayerStep.find`. call: gets the lists of pairs. tensors: x_TH, the router's weight, w1 and w2.
    """
    y_TH, loss = _Step.apply(programs, kind, sizes, call, *tensors)
    return y_TH, loss, call.statistics


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, programs: Programs, kind: Kind, sizes: tuple[int, ...], call: StepCall, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = [*inputs] if call.expert_bias_E is None else [*inputs, call.expert_bias_E]
        given += [call.extra[name] for name in programs.forward.extra]
        y_TH, loss, *rest = programs.forward.run(sizes, given)
        call.statistics, later = rest[:_NUM_STATISTICS], rest[_NUM_STATISTICS:]
        call.lists = functools.partial(programs.lists, later, sizes) if programs.num_lists else None
        if programs.backward:
            ctx.save_for_backward(*inputs, *programs.saved(later))
        ctx.programs, ctx.kind, ctx.sizes, ctx.begin_backward = programs, kind, sizes, call.begin_backward
        ctx.set_materialize_grads(False)
        return y_TH, loss

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.begin_backward is not None:
            ctx.begin_backward()
        dy_TH, dloss = grad_outputs
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # has no effect if the graph is retained
        if dy_TH is None:
            dy_TH = torch.zeros_like(saved[0])
        given = [dy_TH.contiguous()] if dloss is None else [dy_TH.contiguous(), dloss]
        inputs = [*given, *saved]
        del saved, given, dy_TH, grad_outputs
        programs, ranks = ctx.programs, ctx.kind.ranks
        if ranks is not None and ranks.symmetric.generation != programs.generation:
            programs = _traced(ctx.kind, ctx.sizes)  # larger buffers have taken the place of those that forward used
        found = iter(programs.backward[dloss is not None].run(ctx.sizes, inputs))
        return None, None, None, None, *[next(found) if needed else None for needed in ctx.needs_input_grad[4:]]


@functools.cache
def kernels_compute(dtype: torch.dtype, of_router: torch.dtype, device: torch.device, config: MoEConfig) -> bool:
    """Returns True if kernels compute all of a layer with rows of this dtype, and with such a weight of the router."""
    rows, w2 = (torch.empty(size, dtype=dtype, device=device) for size in ((1, config.d), (1, config.d, config.n)))
    router = torch.empty(config.E, config.d, dtype=of_router, device=device)
    computes = operations_for(rows, w2, activation_named(config.activation))
    return computes is not reference and kernels_of_route(rows, router, config) is not None


def _traced(kind: Kind, sizes: tuple[int, ...]) -> Programs:
    """Traces the programs of this kind. The sizes are those of the traced step."""
    config, device, ranks, alone = kind.config, kind.device, kind.ranks, EPGroup.alone()
    transport = LocalTransport() if ranks is None else ranks.transport
    call = Call(
        transport,
        alone,  # the order of backwards is noted by whoever runs the programs
        activation_named(config.activation),
        False,
        config.rounding.mode != "off" or config.rounding.capacity_factor is not None,
    )
    usual = kind.usual_sizes
    trace = Trace(device, dict(zip(usual, sizes, strict=True)), usual)
    T, L, *bound = cast(list[Any], trace.sizes)  # the code takes sizes for numbers, and slots for tensors
    with trace, ExitStack() as stack:
        x: Any = trace.input((T, config.d), kind.dtype)
        weights = _weights(trace, kind)
        bias_E: Any = trace.input((config.E,), torch.float32) if config.router.expert_bias else None
        updates = None
        if ranks is not None:
            *sizes_of_step, order = bound
            stack.enter_context(parts_made_by(trace.fixed_part))
            stack.enter_context(
                copies_recorded(cast(Tensor, trace.fixed(ranks.sizes)), cast(Tensor, _OrderSize(order)))
            )
            stack.enter_context(ranks.symmetric.bounded_by(SizeBound(*sizes_of_step)))
            updates: Any = None if bias_E is None else trace.named("updates", (), torch.int64)
        router, w1, w2 = weights
        kernels = kernels_of_route(x, router, config)
        assert kernels is not None
        linear, operations = kernels
        logits = linear.logits(x, router, None)
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
        experts = ExpertWeights(w1, w2)
        y, saved = forward(x, prepared, experts, call)
        del prepared
        given = [each.buffer.index for each in (x, *weights, bias_E) if each is not None]
        later = []
        handle_sizes = saved.handle.without_lists()
        if any(kind.needs):
            later = [logits, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N]
            later += [] if losses.dshares_BE is None else [losses.dshares_BE]
            later += [saved.h_PJ, saved.weights_P, *saved.handle.lists()]
        lists = [] if ranks is None else [pairs.topk_ids_TK, pairs.expert_ids_N, pairs.chosen_N]
        lists += [] if ranks is None else (pairs.balance_counts or ())
        later += lists
        outputs, packed = [y, losses.value, entropy_T, pairs.token_ids_N], [*pairs.counts]
        has_shares = losses.dshares_BE is not None
        trace.finish()
    program = Program(trace, given, *(cast(list[Slot], each) for each in (outputs, later, packed)))
    described = [
        (each.shape, each.dtype, start, each.strides)
        for each, start in zip(cast(list[Slot], later), program.in_block, strict=True)
    ]
    backwards = {}
    if any(kind.needs):
        for has_loss in (False, True):
            saved = described[: len(described) - len(lists)]
            of_backward = _trace_backward(kind, trace, saved, handle_sizes, call, kernels, has_loss, has_shares)
            backwards[has_loss] = Program(*of_backward)
    return Programs(program, backwards, len(lists), 0 if ranks is None else ranks.symmetric.generation)


def _trace_backward(
    kind: Kind,
    of_forward: Trace,
    later: list[Any],
    handle_sizes: HandleSizes,
    call: Call,
    kernels: Any,
    has_loss: bool,
    has_shares: bool,
) -> tuple[Trace, list[Any], list[Any]]:
    config, (T, *_) = kind.config, of_forward.sizes
    linear, operations = kernels
    trace = Trace.like(of_forward)
    with trace, parts_made_by(trace.fixed_part):
        given: list[Any] = [trace.input((T, config.d), kind.dtype)]
        if has_loss:
            given.append(trace.input((), torch.float32))
        given.append(trace.input((T, config.d), kind.dtype))
        weights = _weights(trace, kind)
        own = [trace.input(shape, dtype, strides) for shape, dtype, start, strides in later if start is None]
        block = trace.input((T,), torch.uint8)
        given += [*weights, *own, *([block] * (len(own) < len(later)))]
        saved: list[Any] = [
            own.pop(0) if start is None else trace.part(block, start, shape, dtype, strides)
            for shape, dtype, start, strides in later
        ]
        del own, block
        inputs, dloss = [each.buffer.index for each in given], given[1] if has_loss else None
        dy, x = given[0], given[1 + has_loss]
        del given
        router, w1, w2 = weights
        logits, ids, token_ids, expert_ids, *rest = saved
        del saved
        dshares = rest.pop(0) if has_shares else None
        h, weights_P, *lists = rest
        del rest
        state = SavedForBackward(x, h, weights_P, handle_sizes.with_lists(lists))
        del h, weights_P
        of_x, of_router, *needs = kind.needs
        grads = backward(dy, state, ExpertWeights(w1, w2), call, (*needs, False, False, False, False))
        loss = None if dloss is None else LossGradient(dloss, dshares)
        gradients = PairGradients(token_ids, expert_ids, grads.dweights_N)
        dlogits = operations.logits_gradient(logits, ids, gradients, loss, config.router)
        dx, drouter = linear.gradients(
            dlogits, x, router, of_x=of_x, of_weight=of_router, dx_others_TH=grads.dx_TH if of_x else None
        )
        found = dx, drouter, grads.dw1, grads.dw2
        outputs = [each for each, needed in zip(found, kind.needs, strict=True) if needed]
        trace.finish()
    return trace, inputs, outputs


def _weights(trace: Trace, kind: Kind) -> list[Any]:
    """Returns slots for the router's weight, w1 and w2. The code takes slots for tensors."""
    c = kind.config
    J = 2 * c.n if activation_named(c.activation).gated else c.n
    e = c.E if kind.ranks is None else c.E // kind.ranks.group.size
    experts = [trace.input(shape, kind.dtype) for shape in ((e, J, c.d), (e, c.d, c.n))]
    return [trace.input((c.E, c.d), kind.router), *experts]
