"""`Router`: from tokens to a `Routing`. Logits, top-K, the group's counts, routed pairs, weights and losses, in this
order.

Legend: T tokens on this rank, H hidden size, E experts, N pairs this rank sends.
"""

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn

from sonic_ep.config import MoEConfig
from sonic_ep.graph.modules import module_of, new_key, with_tensors
from sonic_ep.graph.operation import GraphOperation, Outputs, in_graph
from sonic_ep.groups import EPGroup, Exchange, exchange_named
from sonic_ep.initialization import fill_normal
from sonic_ep.kernels.route.status.reference import NO_UPDATES
from sonic_ep.routers.fused import FusedRoute, kernels_of_route
from sonic_ep.routers.linear import linear
from sonic_ep.routers.rounding import max_received, max_rows
from sonic_ep.routers.route import RoutingContext, decide_pairs, without_rounding
from sonic_ep.routers.stats import RoutingStats, Traffic
from sonic_ep.routers.topk import TopK, compute_topk, counts_by_score
from sonic_ep.routers.weights_and_losses import weights_and_losses
from sonic_ep.routing import INDEX_DTYPE, BalanceCounts, GroupCounts, RoutedPairs, Routing


@dataclass(frozen=True, slots=True)
class Routed:
    """The result of a router.

    routing: for `moe`. aux_loss: (), the sum of the weighted auxiliary losses. topk, routed_pairs: for `stats`.
    x_TH: (T, H), the rows for `moe`. Use it for nothing else: its gradient may be overwritten, see `linear`.
    """

    routing: Routing
    aux_loss: Tensor
    topk: TopK
    routed_pairs: RoutedPairs
    x_TH: Tensor

    def stats(self) -> RoutingStats:
        """Returns the statistics of this routing."""
        return RoutingStats(self.topk.entropy_T(), self.routed_pairs.token_ids_N, self.routed_pairs.counts)


def route(
    router: object,
    x_TH: Tensor,
    logits_TE: Tensor,
    expert_bias_E: Tensor | None,
    context: RoutingContext,
    *,
    sequence_length: int,
    topk: TopK | None = None,
) -> Routed:
    """Routes from the logits. A collective; see `decide_pairs`.

    x_TH: the rows that the experts read. expert_bias_E: (E,) or None. sequence_length: see `Router.forward`.
    topk: the experts of each token, if the caller has chosen them, with the scores of these logits.
    """
    config = context.config
    topk = compute_topk(logits_TE, expert_bias_E, config.K, config.router) if topk is None else topk
    topk = topk if context.expert_ids_TK is None else topk.with_given(context.expert_ids_TK)
    routed_pairs = decide_pairs(router, topk, context)
    if routed_pairs.topk_ids_TK is not topk.topk_ids_TK:  # replayed
        topk = topk.with_ids(routed_pairs.topk_ids_TK)
    return _routed(x_TH, logits_TE, topk, routed_pairs, config, sequence_length)


def _routed(
    x_TH: Tensor, logits_TE: Tensor, topk: TopK, routed_pairs: RoutedPairs, config: MoEConfig, sequence_length: int
) -> Routed:
    weights_N, loss = weights_and_losses(logits_TE, topk, routed_pairs, sequence_length, config.router)
    routing = Routing.of(routed_pairs, weights_N, logits_TE.shape[0])
    return Routed(routing, loss, topk, routed_pairs, x_TH)


