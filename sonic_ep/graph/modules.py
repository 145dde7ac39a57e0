"""Modules in operations of compiled graphs (operation.py), which take only tensors and constants.

A graph passes a module's *key*, a CPU tensor of one number. As a constant, the number would make each layer compile
anew.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_MODULES = WeakValueDictionary[int, nn.Module]()
_NUMBERS = count(1)


def new_key(module: nn.Module) -> Tensor:
    """Returns a key, by which `module_of` finds this module while it lives. A copy needs one of its own."""
    number = next(_NUMBERS)
    _MODULES[number] = module
    return torch.tensor([number], device="cpu")


def module_of(key: Tensor) -> nn.Module:
    """Returns the module of a key."""
    return _MODULES[int(key)]


@contextmanager
def with_parameters(module: nn.Module, given: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the module has these parameters, in the order of `module.parameters()`. They get what others
    have noted on its own."""
    holders = [cast(dict[str, Tensor | None], each._parameters) for each in module.modules()]
    own = [(holder, name, p) for holder in holders for name, p in holder.items() if p is not None]
    try:
        for (holder, name, parameter), tensor in zip(own, given, strict=True):
            vars(tensor).update(vars(parameter))
            holder[name] = tensor
        yield
    finally:
        for holder, name, parameter in own:
            holder[name] = parameter
