"""`FusedRouter`: Megatron's TopKRouter computed by our router's kernels, with the same numbers.

It is a TopKRouter: weight, buffers, checkpoints, replay, the tracker of losses and the update of the expert bias are
Megatron's. The linear layer, scores, top-K, weights of pairs, and one auxiliary loss with the z-loss are one pass each,
and one kernel computes the gradient of the logits. No (T, E) tensor of probabilities or bools exists. Instead of
(probs, routing map) it returns the pairs. Megatron's functions compute what the losses' kernels do not know from the
same logits: a second auxiliary loss, a loss per sequence with several in a microbatch, and padding masks.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, N pairs this rank sends. s, b are
Megatron's: sequence length and microbatch on this rank.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.config import Balance, RoundingConfig, RouterConfig
from sonic_ep.integrations.megatron.replay import replays
from sonic_ep.integrations.megatron.routing_map import PlainPairs
from sonic_ep.integrations.topk_routing import config_of
from sonic_ep.kernels.backend import chosen_pairs
from sonic_ep.kernels.route.topk.reference import times_chosen, topk_mask
from sonic_ep.kernels.route.weights_and_losses.reference import z_loss
from sonic_ep.routers.given_routing import GivenRouting
from sonic_ep.routers.linear import linear
from sonic_ep.routers.route import decide_pairs
from sonic_ep.routers.topk import TopK, compute_topk
from sonic_ep.routers.topk_pairs import RouterCall
from sonic_ep.routers.weights_and_losses import losses_alone, weights_and_losses
from sonic_ep.routing import BalanceCounts, PairLists, Routing
from sonic_ep.steps.experts_step import RunsAs

_OTHERWISE = "options.router to 'megatron'"
# An auxiliary loss: Megatron's name for its log, the router's group of ranks, and whether the log is a mean over more.
_LOSSES = {
    "aux_loss": ("load_balancing_loss", "tp_cp_group", True),
    "seq_aux_loss": ("seq_load_balancing_loss", "tp_cp_group", True),
    "global_aux_loss": ("global_load_balancing_loss", "tp_dp_cp_group", False),
}


def check_fused(config: TransformerConfig) -> None:
    """Raises ValueError for a config that our router cannot compute. The message names field, value and what to set."""
    known: dict[str, tuple[Any, ...]] = {
        "moe_router_score_function": ("softmax", "sigmoid"),
        "moe_router_dtype": ("fp32", None),
        "moe_expert_capacity_factor": (None,),
        "moe_pad_experts_for_cuda_graph_inference": (False,),
    }
    for name, values in known.items():
        if (value := getattr(config, name)) not in values:
            raise ValueError(f"{name}={value!r} is not in the fused router; set {values[0]!r} or {_OTHERWISE}")
    if (balancing := config.moe_router_load_balancing_type) in ("sinkhorn", "quantile_balancing"):
        raise ValueError(
            f"moe_router_load_balancing_type={balancing!r} is not in the fused router; set 'aux_loss' or {_OTHERWISE}"
        )
    _check_groups(config)
    modules: Any = config.cuda_graph_modules or ()  # TransformerConfig converts it to a list
    graphed = {CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess} & set(modules)
    if config.cuda_graph_impl != "none" and graphed == {CudaGraphModule.moe_router}:
        raise ValueError(
            "cuda_graph_modules with moe_router alone would have the fused router return a routing map; set "
            f"cuda_graph_modules=['moe_router', 'moe_preprocess'] or {_OTHERWISE}"
        )


def _check_groups(config: TransformerConfig) -> None:
    groups, per_token, K = config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_topk
    if not groups or not per_token:
        return
    if K // per_token != 2:
        raise ValueError(
            f"moe_router_group_topk={per_token} with moe_router_topk={K} ranks a group by its {K // per_token} best "
            f"experts, the fused router by two; set moe_router_group_topk={max(1, K // 2)} or {_OTHERWISE}"
        )
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
        raise ValueError(
            f"moe_router_num_groups={groups} with softmax after top-K ranks groups by logits, the fused router by "
            f"scores; set moe_router_pre_softmax=True or {_OTHERWISE}"
        )


def router_config_of(config: TransformerConfig) -> RouterConfig:
    """Returns the scores, top-K and weights of Megatron's router, without losses."""
    is_softmax, groups = config.moe_router_score_function == "softmax", config.moe_router_num_groups
    is_limited = bool(groups and config.moe_router_group_topk)
    return RouterConfig(
        score="softmax" if is_softmax else "sigmoid",
        # Softmax of the top-K logits is softmax of all, renormalized.
        renormalize=not config.moe_router_pre_softmax if is_softmax else config.moe_router_topk > 1,
        scale=config.moe_router_topk_scaling_factor or 1.0,
        linear_dtype="float32" if config.moe_router_dtype == "fp32" else "input",
        num_groups=groups or 1 if is_limited else 1,
        groups_per_token=config.moe_router_group_topk or 1 if is_limited else 1,
        expert_bias=config.moe_router_enable_expert_bias,
    )