@final
class Router(nn.Module):
    """Linear router with token rounding.

    weight: (E, d). bias: (E,) if configured. expert_bias: (E,) fp32 buffer of auxiliary-loss-free balancing, or None.
    Logits are computed in fp32 at least, for any dtype of x and weight, unless config.router.linear_dtype is "input".
    """

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        E, fp32 = config.E, {"device": device, "dtype": torch.float32}
        self.weight = nn.Parameter(torch.empty(E, config.d, **fp32))
        self.bias = nn.Parameter(torch.zeros(E, **fp32)) if config.router.linear_bias else None
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.zeros(E, **fp32) if config.router.expert_bias else None)
        self._counts_since_update_E = torch.zeros(config.E, dtype=torch.int64, device=device)
        self._bias_updates = torch.full((), NO_UPDATES, dtype=torch.int64, device=device)
        self._key = new_key(self)
        self.register_load_state_dict_post_hook(_reset_after_load)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = new_key(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The bias must stay fp32 when the model is cast to bf16, because it changes by only 0.001 a step.
        exact = self.expert_bias
        super()._apply(fn, recurse)
        # Not a buffer, because DistributedDataParallel would overwrite it with another rank's.
        self._move_counters()
        if exact is not None and self.expert_bias is not None:
            moved = self.expert_bias
            self.expert_bias = moved.float() if exact.is_meta else exact.to(moved.device)
        return self

    @torch.no_grad()
    def initialize(self, std: float, generator: torch.Generator) -> None:
        """Sets the weight to normal(0, std), and biases and counts to zero. A weight on "meta" stays as it is."""
        self._counts_since_update_E.zero_()
        self._bias_updates.fill_(NO_UPDATES)
        if self.weight.is_meta:
            return
        fill_normal(self.weight, std, generator)
        for bias in (self.bias, self.expert_bias):
            if bias is not None:
                bias.zero_()

    def logits(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (T, E) logits, fp32 or, for float64 x, float64, with jitter in training; and x_TH. See `linear`."""
        settings, batch_invariant = self.config.router, self.config.batch_invariant
        jitter, dtype = settings.jitter, x_TH.dtype
        if self.training and jitter:
            noisy_TH = x_TH.to(torch.promote_types(dtype, torch.float32))
            noisy_TH = noisy_TH * torch.empty_like(noisy_TH).uniform_(1 - jitter, 1 + jitter)
            noisy_TH = noisy_TH.to(dtype) if settings.linear_dtype == "input" else noisy_TH
            return linear(noisy_TH, self.weight, self.bias, settings.linear_dtype)[0], x_TH
        return linear(x_TH, self.weight, self.bias, settings.linear_dtype, batch_invariant=batch_invariant)

    def forward(
        self,
        x_TH: Tensor,
        *,
        group: EPGroup,
        sequence_length: int,
        problem: str | None = None,
        exchange: Exchange | None = None,
        meanwhile: Callable[[], None] | None = None,
        layer: int = 0,
        needs_backward: bool = False,
        expert_ids_TK: Tensor | None = None,
    ) -> Routed:
        """Routes this rank's tokens. A collective: every rank of the group calls it.

        Shapes:  x_TH (T, d). T may be 0 and may differ between ranks.

        sequence_length: tokens per sequence, for the "sequence" balance loss.
        problem: why this rank cannot route. All ranks raise it.
        exchange: the transport that gathers the counts; default is the group's all-gather.
        meanwhile: called while the gather is in flight, to launch other work.
        layer, needs_backward: of the caller, see RankStatus.
        expert_ids_TK: int64, the distinct experts of each token in place of its top-K. Nothing is rounded then.

        In a compiled graph the routing is checked at once, `layer` and `needs_backward` have no effect, and given
        experts raise ValueError.

        Raises:  ValueError for `problem`. Problems of other ranks raise when the routing is checked (`Routing.check`).
                 Before that, the only communication in the group may be what transports send for this routing.
        """
        if torch.compiler.is_dynamo_compiling():
            if expert_ids_TK is not None:
                raise ValueError("a compiled router takes no routed_experts; compile the layer, or not the router")
            if meanwhile is not None:
                meanwhile()
            return self._in_graph(x_TH, group, sequence_length, problem, exchange)
        config = self.config if expert_ids_TK is None else without_rounding(self.config)
        expert_bias_E = self.expert_bias
        kernels = None
        if problem is None and not (self.training and config.router.jitter):
            kernels = kernels_of_route(x_TH, self.weight, config)
        if problem is not None:
            x_TH, expert_bias_E = x_TH[:0], None  # x may be unusable, but this rank must still send its status
        if kernels is not None and meanwhile is not None and torch.is_grad_enabled():
            meanwhile = torch.enable_grad()(meanwhile)  # one function of autograd calls it, and has no graph inside
        context = RoutingContext(
            config=config,
            group=group,
            dtype=x_TH.dtype,
            training=self.training,
            problem=problem,
            exchange=exchange,
            meanwhile=meanwhile,
            layer=layer,
            bias_updates=None if expert_bias_E is None else self._updates(),
            needs_backward=needs_backward,
            expert_ids_TK=None if problem is not None else expert_ids_TK,
        )
        if kernels is not None:
            fused = FusedRoute(self, kernels, expert_bias_E, context, sequence_length)
            weights_N, loss, x_TH = fused(x_TH, self.weight, self.bias)
            assert fused.topk is not None
            assert fused.pairs is not None
            routing = Routing.of(fused.pairs, weights_N, x_TH.shape[0])
            return Routed(routing, loss, fused.topk, fused.pairs, x_TH)
        if problem is None:
            logits_TE, x_TH = self.logits(x_TH)
        else:
            logits_TE = x_TH.new_empty(0, config.E, dtype=torch.promote_types(x_TH.dtype, torch.float32))
        return route(self, x_TH, logits_TE, expert_bias_E, context, sequence_length=sequence_length)

    def _in_graph(
        self, x_TH: Tensor, group: EPGroup, sequence_length: int, problem: str | None, exchange: Exchange | None
    ) -> Routed:
        """Routes as one operation of a compiled graph."""
        c, T, S = self.config, x_TH.shape[0], group.size
        by_score = counts_by_score(c.router)
        constants = self._key, [*self.buffers()], S, c.E, c.K, by_score
        where = group.name, sequence_length, problem, _name(exchange)
        tensors = [x_TH, *self.parameters()]
        (weights_N, loss), others, _ = in_graph(torch.ops.sonic_ep.route, tensors, *constants, *where)
        scores_TE, ids_TK, token_ids_N, expert_ids_N, chosen_N, *counts = others
        limits = max_rows(c.rounding, T, c.K, c.E, S, training=self.training)
        limits = limits, max_received(c.rounding, T, c.K, training=self.training)
        balance = BalanceCounts(*counts[6:]) if by_score else None
        pairs = RoutedPairs(
            ids_TK, token_ids_N, expert_ids_N, chosen_N, GroupCounts(*counts[:6]), *limits, balance_counts=balance
        )
        return Routed(Routing.of(pairs, weights_N, T), loss, TopK(scores_TE, scores_TE, None, ids_TK), pairs, x_TH)

    def count_in_backward(self, out: Tensor, counts: GroupCounts) -> None:
        """Adds the group's top-K counts, in training, to those for `update_expert_bias` once backward reaches `out`.

        So a token counts once, if it is trained on. A forward without a graph counts nothing: evaluation, or the first
        forward of a reentrant checkpoint, whose recomputation has the graph then. Nor does the recomputation of the
        other kind of checkpoint, whose graph no backward runs through. A second backward of one graph adds nothing.

        out: what the routed tokens were made into. counts: of its routing.
        """
        if self.expert_bias is None or not (self.training and out.requires_grad):
            return
        left = [counts.chosen_SE.sum(0)]

        def add(gradient: Tensor | None) -> None:
            while left and gradient is not None:  # None: the function that returned `out` has a backward without it
                self._counter().add_(left.pop())

        out.register_hook(add)

    @torch.no_grad()
    def traffic(self, x_TH: Tensor, group: EPGroup, *, group_limits: bool = True) -> Traffic:
        """Returns which rows plain top-K of these tokens sends, with or without the group limits of the config.

        Both together tell what the limits save. Without jitter. No collective. group: the layer's, see
        `EPGroup.host_layout`.
        """
        config = self.config.router
        if not group_limits:
            config = dataclasses.replace(config, num_groups=1, groups_per_token=1)
        batch_invariant = self.config.batch_invariant
        logits_TE, _ = linear(x_TH, self.weight, self.bias, config.linear_dtype, batch_invariant=batch_invariant)
        topk = compute_topk(logits_TE, self.expert_bias, self.config.K, config)
        return Traffic.of_topk(topk.topk_ids_TK, self.config.E, group)

    def _counter(self) -> Tensor:
        """Returns the counts on the weight's device. load_state_dict and FSDP can move the weight without `_apply`."""
        if self._counts_since_update_E.device != self.weight.device:
            self._move_counters()
        return self._counts_since_update_E

    def _updates(self) -> Tensor:
        """Returns NO_UPDATES plus the number of updates of the bias, on the weight's device."""
        self._counter()
        return self._bias_updates

    def _move_counters(self) -> None:
        device = self.weight.device
        self._counts_since_update_E = _moved(self._counts_since_update_E, device)
        self._bias_updates = _moved(self._bias_updates, device, NO_UPDATES)

    @contextmanager
    def uncounted(self) -> Generator[None]:
        """A context in which steps do not count for `update_expert_bias`."""
        counts_E = self._counter().clone()
        try:
            yield
        finally:
            self._counter().copy_(counts_E)

    @torch.no_grad()
    def update_expert_bias(self, group: EPGroup | None = None) -> None:
        """Updates the bias from the counts since the last update, and resets them. Call it after the optimizer step.

        A token counts once, in the backward of the layer's output: see `count_in_backward`.

        group: the ranks with the same experts in other EP groups (expert data parallelism); their counts are added. The
        counts of this EP group are already complete. Raises ValueError without router.expert_bias.
        """
        if self.expert_bias is None:
            raise ValueError("router.expert_bias=False: there is no bias to update; set it to true in the config")
        counts_E = self._counter()
        counts_E = counts_E if group is None else group.all_reduce(counts_E, stage="update_expert_bias")
        self.expert_bias.copy_(updated_bias(self.expert_bias, counts_E, self.config.router.expert_bias_rate))
        self._counts_since_update_E.zero_()  # in place, because a captured CUDA graph adds to this tensor
        self._bias_updates += 1


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Returns the (E,) bias after one step: plus `rate` for an expert below the mean count, minus `rate` above it.

    The counts are of the top-K before rounding. Source: auxiliary-loss-free load balancing, arXiv 2408.15664, algorithm
    1.
    """
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)


def _reset_after_load(router: nn.Module, *_: object) -> None:
    """Runs after load_state_dict: the counts belong to another bias, and assign=True may have changed its dtype."""
    assert isinstance(router, Router)
    router._counts_since_update_E.zero_()
    router._bias_updates.fill_(NO_UPDATES)
    if router.expert_bias is not None and router.expert_bias.dtype != torch.float32:
        router.expert_bias = router.expert_bias.float()


def _moved(counts: Tensor, device: torch.device, initial: int = 0) -> Tensor:
    """Returns the counts on `device`; their initial value if they were on "meta"."""
    with torch.inference_mode(False):  # an inference tensor, made in evaluation, would break in-place adds in training
        return torch.full_like(counts, initial, device=device) if counts.is_meta else counts.to(device)


def _name(exchange: Exchange | None) -> str:
    return "" if exchange is None else exchange.name


def _route_in_graph(
    tensors: list[Tensor],
    key: Tensor,
    buffers: list[Tensor],
    ep_size: int,
    E: int,
    K: int,
    by_score: bool,
    group: str,
    sequence_length: int,
    problem: str | None,
    exchange_name: str,
) -> Outputs:
    exchange, router = exchange_named(exchange_name), cast(Router, module_of(key))
    if exchange is None and exchange_name:
        raise RuntimeError(
            f"nobody holds the exchange {exchange_name!r}: keep what transport_for(group, config) gave, and pass it"
        )
    x_TH, *parameters = tensors
    with with_tensors(router, parameters, buffers):
        routed = router.forward(  # its hooks are in the graph
            x_TH,
            group=EPGroup.named(group),
            sequence_length=sequence_length,
            problem=problem,
            exchange=exchange,
        )
    routed.routing.check()
    pairs, weights_N = routed.routed_pairs, routed.routing.weights_N.clone()
    others = [routed.topk.scores_TE, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N, pairs.chosen_N]
    return Outputs([weights_N, routed.aux_loss], [*others, *pairs.counts, *(pairs.balance_counts or ())])


def _like_route(
    tensors: list[Tensor], key: Tensor, buffers: list[Tensor], ep_size: int, E: int, K: int, by_score: bool, *_: object
) -> Outputs:
    x_TH, S, T = tensors[0], ep_size, tensors[0].shape[0]
    N, dtype = torch.library.get_ctx().new_dynamic_size(), torch.promote_types(x_TH.dtype, torch.float32)
    others = [x_TH.new_empty(T, E, dtype=dtype)]
    kinds = ((T, K), torch.int64), (N, INDEX_DTYPE), (N, torch.int64), (N, torch.bool)
    others += [x_TH.new_empty(shape, dtype=kind) for shape, kind in kinds]
    shapes = *GroupCounts.shapes(S, E), *(((T, K), (S, E)) if by_score else ())
    others += [x_TH.new_empty(shape, dtype=torch.int64) for shape in shapes]
    return Outputs([x_TH.new_empty(N, dtype=dtype), x_TH.new_empty((), dtype=dtype)], others)


# A router in a compiled graph, called without `MoE`. key, buffers: of the router. by_score: see `counts_by_score`.
GraphOperation(
    "route",
    "Tensor key, Tensor[] buffers, int ep_size, int E, int K, bool by_score, str group, SymInt sequence_length, "
    "str? problem, str exchange",
    _route_in_graph,
    _like_route,
)
