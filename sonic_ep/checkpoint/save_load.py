"""Checkpoints that any ep_size can read: torch.distributed.checkpoint over DTensor views of the expert weights.

State dicts of model and optimizer hold expert weights and their optimizer state as DTensors (expert_states.py). So the
checkpoint holds each expert once, under its global index. Names are the model's, without wrappers
(DistributedDataParallel, torch.compile).

Reading a checkpoint executes nothing of it (files.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout

from sonic_ep.checkpoint.files import (
    problem_with_links,
    problem_with_names,
    problem_with_value,
    read_metadata,
    verified_names,
    write_checksums,
)
from sonic_ep.checkpoint.sharded import StepError, read_sharded, write_sharded
from sonic_ep.config import MAX_TIMEOUT, MIN_TIMEOUT
from sonic_ep.groups import EPGroup

_TIMEOUT = default_pg_timeout.total_seconds()  # of torch's own checkpoints: a rank may write for long
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_MODELS_DIFFER = "give the same model and optimizer on every rank"
_PARTLY = "Model and optimizer hold in part what was read before: load a checkpoint that is whole, or build them again"
_SHOWN = 4  # names in a message


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    timeout: float = _TIMEOUT,
) -> None:
    """Writes model, optimizer and `extra` to `folder`. A collective of the default process group, if there is one.

    folder: the same on every rank. A checkpoint that it holds is overwritten; if that is cut short, `load` refuses what
    is left, so save to a new folder and rename it. extra: tensors, numbers, strings, and lists, tuples and dicts of
    them. Values of one name are equal on all ranks. Dense weights may be DTensors, as with FSDP2.
    timeout: seconds to wait for a rank. Ranks that have written wait for those that write longer.

    Raises ValueError, on every rank, for expert weights that torch's FSDP shards, because the EP group shards them
    already; for optimizer state of experts that is neither a scalar nor has one row per local expert; for an optimizer
    of other parameters; for other values in `extra`; for a symbolic link among the files of the folder; and for a
    folder or model that differs between ranks. TypeError, on every rank, for an argument of another type. OSError, on
    every rank, if a file cannot be written. LostRankError, on every other rank, if one does not come.
    """
    group = _group(timeout)
    problem = _problem_with_types(folder, model, optimizer, extra, timeout)
    group.raise_together(problem, error=TypeError, stage="checkpoint", call="checkpoint.save")
    problems = (problem_with_value(name, value) for name, value in (extra or {}).items())
    problem = next((problem for problem in problems if problem is not None), None) or problem_with_links(Path(folder))
    state = _state_or_error(group, model, optimizer, extra, problem, folder=str(folder))
    try:
        write_sharded(Path(folder), state, group)
    except StepError as error:
        # Who plans what each rank writes raises ValueError, where the ranks' weights do not fit together.
        planned = not any(isinstance(reason, ValueError) for reason in error.failures.values())
        kind, fix = (OSError, "free some space or give another folder") if planned else (ValueError, _MODELS_DIFFER)
        raise kind(f"{folder} could not be written, and holds no checkpoint now ({error}); {fix}") from None
    write_checksums(Path(folder), group)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    timeout: float = _TIMEOUT,
) -> STATE_DICT_TYPE:
    """Reads a checkpoint of `save`, of any ep_size, into model and optimizer. Returns `extra` with the values read.

    extra: the keys to read; a tensor gives the shape and dtype to read. timeout: see `save`. A collective like it.

    Raises ValueError, on every rank, if there is no checkpoint; if a file is damaged or refers to code; if the
    checkpoint lacks weights, optimizer state or extra values, has weights or optimizer state that model and optimizer
    lack, or has them in another shape; and as `save` does. All of this is found before anything is loaded, except for
    files that cannot be read and values that refer to code. Then the error says that model and optimizer are a mixture.
    """
    group = _group(timeout)
    problem = _problem_with_types(folder, model, optimizer, extra, timeout)
    group.raise_together(problem, error=TypeError, stage="checkpoint", call="checkpoint.load")
    path = Path(folder)
    state = _state_or_error(group, model, optimizer, extra)
    try:
        verified, metadata = verified_names(path, group), read_metadata(path)
        problem = problem_with_names(path, metadata, verified) or _problem_with_state(path, metadata, state)
    except (OSError, ValueError) as error:
        problem = str(error)
    group.raise_together(problem, stage="checkpoint")
    try:
        read_sharded(path, state, group)
    except StepError as error:
        raise ValueError(f"{path} could not be read ({error}); use another checkpoint. {_PARTLY}") from None
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_FLAT)
    return state["extra"]


def _group(timeout: float) -> EPGroup:
    group = EPGroup() if dist.is_initialized() else EPGroup.alone()
    group.timeout = timeout if _is_time(timeout) else _TIMEOUT
    group.enter_layer(0)
    return group


def _is_time(timeout: object) -> bool:
    return isinstance(timeout, int | float) and MIN_TIMEOUT <= timeout <= MAX_TIMEOUT


def _problem_with_types(folder: object, model: object, optimizer: object, extra: object, timeout: object) -> str | None:
    wanted = {
        "folder": (folder, str | os.PathLike, "a str or a Path"),
        "model": (model, nn.Module, "a torch.nn.Module"),
        "optimizer": (optimizer, torch.optim.Optimizer | None, "a torch.optim.Optimizer or None"),
        "extra": (extra, dict | None, "a dict or None"),
    }
    for name, (value, kind, text) in wanted.items():
        if not isinstance(value, kind):
            return f"{name} is a {type(value).__name__}, wanted {text}"
    return None if _is_time(timeout) else f"timeout={timeout!r}, wanted {MIN_TIMEOUT:g} to {MAX_TIMEOUT:g} seconds"


def _state_or_error(
    group: EPGroup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, object] | None,
    problem: str | None = None,
    **same: object,
) -> dict[str, STATE_DICT_TYPE]:
    """Returns `_state`. A collective.

    Raises ValueError, on every rank, if a rank has a problem, or its state has, or if `same` differs between ranks.
    """
    state: dict[str, STATE_DICT_TYPE] = {}
    try:
        if problem is None:
            state = _state(model, optimizer, extra)
    except ValueError as error:
        problem = str(error)
    group.raise_together(problem, error=ValueError, stage="checkpoint", **same)
    return state


def _problem_with_state(folder: Path, metadata: Metadata, state: dict[str, STATE_DICT_TYPE]) -> str | None:
    """Returns which of the weights and other values the checkpoint lacks, or which it has in addition, or None."""
    held = metadata.state_dict_metadata
    for part, values in state.items():
        prefix = f"{part}."
        there = {name.removeprefix(prefix) for name in held if name.startswith(prefix)}
        flat, _ = flatten_state_dict({part: values})
        here = {name.removeprefix(prefix): value for name, value in flat.items()}
        fix = f"it was written for another {part}: build the {part} as it was then"
        if part == "extra":
            fix = f"it has {_listed(there) or 'no extra values'}"
        elif names := {name for name in there - here.keys() if not name.startswith("param_groups.")}:
            return f"{folder} also holds {_listed(names)} of the {part}; {fix}"
        if names := here.keys() - there:
            return f"{folder} lacks {_listed(names)} of the {part}; {fix}"
        for name, value in here.items():
            shape = getattr(held[prefix + name], "size", None)
            if isinstance(value, Tensor) and shape is not None and shape != value.shape:
                return f"{folder} has {name} of shape {tuple(shape)}, the {part} {tuple(value.shape)}; {fix}"
    return None


def _listed(names: set[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, object] | None
) -> dict[str, STATE_DICT_TYPE]:
    """Returns the state to write or to read into, by part. Raises ValueError, see `save`."""
    state: dict[str, STATE_DICT_TYPE] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        of_model = {id(parameter) for parameter in model.parameters()}
        others = sum(id(p) not in of_model for of_group in optimizer.param_groups for p in of_group["params"])
        if others:
            raise ValueError(
                f"the optimizer has {others} parameters that the model has not; give the model's optimizer"
            )
        # This initialises the state of a new optimizer, so that there are tensors to load into.
        state["optimizer"] = {**get_optimizer_state_dict(model, optimizer, options=_FLAT)}
    return {**state, "extra": dict(extra or {})}
