"""quack epilogues whose kernels do something else than quack's, in methods that a class of ours overrides."""

import functools
import hashlib
from typing import Any

from quack.epilogue.frontend import EpiMod

from sonic_ep.kernels.cuda.sources import sources


class ChangedMod(EpiMod):
    """An epilogue as it is, in kernels that have the methods of `change` before quack's.

    what: the change in words, unlike all others of this epilogue.
    """

    def __init__(self, mod: EpiMod, change: type, what: str) -> None:
        self.__dict__.update(mod.__getstate__())  # without what was compiled for mod
        self._call_cache: dict[Any, Any] = {}
        self._mod, self._change = mod, change
        # quack keeps compiled kernels, in memory and on disk, by this.
        self.semantic_key = (*mod.semantic_key, what, sources())
        self.semantic_digest = hashlib.sha256(repr(self.semantic_key).encode()).hexdigest()
        self._ident = f"{mod.fn.__name__}_{self.semantic_digest[:16]}"

    def _mint(self, *key: Any) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _changed(self._mod._mint(*key), self._change)


@functools.cache
def _changed(kernel: type, change: type) -> type:
    return type(f"{kernel.__name__}{change.__name__}", (change, kernel), {})
