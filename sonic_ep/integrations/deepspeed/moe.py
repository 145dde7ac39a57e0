"""`MoE`: deepspeed.moe.layer.MoE with our gate, dispatch, experts and combine.

A subclass, because the engine asks isinstance(module, MoE) before it makes groups, sorts parameters and writes experts.
It has only what the engine needs: attributes, `deepspeed_moe` and the keys of its state dict. It builds none of the
parent's modules.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from typing import final

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sonic_ep.checks import problem_with_input
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.deepspeed.experts import StackedExperts
from sonic_ep.integrations.deepspeed.moe_options import check
from sonic_ep.integrations.deepspeed.optimizer_states import guard_optimizer_states
from sonic_ep.integrations.deepspeed.template import Template, read_template
from sonic_ep.integrations.deepspeed.topk_gate import TopKGate
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.integrations.options import SonicEPOptions


@final
class MoE(StockMoE):
    """A MoE layer with the arguments of deepspeed.moe.layer.MoE (table in moe_options.py), and SonicEPOptions.

    Raises ValueError for arguments that cannot be honoured, a template that no kernel computes among them. Warns once
    about arguments without effect, such as DeepSpeed's default drop_tokens=True.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        options: SonicEPOptions | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        nn.Module.__init__(self)
        check(arguments)
        self.use_residual, self.enable_expert_tensor_parallelism = use_residual, enable_expert_tensor_parallelism
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"  # DeepSpeed reads the number back
        options = options or SonicEPOptions()
        template = read_template(expert, hidden_size)
        experts = StackedExperts(expert, template, self.num_local_experts, self.expert_group_name)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            policy=noisy_gate_policy,
            samples_second=top2_2nd_expert_sampling,
            rounding=options.rounding,
        )
        self.deepspeed_moe = RoutedExperts(gate, experts, ep_size, options)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        guard_optimizer_states()

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine. Uses DeepSpeed's groups, which it makes if they do not exist yet. A collective.

        Raises ValueError with tensor parallelism, and on every rank if the layer differs between ranks.
        """
        size = bwc_tensor_model_parallel_world_size(groups.mpu)
        if size > 1:
            raise ValueError(
                f"mpu has tensor parallel size {size}, with which every tensor parallel rank would route the same "
                "tokens; set it to 1 and raise ep_size"
            )
        super().set_deepspeed_parallelism(use_data_before_expert_parallel_)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Applies the layer. A collective: every rank of the EP group calls it, in the same order and mode.

        Shapes:  hidden_states (..., H) in the dtype of the experts, or any floating dtype under autocast. used_token,
                 for k = 1: one entry per token, 0 for tokens that no expert shall process. T may be 0 and may differ
                 between ranks.
        Returns: the output, like hidden_states; l_aux (), unweighted, of this rank's tokens; exp_counts (E,) int64,
                 tokens of this rank per expert. Both are of plain top-k, before token rounding.
        Raises:  ValueError on every rank if on any rank shape, dtype or device is wrong, or if the mode differs;
                 RuntimeError for ep_size > 1 before deepspeed.initialize.
        """
        output, l_aux, exp_counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            out = self.mlp(hidden_states)
            residual = out[0] if isinstance(out, tuple) else out
            shares = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., 0:1] + residual * shares[..., 1:]
        return output, l_aux, exp_counts


@final
class RoutedExperts(nn.Module):
    """Gate, experts and their group. The layer's attribute for it, `deepspeed_moe`, is part of every state dict key."""

    def __init__(self, gate: TopKGate, experts: StackedExperts, ep_size: int, options: SonicEPOptions) -> None:
        super().__init__()
        self.gate, self.experts, self.options = gate, experts, options
        self.ep_size = ep_size
        self.group: EPGroup | None = None
        self._experts: FrameworkExperts | None = None
        if ep_size == 1:
            self._use_group(EPGroup.alone())

    def _set_ep_group(self, ep_group: ProcessGroup) -> None:
        """Called by DeepSpeed's layer, any number of times."""
        if self.ep_size > 1 and (self.group is None or self.group.process_group is not ep_group):
            group = EPGroup(ep_group)
            _check_alike(group, self.gate, self.experts.template, self.options)
            self._use_group(group)

    def _use_group(self, group: EPGroup) -> None:
        self.group, self._experts = group, FrameworkExperts.of(group, self.options, self.gate.k)

    def forward(self, x: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.group is None or self._experts is None:
            raise RuntimeError(
                f"the layer has no expert-parallel group of ep_size={self.ep_size} yet: call deepspeed.initialize, or "
                "set_deepspeed_parallelism() on every rank"
            )
        x_TH, problem = self._rows(x)
        used_T, used_problem = self._used(used_token, x_TH)
        exchange, problem = self._experts.transport, problem or used_problem
        runs_as = self._experts.begin(x_TH)
        x_TH, routing, l_aux, counts_E = self.gate(x_TH, used_T, problem=problem, group=self.group, exchange=exchange)
        return self.experts(x_TH, routing, self._experts, runs_as).view_as(x), l_aux, counts_E

    def _rows(self, x: object) -> tuple[Tensor, str | None]:
        """Returns x as (T, H) and None, or no rows and what is wrong with x. The gate sends that to the other ranks."""
        H, device, dtype = self.gate.wg.config.d, self.gate.wg.weight.device, self.experts.w1.dtype
        rows = x.flatten(0, -2) if isinstance(x, Tensor) and x.dim() > 2 else x
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            rows = rows.to(dtype) if isinstance(rows, Tensor) and rows.is_floating_point() else rows
        problem = problem_with_input(rows, d=H, dtype=dtype, device=device, sequences=False, parameters=self.parameters)
        if problem is None and isinstance(rows, Tensor):
            return rows, None
        return torch.empty(0, H, dtype=dtype, device=device), problem

    def _used(self, used_token: Tensor | None, x_TH: Tensor) -> tuple[Tensor | None, str | None]:
        """Returns (T,) bool or None, and what is wrong with it or None. As in DeepSpeed, only k = 1 reads it."""
        if used_token is None or self.gate.k > 1:
            return None, None
        if used_token.numel() != x_TH.shape[0]:
            return None, f"used_token has shape {tuple(used_token.shape)}, wanted one entry for each of the tokens"
        return used_token.reshape(-1).to(x_TH.device) != 0, None


def _check_alike(group: EPGroup, gate: TopKGate, template: Template, options: SonicEPOptions) -> None:
    """Raises ValueError, on every rank, if the layer differs between ranks: they could deadlock or mix up experts."""
    same = {"a MoE layer": f"{gate.wg.config}, samples={gate.samples}, {template}, {options}"}
    group.raise_together(None, error=ValueError, stage="construction", **same)
