"""The files of a checkpoint: read without executing what they hold, and compared with checksums.

torch.distributed.checkpoint unpickles `.metadata` and all values that are no tensors, which lets a file run any code.
Here `.metadata` may only refer to the classes that torch writes, and values are read with weights_only=True.

checksums.json has the SHA-256 of every file: {"files": {"__0_0.distcp": "9f86..."}}.
A file is named without a folder, so that nothing outside of the checkpoint is read or written.
"""

import bisect
import hashlib
import io
import json
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from sonic_ep.groups import EPGroup

_LOG = logging.getLogger("sonic_ep.checkpoint")
METADATA, CHECKSUMS = ".metadata", "checksums.json"

# By module: what `.metadata` may refer to besides dtypes of torch.
_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # since Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Reads what a checkpoint holds: names, shapes and places in files.

    Raises ValueError if there is no checkpoint, or if its metadata is damaged or refers to anything else. Then files
    outside the folder are named, or a part of a tensor is in no file.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        problem = _problem_with_places(metadata) if isinstance(metadata, Metadata) else None
    except FileNotFoundError:
        what = "is no folder" if not folder.is_dir() else f"has no {METADATA}"
        raise ValueError(f"{folder} holds no checkpoint: it {what}; give the folder that `save` was given") from None
    except Exception as error:  # noqa: BLE001 - unpickling may raise anything
        raise ValueError(
            f"{path} is no metadata of a checkpoint ({type(error).__name__}: {error}): it is damaged, or made to run "
            "code; use another checkpoint"
        ) from None
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds a {type(metadata).__name__}, wanted Metadata; use another checkpoint")
    if problem is not None:
        raise ValueError(f"{path} {problem}; use another checkpoint")
    return metadata


def _problem_with_places(metadata: Metadata) -> str | None:
    for place in metadata.storage_data.values():
        if not _is_name(place.relative_path):
            return f"refers to {place.relative_path!r}, wanted the name of a file in the folder"
    for name, described in metadata.state_dict_metadata.items():
        is_tensor = isinstance(described, TensorStorageMetadata)
        parts = (
            [MetadataIndex(name, chunk.offsets) for chunk in described.chunks] if is_tensor else [MetadataIndex(name)]
        )
        if any(part not in metadata.storage_data for part in parts):
            return f"does not say in which file {name} is"
        if is_tensor:
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks]
            if any(len(each) != len(described.size) for box in boxes for each in box):
                return f"has parts of {name} of other dimensions"
            if not _cover(boxes, tuple(described.size)):
                return f"lacks a part of {name} {tuple(described.size)}"
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _cover(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...]) -> bool:
    """Returns True if the boxes, given by offsets and sizes, hold every place of a tensor.

    >>> _cover([((0, 0), (2, 3)), ((0, 3), (2, 1))], (2, 4)), _cover([((0, 0), (2, 3))], (2, 4))
    (True, False)
    """
    if 0 in size or not size:
        return bool(boxes) or 0 in size
    ends = {end for (start, *_), (length, *_) in boxes for end in (start, start + length) if 0 < end < size[0]}
    starts = [0, *sorted(ends)]  # of slabs along the first dimension, across which no box ends
    slabs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in starts]
    for (start, *offsets), (length, *sizes) in boxes:
        for i in range(bisect.bisect_left(starts, start), bisect.bisect_left(starts, start + length)):
            slabs[i].append((tuple(offsets), tuple(sizes)))
    return all(_cover(slab, size[1:]) for slab in slabs)


class SafeReader(FileSystemReader):
    """Reads the files of a folder, and its metadata by `read_metadata`."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Reads values that are no tensors with weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            problem = f"{name} is no plain value, and reading it could run code"
            raise pickle.UnpicklingError(f"{problem} ({str(error).partition(chr(10))[0]})") from None
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def problem_with_value(name: str, value: object) -> str | None:
    """Returns why a value could not be read again, or None."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        reason = str(error).partition("\n")[0]
        return (
            f"extra[{name!r}] is a {type(value).__name__}, which `load` would not read ({reason}); give tensors, "
            "numbers, strings, and lists, tuples and dicts of them"
        )
    return None


def problem_with_links(folder: Path) -> str | None:
    """Returns why no checkpoint may be written to a folder: a file of it is a link, through which one would write."""
    names = [*folder.glob("__*"), *folder.glob(f"{METADATA}*"), folder / CHECKSUMS]
    try:
        links = sorted(str(path) for path in names if path.is_symlink())
    except OSError:
        return None  # nor can be written, which `save` says
    if not links:
        return None
    return f"{links[0]} is a symbolic link, and what it leads to would be overwritten; delete it or give another folder"


def write_checksums(folder: Path, group: EPGroup) -> None:
    """Writes the checksums of a checkpoint that is complete. A collective. Raises OSError, on every rank."""
    sums, problem = {}, None
    try:
        sums = {path.name: _checksum(path) for path in sorted(folder.glob(f"__{group.rank}_*.distcp"))}
        if group.rank == 0:
            sums[METADATA] = _checksum(folder / METADATA)
    except OSError as error:
        problem = f"{folder} could not be read again ({error}); save it once more"
    of_ranks = group.all_gather_object(sums, stage="checkpoint")
    if group.rank == 0 and problem is None:
        files = {name: digest for each in of_ranks for name, digest in each.items()}
        try:
            (folder / CHECKSUMS).write_text(json.dumps({"files": files}, indent=1) + "\n")
        except OSError as error:
            problem = f"{folder / CHECKSUMS} could not be written ({error}); free some space or give another folder"
    group.raise_together(problem, error=OSError, stage="checkpoint")  # until then other ranks may not read it


def verified_names(folder: Path, group: EPGroup) -> set[str] | None:
    """Returns which files of a checkpoint have checksums, after a comparison of this rank's share of them.

    None: there are no checksums. Raises ValueError for a file that is not as it was written.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        if group.rank == 0:
            _LOG.warning("%s has no %s, so its files are not verified", folder, CHECKSUMS)
        return None
    try:
        files = sorted(json.loads(path.read_text())["files"].items())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint") from None
    for name, _ in files:
        if not _is_name(name):
            raise ValueError(
                f"{path} refers to {name!r}, wanted the name of a file in the folder; use another checkpoint"
            )
    for name, digest in files[group.rank :: group.size]:
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file} is missing; use another checkpoint")
        if _checksum(file) != digest:
            raise ValueError(f"{file} is damaged: {CHECKSUMS} has another checksum of it; use another checkpoint")
    return {name for name, _ in files}


def problem_with_names(folder: Path, metadata: Metadata, verified: set[str] | None) -> str | None:
    """Returns which file of a checkpoint has no checksum where others have one, or None."""
    missing = {METADATA, *(place.relative_path for place in metadata.storage_data.values())} - (verified or set())
    if verified is None or not missing:
        return None
    return f"{folder / CHECKSUMS} is damaged: it has no checksum of {min(missing)}; use another checkpoint"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
