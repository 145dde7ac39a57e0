"""Weights of a GPT by their global names, however ranks divide it and whoever's its experts are."""

import re
import zlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn


@torch.no_grad()
def fill_weights(model: Any, seed: int) -> None:
    """Give each weight of a GPT the values of its global name: equal for every TP, PP and EP size, for stock experts
    (SequentialMLP) and ours.

    Matrices, and biases of experts and router, are normal(0, 0.1), norm weights 1 +- 0.1, the rest as it was built.
    Ours is known by `experts.weight1` (E_local, 2n, d), gate and up rows interleaved if gated, and `experts.weight2`,
    with flat biases.
    """
    for name, parameter in model.named_parameters():
        layer, _, rest = name.partition("layers.")[2].partition(".")
        if rest:
            offset = model.decoder.layers[int(layer)].layer_number if name.startswith("decoder") else int(layer)
            name = f"{name.split('layers.')[0]}layers.{offset}.{rest}"
        stacked = re.fullmatch(r"(.*experts\.)(weight|bias)([12])", name)
        if ".local_experts." in name:
            prefix, _, rest = name.partition("local_experts.")
            local, _, matrix = rest.partition(".")
            name = f"{prefix}{_first_expert(model) + int(local)}.{matrix}"
            parameter.copy_(_tensor_share(name, parameter, seed, gated=model.config.gated_linear_unit, expert=True))
        elif stacked and parameter.dim() == (3 if stacked[2] == "weight" else 1):
            for local, weight in enumerate(parameter.view(_num_local_experts(model), -1, *parameter.shape[2:])):
                key = f"{stacked[1]}{_first_expert(model) + local}.linear_fc{stacked[3]}.{stacked[2]}"
                experts, dim = _moe_layer(model).experts, 0 if stacked[3] == "1" else weight.dim() - 1
                cut = _Cut(dim, experts.parts, experts.part, experts.gated and stacked[3] == "1")
                values = _share(key, weight.shape, seed, cut)
                if stacked[3] == "1" and model.config.gated_linear_unit:
                    # The halves one after the other, gate first, become pairs of rows.
                    values = values.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
                weight.copy_(values)
        elif parameter.dim() > 1:
            parameter.copy_(_tensor_share(name, parameter, seed))
        elif name.endswith("router.bias"):
            parameter.copy_(_values(name, parameter.shape, seed))
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + _values(name, parameter.shape, seed))


def _moe_layer(model: Any) -> Any:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return next(module for module in model.modules() if isinstance(module, MoELayer))


def _num_local_experts(model: Any) -> int:
    return _moe_layer(model).num_local_experts


def _first_expert(model: Any) -> int:
    return _moe_layer(model).local_expert_indices[0]


def _values(key: str, shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return 0.1 * torch.randn(shape, generator=generator)


class _Cut(NamedTuple):
    """The `part` of `parts` along `dim`. halves: of each of the two halves."""

    dim: int
    parts: int
    part: int
    halves: bool


def _tensor_share(name: str, parameter: nn.Parameter, seed: int, *, gated: bool = True, expert: bool = False) -> Tensor:
    """What a tensor-parallel rank holds of the whole weight. fc1 of a gated unit divides gate and up rows each."""
    from megatron.core import parallel_state as state

    group: Any = state.get_expert_tensor_parallel_group() if expert else state.get_tensor_model_parallel_group()
    rank, size = group.rank(), group.size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return _values(name, parameter.shape, seed)
    dim = cast(int, parameter.partition_dim)  # type: ignore[attr-defined]
    return _share(name, parameter.shape, seed, _Cut(dim, size, rank, "linear_fc1" in name and gated))


def _share(name: str, shape: torch.Size, seed: int, cut: _Cut) -> Tensor:
    """What remains of the whole weight, of this shape, after the cut."""
    whole = list(shape)
    whole[cut.dim] *= cut.parts
    runs = _values(name, torch.Size(whole), seed).chunk(2 if cut.halves else 1, cut.dim)
    return torch.cat([run.chunk(cut.parts, cut.dim)[cut.part] for run in runs], cut.dim)
