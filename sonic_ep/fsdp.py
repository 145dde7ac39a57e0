"""`fully_shard`: torch's FSDP2 for modules with MoE layers. Their experts are on other ranks than their dense weights.

Every rank has all dense weights, so FSDP shards them over all ranks. The ranks of an EP group have different experts,
so FSDP shards those over the ranks that hold the same ones. With 4 ranks and ep_size 2:

                              EP group 0     EP group 1
    experts 0 .. E/2 - 1      rank 0         rank 2         <- expert_mesh of both
    experts E/2 .. E - 1      rank 1         rank 3         <- expert_mesh of both
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from sonic_ep.experts import mark_experts
from sonic_ep.groups import EPGroup
from sonic_ep.layer import MoE


class FSDPOptions(TypedDict, total=False):
    """Further options of torch's fully_shard."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
    offload_policy: OffloadPolicy


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **options: Unpack[FSDPOptions],
) -> FSDPModule:
    """Shards a module that contains MoE layers, except for submodules that are sharded already, by torch's fully_shard.

    mesh: all ranks, in one or two dimensions; dense weights are sharded over it. expert_mesh: the ranks that hold the
    same experts, in one dimension; it may have one rank. options: of torch's fully_shard. With losses that are
    means over a rank's own tokens, gradients are of the mean over the tokens of all ranks. After
    set_gradient_divide_factor(f) on every sharded module they are sums over all ranks, divided by f. A collective.

    Raises ValueError, on every rank, if the ranks of expert_mesh hold different experts, or if the module contains no
    MoE layer with several ranks that is not sharded yet.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE) and layer.group.size > 1]
    layers = [layer for layer in layers if layer is not module and not layer.experts.sharded_over]
    found = [_ranks_by_expert(layer, expert_mesh) for layer in layers]
    problem = next((each for _, each in found if each is not None), None)
    if not layers:
        problem = (
            f"{type(module).__name__} contains no MoE layer with ep_size > 1 that is not sharded yet: give it the "
            "block around a layer, and torch's fully_shard all others"
        )
    EPGroup().raise_together(problem)
    policy, ignored = mp_policy or MixedPrecisionPolicy(), set(ignored_params or ())
    experts = {parameter for layer in layers for parameter in layer.experts.parameters()}
    # The block first: it would not manage the router of a layer that is sharded already.
    sharded = torch_fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored | experts, **options)
    for layer, (ranks, _) in zip(layers, found, strict=True):
        layer.experts.sharded_over = ranks
        own = set(layer.experts.parameters())
        shard_experts(
            layer, own, mesh=mesh, expert_mesh=expert_mesh, mp_policy=policy, ignored_params=ignored, **options
        )
        mark_experts(layer.experts)
    return sharded


def shard_experts(
    layer: nn.Module,
    experts: set[nn.Parameter],
    *,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **options: Unpack[FSDPOptions],
) -> None:
    """Shards `experts`, and no other parameter of `layer`, over expert_mesh. The rest is as in `fully_shard`.

    An expert's gradient is a sum over its EP group, so it is divided by the number of all ranks. Over an expert_mesh of
    one rank, which sends nothing, a reduce_dtype other than bf16 becomes fp32.
    """
    policy, alone = mp_policy or MixedPrecisionPolicy(), expert_mesh.size() == 1
    reduce_dtype = policy.reduce_dtype or policy.param_dtype or next(iter(experts)).dtype
    # On a mesh of one rank torch 2.11 to 2.13 divides twice: in other dtypes than these, and where sums are forced.
    if alone and reduce_dtype not in (torch.float32, torch.bfloat16):
        policy = replace(policy, reduce_dtype=torch.float32)
    ignored = (ignored_params or set()) | (set(layer.parameters()) - experts)
    sharded = torch_fully_shard(layer, mesh=expert_mesh, mp_policy=policy, ignored_params=ignored, **options)
    sharded.set_gradient_divide_factor(mesh.size())
    # Otherwise torch has the backend multiply while it sums, which gloo cannot.
    sharded.set_force_sum_reduction_for_comms(not alone)


def _ranks_by_expert(layer: MoE, expert_mesh: DeviceMesh) -> tuple[list[list[int]], str | None]:
    """Returns the global ranks of the EP group of each rank of expert_mesh; and a problem with the mesh, or None."""
    if expert_mesh.ndim != 1:
        return [], f"expert_mesh has {expert_mesh.ndim} dimensions, wanted one: mesh['name'] is one of them"
    same_experts = EPGroup(expert_mesh.get_group())
    own = layer.experts.first, dist.get_process_group_ranks(layer.group.process_group)
    everywhere = same_experts.all_gather_object(own)
    if len({first for first, _ in everywhere}) > 1:
        ranks = dist.get_process_group_ranks(same_experts.process_group)
        shown = ", ".join(f"from {first} on rank {rank}" for rank, (first, _) in zip(ranks, everywhere, strict=True))
        return [], f"the ranks of expert_mesh hold different experts: {shown}; wanted ranks of several EP groups"
    return [ranks for _, ranks in everywhere], None
