"""What our changes to quack's kernels are written in, as a part of the keys by which quack keeps compiled kernels.

quack has a place for that, quack.cache.EXTRA_SOURCE_DIRS, which every key then holds, of its own kernels too. But the
processes in which it compiles candidates while it tunes do not import us and make other keys: whoever tunes quack's
GEMMs beside our layer would compile every candidate a second time, one after the other.

Epilogues that are but functions of ours need no digest: quack's keys of them hold their source and what it refers to.
"""

import functools
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


@functools.cache
def sources() -> str:
    """A digest of the names and contents of this folder's modules."""
    return digest_of(_FOLDER)


def digest_of(folder: Path) -> str:
    """Likewise of any folder's."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
