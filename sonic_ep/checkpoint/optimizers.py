"""torch's optimizers hand out and take the state of experts as DTensors of all experts.

torch has hooks for the state dict of one optimizer, and none for all optimizers. Users make theirs, and
torch.distributed.checkpoint calls its `state_dict` and `load_state_dict`. So once a process has a layer with ep_size
above 1, these two methods of torch.optim.Optimizer are ours. For an optimizer without such experts they are torch's.
"""

import functools
from importlib import import_module
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

if TYPE_CHECKING:
    from sonic_ep.experts import Experts

# Not their parameters: torch does not swap a tensor that has a weak reference.
_EXPERTS: "WeakSet[Experts]" = WeakSet()
_torch_state_dict, _torch_load_state_dict = Optimizer.state_dict, Optimizer.load_state_dict


def register(experts: "Experts") -> None:
    """Makes optimizers know the parameters of experts, if these are divided over ranks."""
    if experts.group.size > 1:
        _EXPERTS.add(experts)
        Optimizer.state_dict, Optimizer.load_state_dict = _state_dict, _load_state_dict


@functools.wraps(_torch_state_dict)
def _state_dict(self: Optimizer) -> StateDict:
    return _converted(self, _torch_state_dict(self), "moments_of_all")


@functools.wraps(_torch_load_state_dict)
def _load_state_dict(self: Optimizer, state_dict: StateDict) -> None:
    _torch_load_state_dict(self, _converted(self, state_dict, "moments_of_rank"))


def _converted(optimizer: Optimizer, state_dict: StateDict, conversion: str) -> StateDict:
    """Returns the state dict with the state of experts as a function of expert_states.py returns it."""
    experts = _experts_by_key(optimizer, state_dict)
    if not experts:
        return state_dict
    convert = getattr(import_module("sonic_ep.checkpoint.expert_states"), conversion)
    of_all = state_dict["state"].items()
    # New dicts: those inside are the optimizer's own.
    return {**state_dict, "state": {key: convert(*experts[key], of) if key in experts else of for key, of in of_all}}


def _experts_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[object, tuple["Experts", Tensor]]:
    """Returns the experts and the parameter of each key of state_dict["state"] that is of experts."""
    known = {id(each): of for of in _EXPERTS for each in (*of.parameters(), *of.sharded_parameters)}
    found = {}
    for held, group in zip(optimizer.param_groups, state_dict.get("param_groups", ()), strict=False):
        for parameter, key in zip(held["params"], group.get("params", ()), strict=False):
            if id(parameter) in known:
                found[key] = known[id(parameter)], parameter
    return found
