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
def with_tensors(module: nn.Module, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
    """A context in which the module has these, in the order of its `parameters()` and `buffers()`. Those that are not
    its own get what others have noted on its own, and other threads see them."""
    given_of = dict(zip((*module.parameters(), *module.buffers()), (*parameters, *buffers), strict=True))
    others = {own: given for own, given in given_of.items() if given is not own}
    holders = [holder for each in module.modules() for holder in (each._parameters, each._buffers)] if others else []
    holders = cast(list[dict[str, Tensor]], holders)
    replaced = [(holder, name, own) for holder in holders for name, own in holder.items() if own in others]
    try:
        for holder, name, own in replaced:
            vars(others[own]).update(vars(own))
            holder[name] = others[own]
        yield
    finally:
        for holder, name, own in replaced:
            holder[name] = own
