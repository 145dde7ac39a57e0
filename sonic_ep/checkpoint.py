"""Checkpoints that any ep_size can read: torch.distributed.checkpoint over DTensor views of the expert weights.

The parameters of a module are plain local tensors. Only here the weights of local experts, and optimizer state with a
row for each of them, become DTensors, sharded along dim 0 over the EP group. So the checkpoint holds each expert once,
under its global index. Names are those of the model without wrappers (DistributedDataParallel, torch.compile).
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from sonic_ep.layer import MoE

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes model, optimizer and `extra` to `folder`. A collective of the default process group, if there is one.

    extra: tensors and picklable values, equal on all ranks. Dense weights may be DTensors, as with FSDP2.

    Raises ValueError for expert weights that are DTensors, because the EP group shards them already; and for optimizer
    state of experts that is neither a scalar nor has one row per local expert.
    """
    with _quiet():
        dcp.save(_state(model, optimizer, extra)[0], checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint of `save`, of any ep_size, into model and optimizer. Returns `extra` with the values read.

    extra: the keys to read; a tensor gives the shape and dtype to read. A collective like `save`. Raises
    torch.distributed.checkpoint.api.CheckpointException for keys that the checkpoint lacks and shapes that differ, and
    ValueError as `save` does.
    """
    state, shown = _state(model, optimizer, extra)
    with _quiet():
        dcp.load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    set_model_state_dict(model, _local(state["model"], shown))
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, _local(state["optimizer"], shown), options=_FLAT)
    return state["extra"]


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """A context without torch's warning, at every call, that torch.distributed is not initialised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Returns the state to write or to read into, and the names of the tensors that became DTensors in it."""
    values = get_model_state_dict(model)
    meshes = _meshes(model, values)
    state, shown = {"model": {name: _shown(name, value, meshes) for name, value in values.items()}}, set(meshes)
    if optimizer is not None:
        # This initialises the state of a new optimizer, so that there are tensors to load into.
        flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        state["optimizer"] = {name: _shown_moment(name, value, meshes) for name, value in flat.items()}
        shown |= {name for name, value in flat.items() if state["optimizer"][name] is not value}
    return {**state, "extra": dict(extra or {})}, shown


def _meshes(model: nn.Module, values: dict[str, Any]) -> dict[str, tuple[torch.Size, DeviceMesh]]:
    """Returns local shape and mesh of every expert parameter and buffer, by its name in the model's state `values`."""
    meshes: dict[int, DeviceMesh] = {}
    sharded = {}
    names: dict[tuple[int, torch.Size], list[str]] = {}  # lists, because layers may share weights
    for name, value in values.items():
        if isinstance(value, Tensor):
            names.setdefault((value.data_ptr(), value.shape), []).append(name)
    for layer in model.modules():
        if not isinstance(layer, MoE) or layer.group.size == 1:
            continue
        process_group = layer.group.process_group
        assert process_group is not None
        if id(process_group) not in meshes:
            meshes[id(process_group)] = DeviceMesh.from_group(process_group, layer.experts.w1.device.type)
        problem = layer.experts.problem_with_sharding()
        if problem is not None:
            raise ValueError(problem)
        for value in (*layer.experts.parameters(), *layer.experts.buffers()):
            for name in names.get((value.data_ptr(), value.shape), ()):
                if value.dim() == 0 or value.shape[0] != layer.experts.num_local:
                    raise ValueError(
                        f"{name} has shape {tuple(value.shape)}, wanted a row for each of the "
                        f"{layer.experts.num_local} local experts: it differs from rank to rank"
                    )
                sharded[name] = (value.shape, meshes[id(process_group)])
    return sharded


def _shown(name: str, value: Any, meshes: dict[str, tuple[torch.Size, DeviceMesh]]) -> Any:
    if name not in meshes or not isinstance(value, Tensor):
        return value
    return DTensor.from_local(value, meshes[name][1], [Shard(0)], run_check=False)


def _shown_moment(name: str, value: Any, meshes: dict[str, tuple[torch.Size, DeviceMesh]]) -> Any:
    """Returns an entry of the optimizer state, named "state.<parameter>.<moment>", as a DTensor if it is of experts.

    Raises ValueError if it is of experts, no scalar, and has not one row per local expert.
    """
    parameter = name.removeprefix("state.").rpartition(".")[0]
    if not isinstance(value, Tensor) or parameter not in meshes or value.dim() == 0:
        return value
    shape = meshes[parameter][0]
    if value.shape[0] != shape[0]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, {parameter} {tuple(shape)}: neither a scalar nor "
            f"{shape[0]} rows, one an expert, it differs from rank to rank; give these parameters another optimizer"
        )
    return _shown(parameter, value, meshes)


def _local(state: dict[str, Any], shown: set[str]) -> dict[str, Any]:
    return {name: value.to_local() if name in shown else value for name, value in state.items()}
