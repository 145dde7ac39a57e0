"""What torchtitan 0.3.0 wants of torch that 2.11 does not have. Import it before torchtitan."""

from contextlib import AbstractContextManager, nullcontext
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
    """In place of `apply_fsdp_to_decoder`, which shards a block's experts over a mesh of their own.

    Here that must have one rank: FSDP leaves them as they are, in fp32, and they compute in autocast.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if edp_mesh is not None and edp_mesh.size() > 1:
        raise ValueError(f"{edp_mesh.size()} ranks hold the same experts; with this torch all ranks divide them")
    blocks = [*model.layers.values()]
    of_experts = {parameter for block in blocks for parameter in block.moe.routed_experts.parameters()}
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set() if edp_mesh is None else of_experts)


def autocast_of_whole_experts(device_type: str) -> AbstractContextManager[object]:
    """Returns the context in which experts compute that FSDP has left in fp32."""
    return torch.autocast(device_type, dtype=torch.bfloat16) if is_older else nullcontext()


def compile_blocks(model: Any, **_: object) -> None:
    """In place of `apply_compile`, which wants each block as one graph."""
    for block in model.layers.values():
        block.compile()
