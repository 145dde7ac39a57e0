"""Weights and optimizer state of experts: as DTensors of all experts, and as what a rank has of them.

torch.distributed.checkpoint takes a plain tensor for equal on all ranks, and writes the tensor of one rank. Experts
differ, so state dicts hold DTensors, on the memory of the plain tensors. With 8 experts and ep_size 2, w1 (4, J, d) is
handed out as a DTensor (8, J, d) that is sharded along dim 0 over the EP group. If FSDP shards the experts further
(sonic_ep/fsdp.py), its DTensor (4, J, d) over the ranks with the same experts becomes one over both kinds of ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

if TYPE_CHECKING:
    from sonic_ep.experts import Experts


def of_all(experts: "Experts", name: str, value: Tensor) -> Tensor:
    """Returns a weight or buffer of this rank's experts as a DTensor of all experts, on the same memory.

    Raises ValueError if it has no row for each of them, or torch's FSDP shards it as if it were equal on all ranks.
    """
    problem = experts.problem_with_sharding() if isinstance(value, DTensor) and not experts.sharded_over else None
    if problem is not None:
        raise ValueError(problem)
    if value.dim() == 0 or value.shape[0] != experts.num_local:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, wanted a row for each of the {experts.num_local} local experts: "
            "it differs from rank to rank"
        )
    mesh = _mesh(experts, value)
    if not isinstance(value, DTensor):
        return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
    shape = torch.Size((experts.group.size * value.shape[0], *value.shape[1:]))
    # Shapes are given, because ranks may have different numbers of rows.
    placements = [Shard(0), *value.placements]
    return DTensor.from_local(value.to_local(), mesh, placements, run_check=False, shape=shape, stride=value.stride())


def is_part(experts: "Experts", value: Tensor, own: Tensor) -> bool:
    """Returns True if memory holds the rows of one rank's experts alone. own: the tensor to load into."""
    if isinstance(value, DTensor):
        return experts.group.size > 1 and value.device_mesh == _mesh(experts, own)
    return value.dim() > 0 and value.shape[0] != experts.E


def of_rank(experts: "Experts", name: str, value: Tensor, own: Tensor) -> Tensor:
    """Returns what this rank has of a weight, buffer or moment, laid out as `own`, the tensor to load into.

    value: as from `of_all`; a tensor of all experts, plain or as torch distributes one over FSDP's ranks; or of this
    rank's experts, as it is returned then. Raises ValueError for a DTensor of other ranks.
    """
    if value.dim() == 0:
        return value
    over = own.device_mesh if isinstance(own, DTensor) else None
    if isinstance(value, DTensor):
        if value.device_mesh == _mesh(experts, own):
            rows = value.to_local()
            if over is None:
                return rows
            shape = torch.Size((experts.num_local, *value.shape[1:]))
            return DTensor.from_local(
                rows, over, value.placements[1:], run_check=False, shape=shape, stride=value.stride()
            )
        if value.device_mesh != over:
            raise ValueError(
                f"{name} is a DTensor over ranks {value.device_mesh.mesh.tolist()}, wanted "
                f"{_mesh(experts, own).mesh.tolist()}: get it with StateDictOptions(full_state_dict=True), or load a "
                "checkpoint"
            )
        if value is own:
            # It has the rows of all experts, over FSDP's ranks.
            raise ValueError(
                f"{name} is the parameter itself, which broadcast_from_rank0 fills without regard to the EP group "
                "where FSDP shards experts: use torch.distributed.checkpoint.load, or full_state_dict=True alone, with "
                "all weights on every rank"
            )
        if value.shape[0] != experts.E:
            return value
        value = value.full_tensor()
    if value.shape[0] == experts.E:
        value = value[experts.first : experts.first + experts.num_local]
    if not isinstance(own, DTensor) or over is None or value.dim() != own.dim():
        return value
    return distribute_tensor(value, over, own.placements, src_data_rank=None)


def moments_of_all(experts: "Experts", parameter: Tensor, state: object) -> object:
    """Returns the state of one parameter, which may be nested, with `of_all` of its tensors. Scalars remain.

    Raises ValueError for a tensor that has not one row per local expert: it is of no expert, and of this rank alone.
    """

    def converted(name: str, value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value
        if value.shape[0] != experts.num_local or isinstance(value, DTensor) != isinstance(parameter, DTensor):
            raise ValueError(
                f"the optimizer's {name} of {_shown(experts, parameter)} has shape {tuple(value.shape)}: neither a "
                f"scalar nor {experts.num_local} rows, one an expert, it differs from rank to rank; give these "
                "parameters another optimizer"
            )
        return of_all(experts, name, value)

    return _with_tensors(state, converted)


def moments_of_rank(experts: "Experts", parameter: Tensor, state: object) -> object:
    """Returns the state of one parameter with `of_rank` of its tensors. Raises ValueError like it."""
    return _with_tensors(
        state, lambda name, value: of_rank(experts, f"the optimizer's {name} of experts", value, parameter)
    )


def _with_tensors(state: object, converted: Callable[[str, Tensor], Tensor], name: str = "") -> object:
    """Returns nested dicts, lists and tuples with other tensors. converted: takes also where the tensor is in them."""
    if isinstance(state, dict):
        return {key: _with_tensors(each, converted, f"{name}.{key}") for key, each in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_with_tensors(each, converted, f"{name}.{i}") for i, each in enumerate(state))
    return converted(name.removeprefix("."), state) if isinstance(state, Tensor) else state


def _shown(experts: "Experts", parameter: Tensor) -> str:
    names = [name for name, each in experts.named_parameters() if each is parameter]
    return f"experts.{names[0] if names else '?'} {tuple(parameter.shape)}"


def _mesh(experts: "Experts", own: Tensor) -> DeviceMesh:
    """Returns the ranks over which all experts are divided, in front of those over which FSDP shards `own`."""
    group = experts.group.process_group
    assert group is not None
    device = own.device if not own.is_meta else torch.accelerator.current_accelerator() or torch.device("cpu")
    if not isinstance(own, DTensor):
        return DeviceMesh.from_group(group, device.type)
    ranks = [list(ranks) for ranks in zip(*experts.sharded_over, strict=True)]
    groups: list[dist.ProcessGroup] = [group, own.device_mesh.get_group()]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("ep", "expert_data"))
