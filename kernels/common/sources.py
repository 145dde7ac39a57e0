"""A digest of the source files of one of our kernels. It is part of the kernel's key in quack's compile cache.

quack has a setting for such files, quack.cache.EXTRA_SOURCE_DIRS. We do not use it, because it enters every key, also
the keys of quack's own kernels. quack's tuner compiles candidates in processes that do not import this package, so
their keys would differ from ours. A program that tunes quack's GEMMs and also runs our layer would compile every
candidate twice.

An epilogue that is a function of ours needs no digest: quack's key already holds its source and what it refers to.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

_OURS = "sonic_ep.kernels"


@functools.cache
def sources_of(module: str) -> str:
    """Returns a digest of a module and of the modules of sonic_ep.kernels that it imports, directly or indirectly.

    A change in any other module does not change the digest, so cached kernels stay valid.
    """
    return digest_of(modules_of(module))


def modules_of(module: str) -> dict[str, bytes]:
    """Returns the contents of the modules that `sources_of` digests, by name.

    Only top-level `from ... import` statements count, not those in functions or under `if TYPE_CHECKING`.
    """
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = Path(_file_of(name) or "").read_bytes()
            waiting += _imported(found[name])
    return found


def _imported(source: bytes) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(_OURS):
            if _file_of(node.module) is not None:
                yield node.module
            else:  # `from folder import module`: the folder has no file
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> str | None:
    spec = find_spec(module)
    return None if spec is None else spec.origin


def digest_of(modules: Mapping[str, bytes]) -> str:
    """Returns the SHA-256 hex digest of module names and contents."""
    digest = hashlib.sha256()
    for name in sorted(modules):
        digest.update(f"{name} {len(modules[name])}\n".encode())
        digest.update(modules[name])
    return digest.hexdigest()
