"""`SonicEPMoELayer`: Megatron's MoELayer with our dispatch, experts and combine.

Router and shared experts are Megatron's own. So are the auxiliary losses and their tracker, the z-loss, expert bias,
group limits, jitter, Sinkhorn, quantile balancing and dropping. The forward is MoELayer's too, in its steps: route,
preprocess, dispatch, routed experts, combine, postprocess. Ours do all their work in the fourth, and dispatch starts a
shared expert that overlaps. So whatever enters a layer half way does it here as there: partial CUDA graphs, and batches
that overlap.

Legend: O tokens with padding, T tokens on this rank, E experts, N pairs this rank sends. s, b, h are Megatron's:
sequence length and microbatch on this rank, hidden size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, final

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.integrations.megatron.dispatcher import NoDispatcher
from sonic_ep.integrations.megatron.experts import SonicEPExperts
from sonic_ep.integrations.megatron.fields import check, log_replaced
from sonic_ep.integrations.megatron.groups import divide_experts
from sonic_ep.integrations.megatron.latent import latent_projections
from sonic_ep.integrations.megatron.replay import check_replays, replays
from sonic_ep.integrations.megatron.rounding import RoundedRouter
from sonic_ep.integrations.megatron.routing_map import in_parts, routing_of_dropped
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.topk_routing import routing_of_map
from sonic_ep.routers.given_routing import NOTHING_GIVEN, GivenRouting
from sonic_ep.routers.topk_pairs import RouterCall
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs


@final
class SonicEPMoELayer(MoELayer):
    """A subclass of MoELayer, because Megatron asks isinstance, for recomputation and more.

    submodules: its `experts` are not used. is_mtp_layer, name: as Megatron's TransformerLayer passes them. options: see
    SonicEPOptions. pg_collection: default: Megatron's global groups.

    Raises ValueError for a config that the layer cannot honour, see fields.py.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        options: SonicEPOptions | None = None,
    ) -> None:
        submodules, options = submodules or MoESubmodules(experts=_unused), options or SonicEPOptions()
        if config.batch_invariant_mode:
            options = dataclasses.replace(options, batch_invariant=True)
        check(config, options)
        given = pg_collection or get_default_pg_collection()
        division = divide_experts(given, config, options)
        BaseMoELayer.__init__(
            self, config=config, layer_number=layer_number, pg_collection=division.groups, is_mtp_layer=is_mtp_layer
        )
        self.submodules, self.options = submodules, options
        self.tp_group = given.tp  # otherwise sharded_state_dict uses Megatron's global group
        selective = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
        # Megatron's own graphs of parts of a layer recompute in MoETransformerLayer instead.
        self.moe_layer_recompute = "moe" in selective and config.cuda_graph_impl != "local"
        self._graphs_generation = config.cuda_graph_impl == "local" and not config.cuda_graph_modules
        self.shared_experts_recompute = "shared_experts" in selective
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.fwd_execution_map = ["route", "expert_compute", "postprocess"]
        router: Any = submodules.router  # its protocol lacks is_mtp_layer, which Megatron passes
        self.router: Any = router(config=config, pg_collection=given, is_mtp_layer=is_mtp_layer)
        _mend_counts(self.router)
        if config.moe_latent_size:
            self.fc1_latent_proj, self.fc2_latent_proj = latent_projections(config, name)
        self.token_dispatcher: Any = NoDispatcher(copies=config.overlap_moe_expert_parallel_comm)
        check_replays(self.router, self.token_dispatcher)
        self.experts: Any = SonicEPExperts(
            self.num_local_experts, config, division, options, name=_named(name, "experts")
        )
        log_replaced(config, options, self.experts)
        self.rounded_routing: Callable[..., Routing] | None = None
        if options.rounding is not None:
            self.rounded_routing = RoundedRouter(self.router, config, options.rounding).routing
        if self.use_shared_expert:
            if submodules.shared_experts is None:
                raise ValueError(
                    f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size}, and the spec "
                    "has no shared experts; set MoESubmodules.shared_experts"
                )
            self.shared_experts: Any = submodules.shared_experts(
                config=config,
                pg_collection=given,
                gate=config.moe_shared_expert_gate,
                name=_named(name, "shared_experts"),
            )
            if self.shared_expert_overlap:
                self.token_dispatcher.shared_experts = self.shared_experts

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the layer. A collective of the EP group.

        Shapes:  hidden_states (s, b, h) in the parameters' dtype; with sequence parallelism this rank's slice of the
                 sequence. padding_mask (b, s) bool or None: True for padding, which losses, counts, dispatch and
                 rounding exclude. Routed experts give it 0.
                 Returns the output, like hidden_states, and None for the bias, which the output includes.
                 intermediate_tensors: as MoELayer's, for a part of the forward.
        Raises:  ValueError in training with tensor parallelism but no sequence parallelism, as Megatron's layer does.
                 ValueError on every rank for a mask of another shape and wrong ids of a RouterReplay.
        """
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                f"tensor_model_parallel_size={self.attn_tp_group.size()} without sequence_parallel: every tensor "
                "parallel rank would route the same tokens; set sequence_parallel=True"
            )
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Returns what the router does. padding_mask: (s, b) bool, True for padding, or None."""
        if not self.cudagraph_tensor_store.is_empty():  # a graph of the router has noted its padding
            return super().route(hidden_states, padding_mask)
        dispatcher = self.token_dispatcher
        padding_mask = dispatcher.note_padding(hidden_states, padding_mask)
        with _no_losses(self.router) if self._has_no_tokens() else nullcontext():
            routed = super().route(hidden_states, padding_mask)
        if replays(self.router) and not dispatcher.is_replayed:
            dispatcher.problem = (
                "RouterReplay has no effect on this router; set moe_router_fusion=False, and a "
                "moe_router_load_balancing_type other than 'sinkhorn' and 'quantile_balancing'"
            )
        return routed

    def _has_no_tokens(self) -> bool:
        """Returns True if all tokens are padding of which Megatron's losses of a microbatch would be 0 / 0."""
        padding_O = self.token_dispatcher.padding_O
        if padding_O is None or not self.training or not host_may_wait(padding_O):
            return False
        if not isinstance(self.router, TopKRouter) or not self.router.is_aux_loss_enabled():
            return False
        num_tokens = (~padding_O).sum()
        if self.router.tp_cp_group.size() > 1:
            dist.all_reduce(num_tokens, group=self.router.tp_cp_group)
        return not int(num_tokens)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what dispatch gets: hidden states, in the latent size if there is one, and weights of pairs.

        The weights are probs_TE. Rounding comes later, once the shared expert is started. But a batch that overlaps
        cuts autograd's graph after this step, and rounding reads the router's logits. So it rounds here, and returns
        the (N,) weights of that.
        """
        hidden_states, probs = super().preprocess(hidden_states, probs, routing_map)
        if self.config.overlap_moe_expert_parallel_comm and self._rounds:
            dispatcher = self.token_dispatcher
            x_OH = hidden_states.flatten(0, 1)
            given = dispatcher.given(x_OH)
            routing = self._routing(given.take(x_OH), given.take(probs), given.take(routing_map), given)
            dispatcher.rounded, probs = (routing, given), routing.weights_N
        return hidden_states, probs

    @property
    def _rounds(self) -> bool:
        return self.options.rounding is not None and self.training and not self.token_dispatcher.is_replayed

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Starts a shared expert that overlaps. Returns its arguments."""
        return self.token_dispatcher.token_dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Returns the routed experts' output, like hidden_states, combined already, and None for the bias."""
        dispatcher = self.token_dispatcher
        x_OH = dispatcher.own(hidden_states.reshape(-1, hidden_states.shape[-1]))
        on_all_tokens = dispatcher.drop_and_pad and not self.training
        given = NOTHING_GIVEN if on_all_tokens else dispatcher.given(x_OH)
        noted, x_TH = dispatcher.pop_routing(), given.take(x_OH)
        if isinstance(noted, Tensor):
            noted, probs = given.take(noted), given.take(probs)
        if self.config.moe_apply_probs_on_input:
            x_TH = (x_TH * probs.sum(1, keepdim=True)).to(x_TH.dtype)
            probs = (probs != 0).to(probs.dtype)  # padding has none
        if on_all_tokens:
            probs_TE = in_parts(probs, self.num_local_experts, self.experts.parts)
            return self.experts.on_all_tokens(x_TH, probs_TE).view_as(hidden_states), None
        if self._graphs_generation and not host_may_wait(x_TH):
            raise ValueError(
                "cuda_graph_modules=[] with cuda_graph_impl='local' captures whole MoE layers in generation, where "
                "Megatron pads experts, and this is none; call toggle_cuda_graphs(model, 'none') before, or set "
                "cuda_graph_modules=['attn', 'moe_router', 'moe_preprocess']"
            )
        if isinstance(noted, Routing):
            out_TH = self.experts(x_TH, dataclasses.replace(noted, weights_N=probs), None)
        else:
            rounding = self.options.rounding if self._rounds else None
            is_bounded = rounding is not None and rounding.capacity_factor is not None
            runs_as = self.experts.begin(x_TH, is_bounded=is_bounded)
            out_TH = self.experts(x_TH, self._routing(x_TH, probs, noted, given, runs_as), runs_as)
        return given.put(out_TH).view_as(hidden_states), None

    def _routing(
        self,
        x_TH: Tensor,
        probs: Tensor,
        noted: Tensor,
        given: GivenRouting,
        runs_as: RunsAs | None = None,
    ) -> Routing:
        """Returns the routing of what the router returned, without the padding in maps and other tables."""
        call = RouterCall(
            group=self.experts.group,
            exchange=self.experts.transport,
            dtype=x_TH.dtype,
            training=self.training,
            problem=given.problem,
            has_given_experts=self.options.rounding is not None and self.token_dispatcher.is_replayed,
        )
        if self._rounds:
            assert self.rounded_routing is not None
            return self.rounded_routing(probs, noted, given, call, runs_as)
        parts = self.experts.parts
        if parts > 1:
            probs, noted = (in_parts(each_TE, self.num_local_experts, parts) for each_TE in (probs, noted))
        if self.config.moe_expert_capacity_factor is not None:
            return routing_of_dropped(probs, noted, call)
        return routing_of_map(probs, noted, self.config.moe_router_topk * parts, call=call, runs_as=runs_as)


@contextmanager
def _no_losses(router: TopKRouter) -> Iterator[None]:
    """A context without the losses that are means over a microbatch. global_aux_loss is a collective of more ranks."""
    coeff_of = router.get_aux_loss_coeff
    router.get_aux_loss_coeff = lambda aux_loss_type: coeff_of(aux_loss_type) * (aux_loss_type == "global_aux_loss")
    try:
        yield
    finally:
        del router.get_aux_loss_coeff


# TopKRouter's buffers that count tokens and steps.
_COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


def _mend_counts(router: Any) -> None:
    """Makes the router's counts int64, without padding.

    Megatron's are fp32, and bf16 in a bf16 model, where 256 and 1 are 256. With a mask, (T,), it fails to count.
    """
    for name in _COUNTS:
        counts = getattr(router, name, None)
        if counts is not None:
            setattr(router, name, counts.long())
    if isinstance(router, TopKRouter):
        router._apply_expert_bias = functools.partial(_count, router._apply_expert_bias)


def _count(count: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    count(routing_map, None if padding_mask is None else padding_mask[:, None])


def _named(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _unused(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("SonicEPMoELayer builds its experts itself")
