"""Files of checkpoints: damage is found on every rank, and nothing in them is executed."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from sonic_ep import EPGroup, MoE, MoEConfig, checkpoint
from sonic_ep.checkpoint.files import CHECKSUMS, METADATA, read_metadata
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
CONFIG = MoEConfig(d=8, n=4, E=8, K=2)


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "saved", MoE(CONFIG, seed=1), extra={"step": 3})
    return tmp_path / "saved"


def load(folder: Path) -> MoE:
    layer = MoE(CONFIG, seed=2)
    checkpoint.load(folder, layer)
    return layer


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA])
@pytest.mark.parametrize("place", [0, 700, -1])
def test_a_flipped_bit(written: Path, name: str, place: int) -> None:
    flip_a_bit(written / name, place)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .* use another checkpoint"):
        load(written)


def test_a_lost_file(written: Path) -> None:
    (written / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="__0_0.distcp is missing"):
        load(written)


def test_damaged_checksums(written: Path) -> None:
    (written / CHECKSUMS).write_text("{")
    with pytest.raises(ValueError, match="checksums.json is damaged"):
        load(written)


def test_without_checksums_there_is_a_warning(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    (written / CHECKSUMS).unlink()
    with caplog.at_level(logging.WARNING, logger="sonic_ep.checkpoint"):
        layer = load(written)
    assert "its files are not verified" in caplog.text
    assert torch.equal(layer.experts.w1, MoE(CONFIG, seed=1).experts.w1)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere holds no checkpoint: it is no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no checkpoint: it has no .metadata"):
        load(tmp_path)


def damaged_for_two(rank: int, folder: str) -> str:
    layer = MoE(CONFIG, EPGroup(), seed=1)
    checkpoint.save(folder, layer)
    if rank == 0:
        flip_a_bit(Path(folder) / "__1_0.distcp", 5)
    dist.barrier()
    try:
        checkpoint.load(folder, layer)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_every_rank_hears_of_damage(ranks: Ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(damaged_for_two, str(tmp_path / "saved"))
    assert one == two
    assert "__1_0.distcp is damaged" in one


def test_metadata_runs_no_code(written: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for value in (Runs(str(marker)), {"state": Runs(str(marker))}):
        (written / METADATA).write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match="it refers to .*touch"):
            read_metadata(written)
    (written / METADATA).write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="holds a list, wanted Metadata"):
        read_metadata(written)
    assert not marker.exists()


def test_values_run_no_code(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "saved"
    layer = MoE(CONFIG, seed=1)
    state = {"model": {name: value for name, value in layer.state_dict().items() if not name.endswith("_extra_state")}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({**state, "extra": {"step": Runs(str(marker))}}, checkpoint_id=str(folder), no_dist=True)
    with pytest.raises(ValueError, match="extra.step is no plain value, and reading it could run code"):
        checkpoint.load(folder, layer, extra={"step": 0})
    assert not marker.exists()


@pytest.mark.parametrize("value", [object(), Runs("nowhere"), lambda: 0], ids=["object", "class", "function"])
def test_what_could_not_be_read_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match=r"extra\['what'\] is a .*; give tensors, numbers, strings"):
        checkpoint.save(tmp_path / "saved", MoE(CONFIG, seed=1), extra={"step": 3, "what": value})
    assert not (tmp_path / "saved").exists()


def test_plain_values(tmp_path: Path) -> None:
    extra = {"a": 1, "b": [1.5, "two", None, True], "c": {"d": torch.ones(2)}, "e": (1, 2), "f": torch.float32}
    layer = MoE(CONFIG, seed=1)
    checkpoint.save(tmp_path, layer, extra=extra)
    found = checkpoint.load(tmp_path, layer, extra={**dict.fromkeys("abef"), "c": {"d": torch.zeros(2)}})
    assert torch.equal(found["c"].pop("d"), torch.ones(2))
    assert found == {**extra, "c": {}}
