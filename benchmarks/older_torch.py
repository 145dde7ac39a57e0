"""What torchtitan 0.3.0 wants of torch that 2.11 does not have. Import it before torchtitan."""

from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

is_older = not hasattr(fsdp, "DataParallelMeshDims")
if is_older:
    fsdp.__dict__["DataParallelMeshDims"] = object
    torch.compiler.__dict__["_is_non_strict_tracing"] = lambda: False


def sharded(
    model: Any, mesh: DeviceMesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype, edp_mesh: Any, **_: object
) -> None:
    """In place of `apply_fsdp_to_decoder`: experts are FSDP modules inside of blocks, over a mesh of their own."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.layers.values():
        if edp_mesh is not None:
            fully_shard(block.moe.routed_experts, mesh=edp_mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
