"""Experts of each kind, ours and Megatron's, whole models of them, and their weights in one order.

Kinds: "ours", "sequential" (SequentialMLP) and "te_grouped" (TEGroupedMLP over a stand-in for Transformer Engine's
linear: its checkpoints alone).

Legend: E experts, e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = 8
KINDS = ("ours", "sequential", "te_grouped")
VARIANTS: dict[str, dict[str, Any]] = {
    "gated": {},
    "biases": {"add_bias_linear": True},
    "not-gated": {"gated_linear_unit": False},
    "interleaved": {"moe_mlp_glu_interleave_size": 2, "add_bias_linear": True},
}
OURS = {"fc1": "weight1", "fc2": "weight2", "b1": "bias1", "b2": "bias2"}
LINEARS = {"fc1": "linear_fc1.weight", "fc2": "linear_fc2.weight", "b1": "linear_fc1.bias", "b2": "linear_fc2.bias"}


def metadata(singleton: bool, sharding: str = "fully_reshardable") -> dict[str, Any]:
    """Of a distributed checkpoint. singleton: a tensor for each expert; sharding: of distributed optimizer state."""
    return {
        "singleton_local_shards": singleton,
        "distrib_optim_sharding_type": sharding,
        "chained_optim_avoid_prefix": True,
    }


def run_with(kind: str, *, seed: int | None = 0, distributed: bool = False, **config: Any) -> Any:
    """A Run whose experts are of `kind` (not "te_grouped"); inside parallel_state."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm")
    return Run(
        gpt_config(**config),
        use_sonic_ep(spec) if kind == "ours" else spec,
        seed=seed,
        distributed_optimizer=distributed,
    )


def module_of(run: Any) -> Any:
    """The GPTModel of a Run."""
    return run.models[0].module


def bare_experts(kind: str, config: Any) -> Any:
    """This rank's experts of `kind`, as built; inside parallel_state."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from sonic_ep.integrations.megatron import SonicEPOptions
    from sonic_ep.integrations.megatron.experts import SonicEPExperts
    from sonic_ep.integrations.megatron.groups import divide_experts

    groups, count = get_default_pg_collection(), EXPERTS // config.expert_model_parallel_size
    if kind == "ours":
        options = SonicEPOptions()
        return SonicEPExperts(count, config, divide_experts(groups, config, options), options)
    if kind == "sequential":
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return SequentialMLP(count, config, linears, groups)
    return _te_grouped_mlp(count, config, groups)


def weights(kind: str, experts: Any) -> dict[str, Tensor]:
    """fc1 (e, J, H), rows in Megatron's order, fc2 (e, H, I), and with biases b1 (e, J), b2 (e, H). Copies or views."""
    if kind == "ours":
        count, pairs = experts.num_local_experts, ("fc1", "b1") if experts.config.gated_linear_unit else ()
        found = {name: getattr(experts, own) for name, own in OURS.items() if getattr(experts, own) is not None}
        stacked = {name: each.data if each.dim() > 1 else each.data.view(count, -1) for name, each in found.items()}
        return {
            name: megatrons_order(each[:, ::2], each[:, 1::2], experts.config) if name in pairs else each
            for name, each in stacked.items()
        }
    return {
        name: torch.stack([each.data for each in each_expert])
        for name, each_expert in _split_rows(kind, experts).items()
    }


def megatrons_order(gate: Tensor, up: Tensor, config: Any) -> Tensor:
    """(e, J, ...) of gate and up rows, (e, I, ...): blocks of both in turn, or all gate rows first."""
    block = config.moe_mlp_glu_interleave_size or gate.shape[1]
    starts = range(0, gate.shape[1], block)
    return torch.cat([half[:, start : start + block] for start in starts for half in (gate, up)], 1)


@torch.no_grad()
def set_weights(kind: str, experts: Any, values: dict[str, Tensor]) -> None:
    """Write `values`, as `weights` gives them."""
    if kind == "ours":
        for name, value in values.items():
            pairs = experts.config.gated_linear_unit and name in ("fc1", "b1")
            parameter = getattr(experts, OURS[name])
            if pairs:
                numbers = torch.arange(value.shape[1])
                order = megatrons_order(numbers[None, ::2], numbers[None, 1::2], experts.config)[0]
                value = torch.empty_like(value).index_copy_(1, order, value)
            parameter.copy_(value.view(parameter.shape))
    else:
        for name, parameters in _split_rows(kind, experts).items():
            for parameter, value in zip(parameters, values[name], strict=True):
                parameter.copy_(value)


def _split_rows(kind: str, experts: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of kinds that have one for each expert, expert by expert."""
    names = LINEARS if experts.config.add_bias_linear else {name: LINEARS[name] for name in ("fc1", "fc2")}
    if kind == "sequential":
        return {name: [each.get_parameter(own) for each in experts.local_experts] for name, own in names.items()}
    count = range(experts.num_local_experts)
    return {name: [experts.get_parameter(f"{own}{local}") for local in count] for name, own in names.items()}


class TEGroupedLinear(nn.Module):
    """Weights and checkpoints of Transformer Engine's grouped linear, as TEGroupedLinear in
    megatron/core/extensions/transformer_engine.py of 0.19.2 has them (_sharded_state_dict_grouped)."""

    def __init__(self, count: int, shape: tuple[int, int], has_bias: bool, pg_collection: Any, tp_axis: int) -> None:
        super().__init__()
        self.count, self.groups, self.tp_axis = count, pg_collection, tp_axis
        self.kinds = ("weight", "bias") if has_bias else ("weight",)
        for local in range(count):
            self.register_parameter(f"weight{local}", nn.Parameter(torch.zeros(shape)))
            if has_bias:
                self.register_parameter(f"bias{local}", nn.Parameter(torch.zeros(shape[0])))

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        result: dict[str, Any] = {}
        for local in range(self.count):
            expert = self.groups.ep.rank() * self.count + local
            singleton = metadata.get("singleton_local_shards", False)
            axis = () if singleton else ((len(sharded_offsets), expert, self.count * self.groups.ep.size()),)
            state: dict[str, Any] = {f"{local}.{kind}": getattr(self, f"{kind}{local}") for kind in self.kinds}
            part = make_sharded_tensors_for_checkpoint(
                state | {f"{local}._extra_state": None},
                "",
                {f"{local}.weight": self.tp_axis} | ({f"{local}.bias": 0} if self.tp_axis == 0 else {}),
                (*sharded_offsets, *axis),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{local}.", f"{expert}.{prefix}" if singleton else prefix)
            for kind in self.kinds:
                result[f"{prefix}{kind}{local}"] = part[f"{local}.{kind}"]
            result[f"{prefix}_extra_state{local or ''}"] = part[f"{local}._extra_state"]
        for value in result.values():
            value.replica_id = (*value.replica_id[:2], self.groups.expt_dp.rank())
        return result


def _te_grouped_mlp(count: int, config: Any, groups: Any) -> Any:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    module: Any = TEGroupedMLP.__new__(TEGroupedMLP)
    MegatronModule.__init__(module, config=config)
    module.num_local_experts, module.ep_group, module.tp_group = count, groups.ep, groups.expt_tp
    H, I = config.hidden_size, config.moe_ffn_hidden_size  # noqa: E741
    J = 2 * I if config.gated_linear_unit else I
    module.linear_fc1 = TEGroupedLinear(count, (J, H), config.add_bias_linear, groups, 0)
    module.linear_fc2 = TEGroupedLinear(count, (H, I), config.add_bias_linear, groups, 1)
    return module
