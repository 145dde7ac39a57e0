"""`SonicEPMoELayer`: Megatron's MoELayer with our dispatch, experts and combine.

Router and shared experts are Megatron's own. So are the auxiliary losses and their tracker, the z-loss, expert bias,
group limits, jitter, Sinkhorn and dropping. The layer has no state between calls, so any number of microbatches may be
in flight.

Legend: H hidden size, T tokens on this rank, E experts. s, b, h are Megatron's: sequence length and microbatch on this
rank, hidden size.
"""

from types import SimpleNamespace
from typing import Any, final

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore, get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.integrations.megatron.experts import SonicEPExperts
from sonic_ep.integrations.megatron.fields import check
from sonic_ep.integrations.megatron.rounding import RoundedRouter
from sonic_ep.integrations.megatron.routing_map import routing_of_map
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.routing import Routing


@final
class SonicEPMoELayer(MoELayer):
    """A subclass of MoELayer, because Megatron asks isinstance, for recomputation and more. Has no token dispatcher.

    submodules: its `experts` are not used. options: see SonicEPOptions. pg_collection: default: Megatron's global
    groups.

    Raises ValueError for a config that the layer cannot honour, see fields.py; RuntimeError if Megatron's router cannot
    run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        options: SonicEPOptions | None = None,
    ) -> None:
        submodules, options = submodules or MoESubmodules(), options or SonicEPOptions()
        check(config, options)
        if not hasattr(moe_utils, "te_general_gemm"):
            raise RuntimeError(
                "without Transformer Engine, megatron-core 0.16.1 leaves a name undefined that its router looks up; "
                "set megatron.core.transformer.moe.moe_utils.te_general_gemm = None first"
            )
        pg_collection = pg_collection or get_default_pg_collection()
        BaseMoELayer.__init__(self, config=config, layer_number=layer_number, pg_collection=pg_collection)
        self.submodules, self.options = submodules, options
        self.tp_group = pg_collection.tp  # otherwise sharded_state_dict uses Megatron's global group
        # Inference sets drop_and_pad in every layer's dispatcher. The router reads the config's instead.
        self.token_dispatcher: Any = SimpleNamespace(drop_and_pad=False)
        selective = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
        self.moe_layer_recompute = "moe" in selective
        self.shared_experts_recompute = "shared_experts" in selective
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()  # always empty; `route` reads it
        self.router = submodules.router(config=config, pg_collection=pg_collection)
        self.experts = SonicEPExperts(self.num_local_experts, config, pg_collection, options)
        self.rounded_router = None
        if options.rounding is not None:
            self.rounded_router = RoundedRouter(self.router, config, options.rounding, self.experts.group)
        if self.use_shared_expert:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                pg_collection=pg_collection,
                gate=config.moe_shared_expert_gate,
            )

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Applies the layer. A collective of the EP group.

        Shapes:  hidden_states (s, b, h) in the parameters' dtype; with sequence parallelism this rank's slice of the
                 sequence. padding_mask (b, s) bool or None: True for padding, which losses and counts exclude.
                 Returns the output, like hidden_states, and None for the bias, which the output includes.
        Raises:  ValueError in training with tensor parallelism but no sequence parallelism, as Megatron's layer does.
                 NotImplementedError for intermediate_tensors, which only partial CUDA graphs and overlapped batches
                 pass.
        """
        if intermediate_tensors is not None:
            raise NotImplementedError("intermediate_tensors: the layer cannot be entered half way")
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                f"tensor_model_parallel_size={self.attn_tp_group.size()} without sequence_parallel: every tensor "
                "parallel rank would route the same tokens; set sequence_parallel=True"
            )
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)  # None without one, or if it overlaps
        overlapped: Any = self.shared_experts if self.shared_expert_overlap else None
        if overlapped is not None:
            overlapped.pre_forward_comm(hidden_states)
            overlapped.linear_fc1_forward_and_act()
            overlapped.linear_fc2_forward()
            overlapped.post_forward_comm()
        routing = self._routing(hidden_states, padding_mask)
        output = self.experts(hidden_states.reshape(-1, hidden_states.shape[-1]), routing).view_as(hidden_states)
        if overlapped is not None:
            shared = overlapped.get_output()
        return output if shared is None else output + shared

    def _routing(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Routing:
        probs_TE, routing_map_TE = self.route(hidden_states, padding_mask)
        transport = self.experts.transport
        if self.rounded_router is not None and self.training:
            return self.rounded_router.routing(probs_TE, routing_map_TE, hidden_states.dtype, transport)
        drops = self.config.moe_expert_capacity_factor is not None
        return routing_of_map(
            probs_TE,
            routing_map_TE,
            group=self.experts.group,
            exchange=transport,
            dtype=hidden_states.dtype,
            training=self.training,
            K=None if drops else self.config.moe_router_topk,
        )
