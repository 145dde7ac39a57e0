"""`SonicEPExperts`: the local experts' weights, stacked, with the attributes that Megatron's DDP and optimizer read.

The weights have the kernels' layout, so that no step copies them: the rows of `weight1` alternate between gate and up,
while Megatron has all gate rows first. checkpoint.py converts.

Legend: T tokens on this rank, H hidden size, e local experts, I expert width, J pre-activation columns (2I if gated
else I).
"""

import contextlib
from functools import partial
from typing import Any, final

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from sonic_ep.functional import moe
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.megatron.activation import activation_of
from sonic_ep.integrations.megatron.checkpoint import HeldExperts, by_expert, load_any_layout, sharded_experts
from sonic_ep.integrations.megatron.routing_map import RouterOutput
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.recorded_experts import ExpertsCall, RecordedExperts
from sonic_ep.kernels.experts.activations import activation_named, interleave
from sonic_ep.routing import Routing
from sonic_ep.transports import transport_for


@final
class SonicEPExperts(MegatronModule):
    """The parameters of this rank's experts, r * e to (r + 1) * e - 1 on rank r of the EP group.

    weight1: (e, J, H), interleaved gate and up rows if gated. weight2: (e, H, I).
    bias1: (e * J,), bias2: (e * H,), with add_bias_linear. They are flat because Megatron applies no weight decay to
    parameters of one dimension, and the biases of its own experts have one.

    With the same seed, the initial values are those of Megatron's SequentialMLP.

    The parameters belong to a module whose forward is called, because DDP finishes an overlapped parameter gather in
    the pre-forward hook of the module that has the parameter.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        options: SonicEPOptions,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.name = name
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.group = EPGroup(self.ep_group) if self.ep_group.size() > 1 else EPGroup.alone()
        self.transport = transport_for(self.group, options.transport)
        self.activation = activation_of(config)
        self.gated = activation_named(self.activation).gated
        self.save_dispatched = options.save_dispatched
        self._records = options.record_launches
        self._recorded = RecordedExperts(self.group, self.transport, config.moe_router_topk)
        H, I = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size  # noqa: E741
        assert I is not None  # TransformerConfig fills it in
        J = 2 * I if self.gated else I
        e = num_local_experts
        self.weight1, self.weight2 = self._parameter(e, J, H), self._parameter(e, H, I)
        self.bias1 = self._parameter(e * J) if config.add_bias_linear else None
        self.bias2 = self._parameter(e * H) if config.add_bias_linear else None
        set_tensor_model_parallel_attributes(self.weight1, True, 0, 2 if self.gated else 1)
        set_tensor_model_parallel_attributes(self.weight2, True, 1, 1)
        for bias in (self.bias1, self.bias2):
            if bias is not None:  # otherwise only the first expert-TP rank would include it in the gradient norm
                set_tensor_model_parallel_attributes(bias, True, 0, 1)
        if config.perform_initialization:
            self._initialize()
        load_any_layout(self, self.gated)

    def _parameter(self, *shape: int) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        value = nn.Parameter(torch.empty(shape, device=device, dtype=config.params_dtype))
        # False: Megatron averages the gradient over the ranks with the same experts, not over all data parallel ranks.
        value.allreduce = self._is_data_parallel()  # type: ignore[attr-defined]
        return value

    def _is_data_parallel(self) -> bool:
        """Returns True if the ranks with these experts are the ranks with the same dense weights."""
        config = self.config
        return (
            config.expert_model_parallel_size == 1
            and config.tensor_model_parallel_size == 1
            and config.expert_tensor_parallel_size == 1
        )

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draws as SequentialMLP does: expert by expert, fc1 (gate rows first) before fc2. Biases are zero."""
        on_cpu = self.config.use_cpu_initialization
        tracker: Any = get_cuda_rng_tracker()
        drawing = contextlib.nullcontext() if on_cpu else tracker.fork(get_expert_parallel_rng_tracker_name())
        init_fc1, init_fc2 = self.config.init_method, self.config.output_layer_init_method
        assert init_fc1 is not None  # TransformerConfig fills both in
        assert init_fc2 is not None
        with drawing:
            for weight1, weight2 in zip(self.weight1, self.weight2, strict=True):
                # Megatron draws in fp32 on the CPU, in the parameters' own dtype on the GPU.
                like: dict[str, Any] = {"dtype": torch.float32 if on_cpu else weight1.dtype, "device": weight1.device}
                fc1, fc2 = torch.empty(weight1.shape, **like), torch.empty(weight2.shape, **like)
                init_fc1(fc1)
                init_fc2(fc2)
                weight1.copy_(interleave(fc1, dim=0) if self.gated else fc1)
                weight2.copy_(fc2)
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                bias.zero_()

    def forward(self, x_TH: Tensor, routed: Routing | RouterOutput) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the EP group."""
        e, accumulates = self.num_local_experts, self.config.gradient_accumulation_fusion
        settings = {
            "activation": self.activation,
            "save_dispatched": self.save_dispatched,
            "accumulate_into_main_grad": accumulates,
            "layer_key": id(self),
        }
        b1, b2 = by_expert(self.bias1, e), by_expert(self.bias2, e)
        if isinstance(routed, Routing):
            weights = self.weight1, self.weight2, b1, b2
            return moe(x_TH, routed, *weights, transport=self.transport, group=self.group, **settings)
        common = {"group": self.group, "exchange": self.transport, "dtype": x_TH.dtype, "training": self.training}
        call = ExpertsCall(
            x_TH=x_TH,
            routed=routed.tensors,
            weights=(self.weight1, self.weight2, b1, b2),
            route=partial(routed.route, **common),
            training=self.training,
            settings=settings,
            problem=routed.problem,
        )
        return self._recorded(call) if self._records else self._recorded.compute(call)

    def backward_dw(self) -> None:
        """Does nothing: the weights' gradients are complete when those of the input are (delay_wgrad_compute)."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the experts for Megatron's distributed checkpoints, in Megatron's own layout: see checkpoint.py."""
        held = HeldExperts(self.ep_group.rank(), self.ep_group.size(), self.dp_group.rank(), self.gated)
        return sharded_experts(
            dict(self.named_parameters()),
            held,
            prefix=prefix,
            sharded_offsets=tuple(sharded_offsets),
            metadata=metadata,
        )
