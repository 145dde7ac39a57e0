"""`SonicEPAutoEPLayer`: AutoEP's layer with our routing, transport and experts.

Everything else is DeepSpeed's: parameters, their names, attributes and order, the shared expert, checkpoints and
groups. The engine, ZeRO and the checkpoint code depend on them.

Legend: T tokens on this rank, H hidden size, e local experts, I expert width.
"""

from typing import TypeVar

import torch
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
from deepspeed.module_inject.auto_ep_folding import FoldingGroupHandles
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.ep_experts import GroupedExperts
from torch import Tensor, nn

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.deepspeed.autoep_fields import activation_of, check, config_of
from sonic_ep.integrations.deepspeed.autoep_router import SonicEPRouter
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs

Module = TypeVar("Module", bound=nn.Module)


class SonicEPAutoEPLayer(AutoEPMoELayer):
    """The layer that DeepSpeed builds after `AutoEP.install()`. Its arguments are DeepSpeed's, and `options`.

    Raises ValueError for settings of `expert_parallel` that this layer cannot honour: see autoep_fields.py.
    """

    router: SonicEPRouter
    experts: "SonicEPGroupedExperts"
    tokens_per_expert: Tensor

    def __init__(
        self,
        spec: MoELayerSpec,
        source_module: nn.Module,
        ep_size: int,
        ep_rank: int,
        config: AutoEPConfig,
        deepep_scope: int | None = None,
        *,
        options: SonicEPOptions,
    ) -> None:
        check(spec, config)
        super().__init__(spec, source_module, ep_size, ep_rank, config, deepep_scope)
        self.options = options
        self._replace(self.router, SonicEPRouter).bind(config_of(spec, config, options))
        self._replace(self.experts, SonicEPGroupedExperts).our_activation = activation_of(spec)
        self._use_group(EPGroup.alone())

    def _replace(self, stock: nn.Module, ours: type[Module]) -> Module:
        """Puts a module of the class `ours` wherever this layer has `stock`, also under a second name. Returns it.

        It has the attributes, parameters and buffers of `stock`, the same objects, so only the forward differs.
        """
        module = ours.__new__(ours)
        vars(module).update(vars(stock))
        for name, child in self._modules.items():
            if child is stock:
                self._modules[name] = module
        return module

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: FoldingGroupHandles | None = None
    ) -> None:
        """Called by the engine. Uses DeepSpeed's group for `ep_group_name`, which it makes if necessary.

        Raises ValueError with tensor parallelism.
        """
        if folding_group_handles is not None and folding_group_handles.spec.tp_size > 1:
            raise ValueError(
                f"tensor_parallel.autotp_size={folding_group_handles.spec.tp_size} with expert_parallel is not "
                "supported: tokens would be routed once for every TP rank; set tensor_parallel.autotp_size to 1"
            )
        super().set_deepspeed_parallelism(use_data_before_expert_parallel_, folding_group_handles)
        self._use_group(EPGroup(self.ep_group) if self.ep_size > 1 else EPGroup.alone())

    def _use_group(self, group: EPGroup) -> None:
        self.ep, self._experts = group, FrameworkExperts.of(group, self.options, self.top_k)

    def _forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        H = hidden_states.shape[-1]
        x_TH = hidden_states.reshape(-1, H)
        logits_TE, bias_E = self.router(x_TH)
        runs_as = self._experts.begin(x_TH)
        routed = self.router.route(logits_TE, bias_E, x_TH, self.ep, self._experts.transport)
        output = self.experts(x_TH, routed.routing, self._experts, runs_as).view_as(hidden_states)
        with torch.no_grad():
            self.tokens_per_expert.add_(routed.topk.counts_E())  # after `moe`, which raises if any rank has a problem
        return self._finalize_output(output, x_TH, hidden_states, H)


class SonicEPGroupedExperts(GroupedExperts):
    """DeepSpeed's expert parameters: w1 (e, I, H) gate, w3 (e, I, H) up, w2 (e, H, I) down.

    DeepSpeed's checkpoints, ZeRO and Muon depend on these names and shapes. This module's forward uses the parameters,
    because ZeRO gathers and frees them around the forward of their module.
    """

    our_activation: str

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TH: Tensor, routing: Routing, computes: FrameworkExperts, runs_as: RunsAs | None
    ) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the EP group."""
        gate_eIH, up_eIH, down_eHI = (weight.to(x_TH.dtype) for weight in (self.w1, self.w3, self.w2))
        weights = gate_eIH, down_eHI, None, None
        return computes(x_TH, routing, weights, runs_as, up_eIH=up_eIH, activation=self.our_activation)
