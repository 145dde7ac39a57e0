"""`SonicEPExperts`: the local experts' weights, stacked, with the attributes that Megatron's DDP and optimizer read.

The weights have the kernels' layout, so that no step copies them: the rows of `weight1` alternate between gate and up,
while Megatron has all gate rows first, or blocks of moe_mlp_glu_interleave_size. checkpoint.py converts.

Legend: T tokens on this rank, H hidden size, e local experts, I expert width, J pre-activation columns (2I if gated
else I).
"""

import contextlib
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.integrations.megatron.activation import activation_of
from sonic_ep.integrations.megatron.checkpoint import (
    HeldExperts,
    by_expert,
    load_any_layout,
    sharded_experts,
    to_pairs,
)
from sonic_ep.integrations.megatron.groups import ExpertDivision
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs


@final
class SonicEPExperts(MegatronModule):
    """The parameters of this rank's experts, r * e to (r + 1) * e - 1 on rank r of the EP group.

    weight1: (e, J, H), interleaved gate and up rows if gated. weight2: (e, H, I). With experts cut in `parts`, I is the
    width of one part.
    bias1: (e * J,), bias2: (e * H,), with add_bias_linear. They are flat because Megatron applies no weight decay to
    parameters of one dimension, and the biases of its own experts have one.

    With the same seed, the initial values equal those that Megatron's SequentialMLP has.

    The parameters belong to a module whose forward is called, because DDP finishes an overlapped parameter gather in
    the pre-forward hook of the module that has the parameter.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        division: ExpertDivision,
        options: SonicEPOptions,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.name = name
        self.num_local_experts = num_local_experts
        groups, self._dispatch_group, self.parts, self.part = division
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        self.group = EPGroup(self._dispatch_group) if self._dispatch_group.size() > 1 else EPGroup.alone()
        self.activation = activation_of(config)
        self.gated = activation_named(self.activation).gated
        self.block = config.moe_mlp_glu_interleave_size if self.gated else None
        self._experts = FrameworkExperts.of(self.group, options, config.moe_router_topk * self.parts)
        self.transport = self._experts.transport
        assert config.moe_ffn_hidden_size is not None  # TransformerConfig fills it in
        H, I = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size // self.parts  # noqa: E741
        J = 2 * I if self.gated else I
        e = num_local_experts
        self.weight1, self.weight2 = self._parameter(e, J, H), self._parameter(e, H, I)
        self.bias1 = self._parameter(e * J) if config.add_bias_linear else None
        self.bias2 = self._parameter(e * H) if config.add_bias_linear else None
        if self.weight1.is_meta:
            self._mark_parameters()
        else:
            self.reset_parameters()
        load_any_layout(self, self.gated, self.block)

    def _parameter(self, *shape: int) -> nn.Parameter:
        config = self.config
        if config.use_cpu_initialization:
            device: Any = "cpu"
        else:
            device = "meta" if config.init_model_with_meta_device else torch.cuda.current_device()
        return nn.Parameter(torch.empty(shape, device=device, dtype=config.params_dtype))

    def _mark_parameters(self) -> None:
        """Sets the attributes by which Megatron's DDP and optimizer know a parameter."""
        for parameter in self.parameters():
            # False: Megatron averages the gradient over the ranks with the same experts, not over all data parallel
            # ranks.
            parameter.allreduce = self._is_data_parallel()  # type: ignore[attr-defined]
            if hasattr(parameter, "tensor_model_parallel"):
                continue
            # Of biases too: otherwise only the first expert-TP rank would include them in the gradient norm.
            dim = 1 if parameter is self.weight2 else 0
            stride = 2 if self.gated and parameter is self.weight1 else 1
            set_tensor_model_parallel_attributes(parameter, True, dim, stride)

    def _is_data_parallel(self) -> bool:
        """Returns True if the ranks with these experts are the ranks with the same dense weights."""
        config = self.config
        return (
            config.expert_model_parallel_size == 1
            and config.tensor_model_parallel_size == 1
            and config.expert_tensor_parallel_size == 1
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws as SequentialMLP does: expert by expert, fc1 (rows in Megatron's order) before fc2. Biases are zero.

        With init_model_with_meta_device, Megatron-FSDP calls it once it has given the parameters memory.
        """
        self._mark_parameters()
        if not self.config.perform_initialization:
            return
        on_cpu = self.config.use_cpu_initialization
        tracker: Any = get_cuda_rng_tracker()
        drawing = contextlib.nullcontext() if on_cpu else tracker.fork(get_expert_parallel_rng_tracker_name())
        init_fc1, init_fc2 = self.config.init_method, self.config.output_layer_init_method
        assert init_fc1 is not None  # TransformerConfig fills both in
        assert init_fc2 is not None
        with drawing:
            for weight1, weight2 in zip(self.weight1, self.weight2, strict=True):
                # Megatron draws whole weights in fp32 on the CPU, this rank's part in its own dtype on the GPU.
                like: dict[str, Any] = {"dtype": torch.float32 if on_cpu else weight1.dtype, "device": weight1.device}
                (J, H), whole = weight1.shape, self.parts if on_cpu else 1
                fc1, fc2 = torch.empty(J * whole, H, **like), torch.empty(H, weight2.shape[1] * whole, **like)
                init_fc1(fc1)
                init_fc2(fc2)
                if whole > 1:
                    halves = [half.chunk(whole)[self.part] for half in fc1.chunk(2 if self.gated else 1)]
                    fc1, fc2 = torch.cat(halves), fc2.chunk(whole, dim=1)[self.part]
                weight1.copy_(to_pairs(fc1[None], self.block)[0] if self.gated else fc1)
                weight2.copy_(fc2)
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                bias.zero_()

    def begin(self, x_TH: Tensor, *, is_bounded: bool) -> RunsAs | None:
        """See FrameworkExperts."""
        return self._experts.begin(x_TH, is_bounded=is_bounded)

    def forward(self, x_TH: Tensor, routing: Routing, runs_as: RunsAs | None) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the EP group."""
        biases = (by_expert(bias, self.num_local_experts) for bias in (self.bias1, self.bias2))
        accumulates = self.config.gradient_accumulation_fusion
        return self._experts(
            x_TH,
            routing,
            (self.weight1, self.weight2, *biases),
            runs_as,
            activation=self.activation,
            accumulate_into_main_grad=accumulates,
        )

    @torch.no_grad()
    def on_all_tokens(self, x_TH: Tensor, probs_TE: Tensor) -> Tensor:
        """Returns the same as forward, from every local expert on the tokens of all ranks, weighted by probs_TE.

        For generation: no size depends on the routing and the host reads nothing, so that a CUDA graph can hold it.
        Megatron pads experts to as many rows there. A collective of the EP group. T must be equal on all its ranks.
        """
        e, size, rank, group = self.num_local_experts, self.group.size, self.group.rank, self._dispatch_group
        activation, all_TH, all_TE = activation_named(self.activation), x_TH, probs_TE
        if size > 1:
            all_TH, all_TE = (x.new_empty(size * x.shape[0], x.shape[1]) for x in (x_TH, probs_TE))
            for gathered, own in ((all_TH, x_TH), (all_TE, probs_TE)):
                dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        sum_TH = torch.zeros_like(all_TH, dtype=torch.float32)
        b1, b2 = by_expert(self.bias1, e), by_expert(self.bias2, e)
        for local in range(e):
            h_TJ = F.linear(all_TH, self.weight1[local], None if b1 is None else b1[local])
            a_TI = activation.forward(h_TJ.float()).to(h_TJ.dtype)
            y_TH = F.linear(a_TI, self.weight2[local], None if b2 is None else b2[local])
            sum_TH.addcmul_(y_TH.float(), all_TE[:, rank * e + local, None].float())
        out_TH = sum_TH
        if size > 1:
            out_TH = sum_TH.new_empty(x_TH.shape)
            dist.reduce_scatter_tensor(out_TH, sum_TH, group=group)
        return out_TH.to(x_TH.dtype)

    def backward_dw(self) -> None:
        """Does nothing: the weights' gradients are complete when the input's are (delay_wgrad_compute)."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the experts for Megatron's distributed checkpoints, in Megatron's own layout: see checkpoint.py."""
        ep, copy = self.ep_group, self.dp_group.rank()
        held = HeldExperts(ep.rank(), ep.size(), copy, self.gated, self.part, self.parts, self.block)
        return sharded_experts(
            dict(self.named_parameters()),
            held,
            prefix=prefix,
            sharded_offsets=tuple(sharded_offsets),
            metadata=metadata,
        )
