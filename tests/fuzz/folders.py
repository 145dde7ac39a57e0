"""Hostile folders: a checkpoint or a Hugging Face folder in which a file was damaged, lost, linked or made up.

Every rank raises the same error, of a type that the docs name and in words of ours, or gets the exact values. Other
values are no mistake where nothing can tell: from tensors of a Hugging Face folder, which has no checksums, and where
the checksums were made up too.
"""

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sonic_ep import EPGroup, MoE, MoEConfig
from sonic_ep.integrations.hugging_face import load_layer, save_folder
from tests.fuzz import faults
from tests.fuzz.misuse import in_words_of_ours
from tests.helpers.launch import RankPool

TIMEOUT = 60.0
CONFIG, BLOCK = MoEConfig(d=8, n=4, E=8, K=2), "model.layers.0.mlp"
CHECKSUMS = "checksums.json"
FOLDERS_OF_A_CASE = 4
OTHER_VALUES = {"state 2", "another state", "changed the model, ValueError"}
NAMES: list[Any] = [
    *("../2/.metadata", "/etc/passwd", "..", ".", "", "a\0b", "a\\b", ".metadata", "config.json", "b.safetensors"),
    *("../2/model-00001-of-00003.safetensors", "x" * 300, None, 3, [], {}),
]
OTHER_JSON = ["[]", "3", "null", "{}", "", '"text"', "[" * 100_000, '{"a":' * 10_000, '{"files": []}', "\\", "NaN"]


# --- what is written and loaded --------------------------------------------------------------------------------------


def write_hugging_face(rank: int, folder: Path, source: Path, seed: int) -> None:
    """A folder of some files. source: is written with zeros, as save_pretrained does. A worker."""
    layer, experts = MoE(CONFIG, EPGroup(), seed=seed), f"{BLOCK}.experts"
    shapes = {f"{BLOCK}.gate.weight": (CONFIG.E, CONFIG.d), "lm_head.weight": (3, CONFIG.d)}
    for e in range(CONFIG.E):
        shapes |= {f"{experts}.{e}.{name}.weight": (CONFIG.n, CONFIG.d) for name in ("gate_proj", "up_proj")}
        shapes[f"{experts}.{e}.down_proj.weight"] = (CONFIG.d, CONFIG.n)
    if rank == 0:
        source.mkdir()
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, source / "model.safetensors")
        (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    layer.group.raise_together(None)  # it is written now
    save_folder(folder, source, {BLOCK: layer}, max_shard_size=1500)


def load_hugging_face(rank: int, folder: Path, copy: Path | None) -> tuple[str, str]:
    """What a load into other weights does. copy: where `save_folder` copies the folder first, if given. A worker."""
    group = EPGroup()
    layer, wanted = MoE(CONFIG, group, seed=3), MoE(CONFIG, group, seed=1)
    try:
        if copy is not None:
            save_folder(copy, folder, {BLOCK: wanted})
        load_layer(copy or folder, BLOCK, layer)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return f"{'' if in_words_of_ours(error) else 'not in words of ours, '}{type(error).__name__}", str(error)
    same = all(map(torch.equal, layer.parameters(), wanted.parameters()))
    return ("state 1" if same else "another state"), ""


# --- damage ----------------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _zero(rng: random.Random, path: Path, other: Path) -> None:
    data = path.read_bytes()
    start = rng.randrange(len(data))
    path.write_bytes((data[:start] + bytes(rng.randint(1, 512)) + data[start:])[: len(data)])


def _append(rng: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _tear(rng: random.Random, path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice([0, 1, 7, 8, 9, rng.randrange(len(data))])])


def _lose(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def _directory(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(rng: random.Random, path: Path, other: Path) -> None:
    """To nothing, to itself, or to the same file elsewhere, with which a load may be exact."""
    moved = path.parent.parent / f"{path.name}.moved"
    path.rename(moved)
    path.symlink_to(rng.choice([Path("nothing"), path, moved]))


def _of_another(rng: random.Random, path: Path, other: Path) -> None:
    if (other / path.name).exists():
        shutil.copy(other / path.name, path)


def _swap(rng: random.Random, path: Path, other: Path) -> None:
    shutil.copy(rng.choice(sorted(path.parent.iterdir())), path.parent.parent / "copy")
    (path.parent.parent / "copy").replace(path)


DAMAGE: list[Callable[[random.Random, Path, Path], None]] = [
    *(_flip, _flip, _zero, _append, _tear, _lose, _directory, _link, _of_another, _swap),
]


def _other_json(rng: random.Random, path: Path) -> None:
    """Other JSON, or a value anywhere in it that is another."""
    if rng.random() < 0.3:
        path.write_text(rng.choice(OTHER_JSON))
        return
    found = json.loads(path.read_text())
    inside = rng.choice([found, *(value for value in found.values() if isinstance(value, dict) and value)])
    key, value = rng.choice(sorted(inside)), rng.choice([*NAMES, *inside.values()])
    how = rng.choice(["set", "set", "drop", "add"])
    if how == "drop":
        del inside[key]
    else:
        inside[key if how == "set" else str(rng.choice(NAMES))] = value
    path.write_text(json.dumps(found))


def harm(rng: random.Random, folder: Path, other: Path) -> str:
    """Harms one file. other: a folder with the same names. Returns what was done."""
    path = rng.choice(sorted(folder.iterdir()))
    is_json = path.suffix == ".json"
    if is_json and rng.random() < 0.7:
        _other_json(rng, path)
        return f"other JSON in {path.name}: {path.read_text()[:400]}"
    how = rng.choice(DAMAGE)
    if how is _lose and path.name == CHECKSUMS:  # without it a checkpoint is read, with a warning
        how = _tear
    how(rng, path, other)
    return f"{how.__name__} {path.name}"


def _renew_checksums(folder: Path) -> None:
    """As who makes up a folder would."""
    found = {path.name: path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
    (folder / CHECKSUMS).write_text(json.dumps({"files": sums}))


def check(pool: RankPool, seed: int, number: int) -> None:
    """Raises AssertionError unless all ranks raise the same error or load exact values; RankError or RankTimeoutError
    if ranks fail or hang."""
    rng = random.Random(f"folder {seed} {pool.world_size} {number}")
    is_checkpoint = number % 2 == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for state in (1, 2):
            if is_checkpoint:
                pool.run(faults.save, folder / str(state), state, timeout=TIMEOUT)
            else:
                pool.run(write_hugging_face, folder / str(state), folder / f"source-{state}", state, timeout=TIMEOUT)
        for turn in range(FOLDERS_OF_A_CASE):
            harmed = folder / f"harmed-{turn}"
            shutil.copytree(folder / "1", harmed)
            what, allowed = harm(rng, harmed, folder / "2"), {"state 1", "ValueError", "OSError"}
            if not is_checkpoint:
                allowed |= {"another state"} if ".safetensors" in what.partition(":")[0] else set()
                copy = folder / f"copy-{turn}" if rng.random() < 0.5 else None
                found = pool.run(load_hugging_face, harmed, copy, timeout=TIMEOUT)
            else:
                if CHECKSUMS not in what and rng.random() < 0.3:
                    _renew_checksums(harmed)
                    what, allowed = f"{what}, with its checksum", {*allowed, *OTHER_VALUES}
                found = pool.run(faults.load, harmed, timeout=TIMEOUT)
            kinds = {kind for kind, _ in found}
            assert len(kinds) == 1 or kinds <= {"state 1", *OTHER_VALUES}, f"{what}: ranks differ: {found}"
            assert kinds <= allowed, f"{what}: {found}"