@functools.cache
def _with_losses(config: RouterConfig, balance: Balance, coef: float, z_loss_coef: float) -> RouterConfig:
    return replace(config, balance=balance, balance_coef=coef, z_loss_coef=z_loss_coef)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the router, until its pairs are known.

    topk: with the experts of a replay, if there is one. fused_loss: a key of _LOSSES, or None. config: with its
    coefficient and the z-loss's. balance_counts: of plain top-K. shape: (s, b). mask_T: bool, True for padding.
    """

    logits_TE: Tensor
    topk: TopK
    fused_loss: str | None
    config: RouterConfig
    balance_counts: BalanceCounts
    shape: tuple[int, int]
    mask_T: Tensor | None


@final
class FusedRouter(TopKRouter):
    """Forward returns weights_N, fp32, and a PlainPairs.

    With rounding, in training and no replay, it returns the logits, (T, E) fp32, with the losses attached, and top-K
    ids, (T, K) int64: the pairs and their weights follow in `rounded_routing`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        *,
        rounding: RoundingConfig | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        assert config.num_moe_experts is not None
        self.rounding, self.batch_invariant = rounding, batch_invariant
        rounds = rounding or RoundingConfig(mode="off")
        self.moe_config = config_of(config.num_moe_experts, config.moe_router_topk, router_config_of(config), rounds)

    def gating(self, input: Tensor) -> Tensor:
        """Returns (s, b, E) logits in fp32, of GEMMs in fp32 or, without a moe_router_dtype, in the dtype of input."""
        for parameter in (self.weight, self.bias):
            if parameter is not None and parameter.device != input.device:
                parameter.data = parameter.data.to(input.device)
        rows_TH = input.reshape(-1, input.shape[-1])
        linear_dtype, batch_invariant = self.moe_config.router.linear_dtype, self.batch_invariant
        logits_TE, _ = linear(rows_TH, self.weight, self.bias, linear_dtype, batch_invariant=batch_invariant)
        return logits_TE.view(*input.shape[:-1], logits_TE.shape[-1])

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns what forward returns. logits: (s, b, E). padding_mask: (s, b) bool, True for padding, or None."""
        if self.config.moe_expert_capacity_factor is not None:  # inference sets it in a layer that exists
            check_fused(self.config)
        call = self._started(logits, None if padding_mask is None else padding_mask.reshape(-1))
        logits_TE, topk = call.logits_TE, call.topk
        T, ids_TK = logits_TE.shape[0], topk.topk_ids_TK
        if self.rounding is not None and self.training and not replays(self):
            loss = losses_alone(logits_TE, topk, T, call.config, call.balance_counts)
            return self._attached(logits_TE, loss, call), ids_TK
        counts_E = topk.counts_E()
        pairs = PairLists(ids_TK, *chosen_pairs(ids_TK, counts_E))
        weights_N, loss = weights_and_losses(logits_TE, topk, pairs, T, call.config, call.balance_counts)
        return self._attached(weights_N, loss, call), PlainPairs(pairs.token_ids_N, counts_E)

    def rounded_routing(
        self, logits_TE: Tensor, topk_ids_TK: Tensor, given: GivenRouting, call: RouterCall, runs_as: RunsAs | None
    ) -> Routing:
        """Returns the rounded routing of what forward returned, without padding. A collective of the EP group.

        given, runs_as: of every router that rounds; not read.
        """
        T, config = logits_TE.shape[0], self.moe_config
        topk = compute_topk(logits_TE, self.expert_bias, config.K, config.router)
        topk = topk.with_ids(topk_ids_TK)  # of a replay, perhaps
        routed_pairs = decide_pairs(self, topk, call.context(config))  # Megatron's router has its own counter
        weights_N = weights_and_losses(logits_TE, topk, routed_pairs, T, config.router)[0]
        return Routing.of(routed_pairs, weights_N, T)

    def _started(self, logits: Tensor, mask_T: Tensor | None) -> _Call:
        (s, b), E = logits.shape[:2], self.moe_config.E
        logits_TE = logits.reshape(-1, E)
        if mask_T is not None:
            logits_TE = self.apply_z_loss(logits_TE, mask_T)
        fused_loss = self._fused_loss(b) if self._has_losses() and mask_T is None else None
        config = self._config_with(fused_loss, mask_T is None)
        topk = compute_topk(logits_TE, self.expert_bias, self.topk, config)
        balance_counts = self._balance_counts(topk, fused_loss)
        topk = self._replayed(topk)
        if self.local_tokens_per_expert is not None and torch.is_grad_enabled():
            with torch.no_grad():
                ids_TK = topk.topk_ids_TK
                counts_E = topk.counts_E() if mask_T is None else topk_mask(ids_TK, E)[~mask_T].sum(0)
                self.local_tokens_per_expert += counts_E
        return _Call(logits_TE, topk, fused_loss, config, balance_counts, (s, b), mask_T)

    def _has_losses(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _fused_loss(self, b: int) -> str | None:
        """Returns the first auxiliary loss that our kernels know for b sequences, or None. Their rows alternate."""
        for name in _LOSSES:
            if self.get_aux_loss_coeff(name) > 0 and (name != "seq_aux_loss" or b == 1):
                return name
        return None

    def _config_with(self, fused_loss: str | None, with_z_loss: bool) -> RouterConfig:
        """Returns the config with the coefficients that Megatron's losses have as means over this rank's tokens."""
        balance, coef, z_coef = "none", 0.0, 0.0
        if fused_loss is not None:
            size = getattr(self, _LOSSES[fused_loss][1]).size()
            # The loss has the sum over a group's tokens, so each rank has its share of the mean.
            coef = self.get_aux_loss_coeff(fused_loss) / size / self._repeats()
            balance = "global" if size > 1 or fused_loss == "global_aux_loss" else "batch"
        if with_z_loss and self._has_losses():
            z_coef = (self.config.moe_z_loss_coeff or 0.0) / self.tp_cp_group.size()
        return _with_losses(self.moe_config.router, balance, coef, z_coef)

    def _repeats(self) -> int:
        """Returns how often a step calls this layer: Megatron divides the losses of a repeated MTP layer."""
        config = self.config
        return config.mtp_num_layers or 1 if self.is_mtp_layer and config.mtp_use_repeated_layer else 1

    @torch.no_grad()
    def _balance_counts(self, topk: TopK, fused_loss: str | None) -> BalanceCounts:
        """Returns the counts of plain top-K by score alone; for a loss of several ranks or steps a collective."""
        ids_TK = topk.topk_ids_TK if topk.by_score_TK is None else topk.by_score_TK
        times_1E = ids_TK[:1]  # not read
        if fused_loss is not None:
            group: Any = getattr(self, _LOSSES[fused_loss][1])
            if group.size() > 1 or fused_loss == "global_aux_loss":
                E = topk.scores_TE.shape[1]
                counts_E = topk.counts_E().clone() if topk.by_score_TK is None else times_chosen(ids_TK, E)
                if group.size() > 1:
                    dist.all_reduce(counts_E, group=group)
                times_1E = counts_E[None]
            if fused_loss == "global_aux_loss":
                assert self.global_tokens_per_expert is not None
                assert self.ga_steps is not None
                self.global_tokens_per_expert += times_1E[0]
                self.ga_steps += 1
                times_1E = self.global_tokens_per_expert.long()[None]
        return BalanceCounts(ids_TK, times_1E)

    def _replayed(self, topk: TopK) -> TopK:
        """Returns the top-K with the experts that RouterReplay has for it, and records them where it wants that."""
        if self.router_replay is None:
            return topk

        def chosen(*_: object, **__: object) -> tuple[Any, Tensor]:
            return None, topk.topk_ids_TK

        _, ids_TK = self.router_replay.get_replay_topk(topk.ranking_TE, self.topk, default_compute_topk=chosen)  # pyright: ignore[reportArgumentType]
        if ids_TK is topk.topk_ids_TK:
            return topk
        return topk.with_ids(ids_TK.long())

    def _attached(self, to: Tensor, value: Tensor, call: _Call) -> Tensor:
        """Returns `to` with the auxiliary losses attached, which are logged. value: the sum of those that are fused."""
        if not self._has_losses():
            return to
        if call.config.balance != "none" or call.config.z_loss_coef > 0:
            self._log(value.detach(), call)
            tokens = call.logits_TE.shape[0] * self.tp_cp_group.size()
            to = MoEAuxLossAutoScaler.apply(to, value * tokens if self.calculate_per_token_loss else value)
        return self._with_megatrons_losses(to, call)

    @torch.no_grad()
    def _log(self, value: Tensor, call: _Call) -> None:
        config, z_value = call.config, None
        if config.z_loss_coef > 0:
            z_value = value if call.fused_loss is None else z_loss(call.logits_TE, config)
            scaled = z_value / config.z_loss_coef / self._repeats()
            self._record("z_loss", scaled, avg_group=self.tp_dp_cp_group)
        if call.fused_loss is not None:
            name, group, mean = _LOSSES[call.fused_loss]
            balance = value if z_value is None else value - z_value
            scaled = balance / self.get_aux_loss_coeff(call.fused_loss)
            self._record(name, scaled, reduce_group=getattr(self, group), needs_dp_avg=mean)

    def _record(self, name: str, value: Tensor, **groups: Any) -> None:
        """As Megatron's router, which numbers the layers of multi-token prediction behind the others."""
        first = self.config.num_layers if self.is_mtp_layer else 0
        number = None if self.layer_number is None else self.layer_number + first
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        get_moe_metrics_tracker().record(name, value, number, layers, **groups)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def _with_megatrons_losses(self, to: Tensor, call: _Call) -> Tensor:
        """Returns `to` with the losses attached that are not fused. Megatron's functions log them."""
        names = [name for name in _LOSSES if name != call.fused_loss and self.get_aux_loss_coeff(name) > 0]
        if not names:
            return to
        chosen_TE, scores_TE = compute_routing_scores_for_aux_loss(
            call.logits_TE,
            self.topk,
            self.score_function,
            fused=self.config.moe_router_fusion,
            padding_mask=call.mask_T,
        )
        for name in names:
            sizes = call.shape if name == "seq_aux_loss" else ()
            apply: Any = getattr(self, f"_apply_{name}")
            to = apply(to, scores_TE, chosen_TE, *sizes, with_padding_mask=call.mask_T is not None)
        return to
