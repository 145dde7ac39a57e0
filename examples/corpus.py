"""The text that the example learns: bytes, split into training and validation, cut into windows.

By default the text is the Python standard library's own sources: on every machine that can run this, real, no download.
Whole files go to training or to validation, so that no validation line has a near copy in the same training file; a
single file given by the user is split by position instead (its last tenth validates).

A batch depends on (seed, step) alone, never on the number of processes: every process computes the windows of the
whole batch and keeps its own rows, so runs at any number of processes see the same data in the same order, and
resuming needs no position other than the step.
"""

import hashlib
import math
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
VALIDATION_SHARE = 0.1
STANDARD_LIBRARY_LIMIT = 16 * 2**20
END_OF_FILE = b"\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Training and validation text, each one uint8 tensor of bytes; `source` says in words where they come from."""

    train: Tensor
    validation: Tensor
    source: str

    def unigram_bits_per_byte(self) -> float:
        """What a model that only knows how frequent each byte is needs for one validation byte.

        Cross-entropy of the validation histogram under the training histogram, one added to every count so that a byte
        unseen in training costs a finite number of bits.
        """
        seen = torch.bincount(self.train, minlength=VOCABULARY).double() + 1
        wanted = torch.bincount(self.validation, minlength=VOCABULARY).double()
        bits = -(seen / seen.sum()).log2()
        return float((wanted * bits).sum() / wanted.sum())

    def fingerprint(self) -> str:
        """Short hash of both splits: processes that read different texts must not train together."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(b"|" + self.validation.numpy().tobytes())
        return digest.hexdigest()[:16]

    def training_windows(self, step: int, *, seed: int, batch: int, seq: int) -> Tensor:
        """The global batch of a step: (batch, seq + 1) int64, `batch` windows at random places of the training text."""
        draw = random.Random(f"{seed}/{step}")
        starts = [draw.randrange(len(self.train) - seq) for _ in range(batch)]
        return _windows(self.train, starts, seq)

    def validation_windows(self, index: int, *, batches: int, batch: int, seq: int) -> Tensor:
        """Validation batch `index` of `batches`: the same windows each time, spread evenly over the validation text."""
        last = len(self.validation) - seq - 1
        numbers = range(index * batch, (index + 1) * batch)
        starts = [number * last // max(1, batches * batch - 1) for number in numbers]
        return _windows(self.validation, starts, seq)


def _windows(text: Tensor, starts: list[int], seq: int) -> Tensor:
    positions = torch.tensor(starts)[:, None] + torch.arange(seq + 1)
    return text[positions].long()


def load_corpus(text: str | None, *, seq: int) -> Corpus:
    """Read the corpus: the standard library if `text` is None, else a file or all files of a folder.

    Raises ValueError when there is nothing to read or a split is shorter than one window of seq + 1 bytes.
    """
    if text is None:
        corpus = _from_files(standard_library_files(), "the Python standard library")
    elif Path(text).is_file():
        corpus = _from_one_file(Path(text))
    elif Path(text).is_dir():
        corpus = _from_files(folder_files(Path(text)), text)
    else:
        raise ValueError(f"--text {text!r} is neither a file nor a folder")
    for name, split in (("training", corpus.train), ("validation", corpus.validation)):
        if len(split) <= seq:
            raise ValueError(
                f"the {name} text of {corpus.source} has {len(split)} bytes, fewer than one window of --seq {seq} + 1; "
                "give more text or a smaller --seq"
            )
    return corpus


def standard_library_files() -> dict[str, Path]:
    """The interpreter's own .py files by name inside its library: modules first, then their tests, up to 16 MiB."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    own = {name: path for name, path in found.items() if not {"site-packages", "dist-packages"} & {*Path(name).parts}}
    files: dict[str, Path] = {}
    bytes_left = STANDARD_LIBRARY_LIMIT
    for name in sorted(own, key=lambda name: (_is_test(name), name)):
        bytes_left -= own[name].stat().st_size
        if bytes_left < 0:
            break
        files[name] = own[name]
    if not files:
        raise ValueError(f"no .py file of the standard library in {root}; give a text with --text FILE or FOLDER")
    return files


def _is_test(name: str) -> bool:
    return bool({"test", "tests", "idle_test"} & {*Path(name).parts})


def folder_files(root: Path) -> dict[str, Path]:
    """Every file under `root` by relative name, in name order; hidden files and folders are left out."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    files = {name: found[name] for name in sorted(found) if not any(part.startswith(".") for part in Path(name).parts)}
    if not files:
        raise ValueError(f"--text {str(root)!r} holds no file")
    return files


def split_by_file(names: list[str]) -> tuple[list[str], list[str]]:
    """(training names, validation names): about a tenth validates, chosen by a hash of the name alone.

    A file stays on its side when others come or go. With few files the hash may leave a side empty: then the file
    nearest to the border crosses it.
    """
    place = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64 for name in names}
    validation = {name for name in names if place[name] < VALIDATION_SHARE} or {min(names, key=place.__getitem__)}
    validation.discard(max(names, key=place.__getitem__))
    return [name for name in names if name not in validation], [name for name in names if name in validation]


def _from_files(files: dict[str, Path], origin: str) -> Corpus:
    if len(files) == 1:
        return _from_one_file(next(iter(files.values())))
    train, validation = split_by_file(list(files))
    return Corpus(
        train=_join([files[name] for name in train]),
        validation=_join([files[name] for name in validation]),
        source=f"{origin}: {len(train)} files train, {len(validation)} other files validate",
    )


def _from_one_file(path: Path) -> Corpus:
    text = _to_tensor(path.read_bytes())
    border = math.ceil(len(text) * (1 - VALIDATION_SHARE))
    return Corpus(
        train=text[:border],
        validation=text[border:],
        source=f"{path}: one file, so split by position; the last {VALIDATION_SHARE:.0%} validate",
    )


def _join(paths: list[Path]) -> Tensor:
    return _to_tensor(b"".join(path.read_bytes() + END_OF_FILE for path in paths))


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
