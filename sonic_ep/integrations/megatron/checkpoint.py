"""Our experts in Megatron-Core's checkpoints: reads and writes the keys and shapes of Megatron's own experts.

Distributed checkpoints. SequentialMLP and TEGroupedMLP, and GroupedMLP of older versions, write one layout: tensors of
all E experts, in which gate and up rows of a gated unit are two shards. A checkpoint of any of them loads here and the
reverse, also at another EP size, model and optimizer state alike:

    <prefix>experts.linear_fc1.weight  (E, J, H)  gate rows, then up rows       ...linear_fc1.bias  (E, J)
    <prefix>experts.linear_fc2.weight  (E, H, I)                                ...linear_fc2.bias  (E, H)

With metadata["singleton_local_shards"] each expert g has tensors of its own instead, a gated fc1 two of them:
<prefix>experts.{g}.linear_fc1.weight_w and ..._v (I, H) each, <prefix>experts.{g}.linear_fc2.weight (H, I). In both
layouts every expert also has a Transformer Engine state of each of its linear layers, `_extra_state`. Ours is None.

Plain state dicts hold only the local experts, under names that differ by module: `to_layout` lists the names of
Megatron's two. Our biases are flat there, (e * J,) and (e * H,), as in memory.

In memory a gated fc1 has gate and up rows in turn (see experts.py); in files it has Megatron's order, gate rows first.
With moe_mlp_glu_interleave_size=s Megatron's TEGroupedMLP has s gate rows, s up rows, and so on. It saves its rows as
they lie in memory, so that the shards "gate" and "up" are the first and the second half of those. So do we.

Legend: e local experts, E experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I).
Source: sharded_state_dict of SequentialMLP and TEGroupedMLP in megatron-core 0.19.2,
megatron/core/transformer/moe/experts.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn

Layout = Literal["sequential", "te_grouped"]
Offsets = tuple[tuple[int, int, int], ...]

LINEAR = {
    "weight1": "linear_fc1.weight",
    "weight2": "linear_fc2.weight",
    "bias1": "linear_fc1.bias",
    "bias2": "linear_fc2.bias",
}


def by_expert(parameter: Tensor | None, count: int) -> Any:
    """Returns a parameter (or a stored copy) with dim 0 for the `count` local experts: views flat biases as 2D."""
    return parameter if parameter is None or parameter.dim() > 1 else parameter.view(count, -1)


def to_pairs(rows: Tensor, block: int | None = None) -> Tensor:
    """Returns gate and up rows in turn along dim 1, of rows in Megatron's order.

    block: moe_mlp_glu_interleave_size: [g0, g1, u0, u1, g2, g3, u2, u3] for 2; None: all gate rows first.
    """
    return rows.unflatten(1, (-1, 2, block or rows.shape[1] // 2)).transpose(2, 3).flatten(1, 3)


def from_pairs(rows: Tensor, block: int | None = None) -> Tensor:
    """Returns rows in Megatron's order: the reverse of `to_pairs`."""
    return rows.unflatten(1, (-1, block or rows.shape[1] // 2, 2)).transpose(2, 3).flatten(1, 3)


class HeldExperts(NamedTuple):
    """Which experts a module holds: share `ep_rank` of `ep_size` equal ones, and of their width part `part` of `parts`.

    copy: the index of this replica of them. gated: whether the activation is. block: see `to_pairs`.
    """

    ep_rank: int
    ep_size: int
    copy: int
    gated: bool
    part: int = 0
    parts: int = 1
    block: int | None = None

    def cut(self, axis: int, run: int = 0, runs: int = 1) -> Offsets:
        """Returns the offset of this part along `axis`, which has `runs` equal runs of rows; () for all of it."""
        return ((axis, run * self.parts + self.part, runs * self.parts),) if self.parts * runs > 1 else ()


def sharded_experts(
    parameters: Mapping[str, Tensor],
    held: HeldExperts,
    *,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns Megatron's sharded state dict of `parameters`, whose names are the keys of LINEAR.

    The values are ShardedTensorFactory objects, so that optimizer moments are sharded like their parameters.
    sharded_offsets: leading axes, as a block of layers passes them.
    """
    singleton = bool((metadata or {}).get("singleton_local_shards", False))
    num_local = len(parameters["weight1"])
    sharded: dict[str, Any] = {}
    for name, parameter in parameters.items():
        gated, cut_axis = held.gated and name in ("weight1", "bias1"), 2 if name == "weight2" else 1
        sharding = _Sharding(held, num_local, gated, parameter.dim() == 1, cut_axis, sharded_offsets, prefix, singleton)
        key, replica = f"{prefix}experts.{LINEAR[name]}", (0, 0, held.copy)
        sharded[prefix + name] = ShardedTensorFactory(key, parameter, sharding.build, sharding.merge, replica)
    for expert in range(held.ep_rank * num_local, (held.ep_rank + 1) * num_local):
        for linear in ("linear_fc1", "linear_fc2"):
            one = f"{expert}." if singleton else ""
            axis = () if singleton else ((len(sharded_offsets), expert, num_local * held.ep_size),)
            sharded[f"{prefix}expert{expert}.{linear}._extra_state"] = make_sharded_object_for_checkpoint(
                None,
                f"{prefix}experts.{one}{linear}._extra_state",
                (*sharded_offsets, *axis),
                (0, held.part, held.copy),
            )
    return sharded


class _Sharding(NamedTuple):
    """How one parameter is sharded. cut_axis: of one expert's width. singletons: whether each expert has a tensor."""

    held: HeldExperts
    num_local: int
    gated: bool
    is_flat: bool
    cut_axis: int
    offsets: Offsets
    prefix: str
    singletons: bool

    @torch.no_grad()
    def build(self, key: str, stored: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> Any:
        """Returns this rank's shard of one tensor of all experts; for a gated fc1 two shards, [gate, up].

        With `singletons` there is a list of each local expert's for a shard.
        """
        if flattened_range is not None:
            raise ValueError(
                "the optimizer state comes in flat pieces (distrib_optim_sharding_type='fully_sharded_model_space'), "
                "which cannot be cut by expert; set metadata['distrib_optim_sharding_type'] = 'fully_reshardable'"
            )
        held, offsets, axes = self.held, self.offsets, len(self.offsets)
        stacked = by_expert(stored, self.num_local)
        parts = from_pairs(stacked, held.block).chunk(2, 1) if self.gated else (stacked,)
        shard = partial(ShardedTensor.from_rank_offsets, replica_id=replica_id, prepend_axis_num=axes)
        shards = []
        for number, part in enumerate(parts):
            if not self.singletons:
                cut = held.cut(axes + self.cut_axis, number, len(parts))
                shards.append(shard(key, part.contiguous(), *offsets, (axes, held.ep_rank, held.ep_size), *cut))
                continue
            where = *offsets, *held.cut(axes + self.cut_axis - 1)
            start, end = f"{self.prefix}experts.", ("_w", "_v")[number] if self.gated else ""
            shards.append(
                [
                    shard(key.replace(start, f"{start}{expert}.") + end, rows.contiguous(), *where)
                    for expert, rows in enumerate(part, held.ep_rank * self.num_local)
                ]
            )
        return shards if self.gated else shards[0]

    @torch.no_grad()
    def merge(self, loaded: Any) -> Tensor:
        """The inverse of `build`."""
        if self.singletons:
            loaded = [torch.stack(half) for half in loaded] if self.gated else torch.stack(loaded)
        stacked = to_pairs(torch.cat(loaded, 1), self.held.block) if self.gated else loaded
        return stacked.flatten() if self.is_flat else stacked


def load_any_layout(experts: nn.Module, gated: bool, block: int | None) -> None:
    """Makes `experts.load_state_dict` accept plain state dicts of SequentialMLP and TEGroupedMLP too.

    `_extra_state` entries are dropped.
    """
    experts.register_load_state_dict_pre_hook(partial(_translate, gated=gated, block=block))


def _translate(experts: Any, state_dict: dict[str, Any], prefix: str, *_: Any, gated: bool, block: int | None) -> None:
    """Replaces Megatron's entries under `prefix` by ours. Entries that do not fit stay, and torch reports them.

    block: of TEGroupedMLP; SequentialMLP always has gate rows first.
    """
    layouts: tuple[tuple[Layout, int | None], ...] = ("sequential", None), ("te_grouped", block)
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
        del state_dict[key]
    for name, linear in LINEAR.items():
        ours = getattr(experts, name)
        if ours is None:
            continue
        pairs = gated and linear.startswith("linear_fc1")
        for layout, rows in layouts:
            keys = _keys(prefix, linear, layout, experts.num_local_experts)
            if _can_stack([state_dict.get(key) for key in keys], 2 * (rows or 1) if pairs else 1):
                stacked = torch.stack([state_dict.pop(key) for key in keys])
                stacked = to_pairs(stacked, rows) if pairs else stacked
                state_dict[prefix + name] = stacked.flatten() if ours.dim() == 1 else stacked


def _keys(prefix: str, linear: str, layout: Layout, count: int) -> list[str]:
    """Returns the keys of the local experts' parts of one of our parameters. linear: its value in LINEAR."""
    if layout == "sequential":
        return [f"{prefix}local_experts.{local}.{linear}" for local in range(count)]
    return [f"{prefix}{linear}{local}" for local in range(count)]


def _can_stack(values: list[Any], multiple: int) -> bool:
    """Returns True if these are tensors of one shape with a multiple of so many rows."""
    return all(
        isinstance(value, Tensor) and value.dim() and value.shape == values[0].shape and value.shape[0] % multiple == 0
        for value in values
    )


def to_layout(
    state_dict: Mapping[str, Any], layout: Layout, *, gated: bool = True, interleave_size: int | None = None
) -> dict[str, Any]:
    """Converts a plain state dict of a model with our experts to names and shapes of Megatron's experts. Returns it.

    For each MoE layer, under its `experts.`, for local experts i < e:
        "sequential"  local_experts.{i}.linear_fc1.weight (J, H), local_experts.{i}.linear_fc2.weight (H, I)
        "te_grouped"  linear_fc1.weight{i} (J, H), linear_fc2.weight{i} (H, I)
    Biases likewise, and an `_extra_state` of None where those modules have one. Other entries are unchanged. gated: the
    model's gated_linear_unit. interleave_size: its moe_mlp_glu_interleave_size, which "sequential" does not have.
    Raises ValueError for another layout.
    """
    if layout not in ("sequential", "te_grouped"):
        raise ValueError(f"layout={layout!r} is neither 'sequential' nor 'te_grouped'")
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        prefix, _, name = key.rpartition(".")
        if name not in LINEAR or prefix.rpartition(".")[2] not in ("experts", ""):
            result[key] = value
            continue
        linear, prefix = LINEAR[name], f"{prefix}." if prefix else ""
        stacked = by_expert(value, len(state_dict[f"{prefix}weight1"]))
        if gated and linear.startswith("linear_fc1"):
            stacked = from_pairs(stacked, interleave_size if layout == "te_grouped" else None)
        keys = _keys(prefix, linear, layout, len(stacked))
        result.update(zip(keys, stacked, strict=True))
        result.update({f"{key.rpartition('.')[0]}._extra_state": None for key in keys})
    return result
