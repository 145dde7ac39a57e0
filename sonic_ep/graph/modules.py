"""Modules in operations of compiled graphs (operation.py), which take only tensors and constants.

A graph passes a module's *key*, a CPU tensor of one number. As a constant, the number would make each layer compile
anew.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Self, cast, final
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


@final
class HeldKey:
    """The key of a module of another library, as an attribute of it. In a copy of the module it is None.

    call: what an operation calls in place of the function that the module's library has registered; None for that one.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.key = None if module is None else new_key(module)
        self.call: Callable[..., Tensor] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


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
