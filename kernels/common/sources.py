"""A digest of the sources that a kernel of ours is written in, as a part of the key by which quack keeps it compiled.

quack has a place for such sources, quack.cache.EXTRA_SOURCE_DIRS, but every key holds it, also the keys of quack's own
kernels. The processes in which quack compiles candidates while it tunes do not import us and make other keys. Whoever
tunes quack's GEMMs beside our layer would compile every candidate twice.

An epilogue that is a function of ours needs no digest: quack's key holds its source and what it refers to.
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
    """Returns a digest of a module and of the modules of sonic_ep.kernels that it imports, directly or not.

    A change in any other module leaves the digest as it is, and with it the kernels in the cache.
    """
    return digest_of(modules_of(module))


def modules_of(module: str) -> dict[str, bytes]:
    """Returns these modules' contents by name. An import under `if TYPE_CHECKING` does not count."""
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
            else:  # a folder, of whose modules some are imported
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> str | None:
    spec = find_spec(module)
    return None if spec is None else spec.origin


def digest_of(modules: Mapping[str, bytes]) -> str:
    """Returns a digest of names and contents."""
    digest = hashlib.sha256()
    for name in sorted(modules):
        digest.update(f"{name} {len(modules[name])}\n".encode())
        digest.update(modules[name])
    return digest.hexdigest()
