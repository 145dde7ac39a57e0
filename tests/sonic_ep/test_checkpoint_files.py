"""Files of checkpoints: damage is found on every rank, and nothing in them is executed."""

import json
import logging
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from sonic_ep import EPGroup, MoE, MoEConfig, checkpoint
from sonic_ep.checkpoint.files import CHECKSUMS, METADATA, _cover, read_metadata
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


def checksums(folder: Path) -> dict[str, str]:
    return json.loads((folder / CHECKSUMS).read_text())["files"]


@pytest.mark.parametrize("dropped", [[METADATA, "__0_0.distcp"], [METADATA], ["__0_0.distcp"]])
def test_checksums_that_leave_out_files(written: Path, dropped: list[str]) -> None:
    files = {name: digest for name, digest in checksums(written).items() if name not in dropped}
    (written / CHECKSUMS).write_text(json.dumps({"files": files}))
    if "__0_0.distcp" in dropped:
        flip_a_bit(written / "__0_0.distcp", 700)
    with pytest.raises(ValueError, match=f"checksums.json is damaged: it has no checksum of {dropped[0]}"):
        load(written)


def test_checksums_of_files_elsewhere(written: Path) -> None:
    secret = written.parent / "secret"
    secret.write_text("text")
    for name in ("../secret", str(secret), "..", "a\\..\\b"):
        (written / CHECKSUMS).write_text(json.dumps({"files": {**checksums(written), name: "0"}}))
        with pytest.raises(ValueError, match=r"refers to .*, wanted the name of a file in the folder"):
            load(written)


def changed(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Changes the metadata of a checkpoint, and leaves nothing with which to compare it."""
    metadata = read_metadata(folder)
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / CHECKSUMS).unlink()


def test_metadata_that_refers_to_files_elsewhere(written: Path) -> None:
    other = written.parent / "other"
    checkpoint.save(other, MoE(CONFIG, seed=3))

    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = f"../other/{place.relative_path}"

    changed(written, change)
    with pytest.raises(ValueError, match=r"refers to '../other/__0_0.distcp', wanted the name of a file"):
        load(written)


def _half(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["model.experts.w1"]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks[0].sizes = torch.Size((4, *described.size[1:]))


def _flat(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["model.experts.w1"]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks[0].sizes = torch.Size([described.size.numel()])


def _nowhere(metadata: Metadata) -> None:
    metadata.storage_data = {
        place: of for place, of in metadata.storage_data.items() if place.fqn != "model.experts.w1"
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_half, r"lacks a part of model.experts.w1 \(8, 8, 8\)"),
        (_flat, "has parts of model.experts.w1 of other dimensions"),
        (_nowhere, "does not say in which file model.experts.w1 is"),
        (lambda m: setattr(m, "storage_data", None), "is no metadata of a checkpoint"),
    ],
)
def test_metadata_without_a_part(written: Path, change: Callable[[Metadata], None], message: str) -> None:
    changed(written, change)
    layer = MoE(CONFIG, seed=2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        checkpoint.load(written, layer)
    torch.testing.assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("boxes", "size", "wanted"),
    [
        ([((0, 0), (2, 3)), ((0, 3), (2, 1))], (2, 4), True),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], (2, 4), False),
        ([((0, 0), (1, 4)), ((1, 0), (1, 2)), ((0, 2), (2, 2))], (2, 4), True),
        ([((0, 0), (1, 4)), ((1, 0), (1, 2)), ((0, 3), (2, 1))], (2, 4), False),
        ([((0,), (3,)), ((1,), (1,))], (4,), False),
        ([((0,), (9,))], (4,), True),
        ([((-2,), (3,))], (4,), False),
        ([((), ())], (), True),
        ([], (), False),
        ([], (0, 3), True),
    ],
)
def test_boxes_that_cover_a_tensor(boxes: list[Any], size: tuple[int, ...], wanted: bool) -> None:
    assert _cover(boxes, size) == wanted


def test_a_load_that_fails_in_the_middle_says_so(written: Path) -> None:
    (written / CHECKSUMS).unlink()
    data = (written / "__0_0.distcp").read_bytes()
    (written / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"could not be read .* Model and optimizer hold in part what was read before"):
        load(written)


def saved_through_links(rank: int, folder: str, name: str) -> tuple[str, str]:
    if rank == 0:
        Path(folder).mkdir()
        (Path(folder) / name).symlink_to(Path(folder).parent / "victim")
    dist.barrier()
    return error_of(lambda: checkpoint.save(folder, MoE(CONFIG, EPGroup(), seed=1)))


@pytest.mark.parametrize("name", ["__1_0.distcp", CHECKSUMS, METADATA])
def test_nothing_is_written_through_links(ranks: Ranks, tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("as it was")
    for kind, message in ranks(2).run(saved_through_links, str(tmp_path / "saved"), name):
        assert kind == "ValueError"
        assert f"{name} is a symbolic link" in message
    assert (tmp_path / "victim").read_text() == "as it was"
    (tmp_path / "saved" / name).unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "saved")
    checkpoint.save(tmp_path / "latest", MoE(CONFIG, seed=1))  # the folder may be one
    load(tmp_path / "latest")


@pytest.mark.parametrize("text", ["{", "[]", "null", pytest.param("[" * 100_000, id="nested")])
def test_damaged_checksums(written: Path, text: str) -> None:
    (written / CHECKSUMS).write_text(text)
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


def error_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - of any type, which is compared
        return type(error).__name__, str(error)
    return "nothing", ""


def saved_with_limit(rank: int, folder: str, limit: int) -> tuple[str, str]:
    """What a save does where rank 0 can write no more than `limit` bytes to a file, as if the disk were full."""
    layer, before = MoE(CONFIG, EPGroup(), seed=1), resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return error_of(lambda: checkpoint.save(folder, layer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_raises_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message in ranks(2).run(saved_with_limit, str(tmp_path / "saved"), 100):
        assert kind == "OSError"
        assert message.startswith(f"{tmp_path / 'saved'} could not be written, and holds no checkpoint now (rank 0: ")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load(tmp_path / "saved")


class NeedsTwoError(ValueError):
    """Cannot be unpickled, which calls it with one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def saved_with_strange_error(rank: int, folder: str) -> tuple[str, str]:
    def write_data(*_: object) -> None:
        raise NeedsTwoError("strange ", "error")

    with patch.object(dcp.FileSystemWriter, "write_data", write_data if rank == 1 else dcp.FileSystemWriter.write_data):
        return error_of(lambda: checkpoint.save(folder, MoE(CONFIG, EPGroup(), seed=1)))


def test_an_error_that_cannot_be_sent_raises_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message in ranks(2).run(saved_with_strange_error, str(tmp_path)):
        assert kind == "OSError"
        assert "(rank 1: RuntimeError: NeedsTwoError: strange error)" in message


def saved_without_checksums(rank: int, folder: str) -> tuple[str, str]:
    (Path(folder) / CHECKSUMS).mkdir(parents=True, exist_ok=True)  # where no file can be written then
    dist.barrier()
    return error_of(lambda: checkpoint.save(folder, MoE(CONFIG, EPGroup(), seed=1)))


def test_checksums_that_cannot_be_written_raise_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message in ranks(2).run(saved_without_checksums, str(tmp_path)):
        assert kind == "OSError"
        assert f"{CHECKSUMS} could not be written" in message


@pytest.mark.parametrize("text", ["[]", "3", '{"files": 3}'])
def test_checksums_of_another_form(written: Path, text: str) -> None:
    (written / CHECKSUMS).write_text(text)
    with pytest.raises(ValueError, match="checksums.json is damaged"):
        load(written)


def _with_mask(folder: str, layer: MoE) -> None:
    layer.experts.register_buffer("mask", torch.ones(3, 1))
    checkpoint.save(folder, layer)


def _of_others() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


MISTAKES: dict[str, tuple[Callable[[str, MoE], object], str, str]] = {
    "timeout": (
        lambda f, m: checkpoint.save(f, m, timeout=0.0),
        "TypeError",
        "rank 1: timeout=0.0, wanted 0.001 to 1e+06 seconds",
    ),
    "folder": (lambda f, m: checkpoint.save(3.5, m), "TypeError", "rank 1: folder is a float, wanted a str or a Path"),  # type: ignore[arg-type]
    "model": (
        lambda f, m: checkpoint.save(f, None),
        "TypeError",
        "rank 1: model is a NoneType, wanted a torch.nn.Modu",
    ),  # type: ignore[arg-type]
    "extra": (lambda f, m: checkpoint.save(f, m, extra="step"), "TypeError", "rank 1: extra is a str, wanted a dict"),  # type: ignore[arg-type]
    "optimizer": (
        lambda f, m: checkpoint.save(f, m, _of_others()),
        "ValueError",
        "rank 1: the optimizer has 1 parameters that the model has not",
    ),
    "mask": (_with_mask, "ValueError", "rank 1: experts.mask has shape (3, 1), wanted a row for each of the 4 local"),
    "elsewhere": (lambda f, m: checkpoint.save(f + "2", m), "ValueError", "disagree about folder: "),
    "another model": (
        lambda f, m: checkpoint.save(f, torch.nn.Linear(2, 2)),
        "ValueError",
        "give the same model and optimizer on every rank",
    ),
}


def mistaken(rank: int, folder: str, kind: str) -> tuple[tuple[str, str], str]:
    """What a mistake of rank 1 raises; then all ranks save as they should."""
    layer = MoE(CONFIG, EPGroup(), seed=1)
    save = MISTAKES[kind][0] if rank == 1 else checkpoint.save
    raised = error_of(lambda: save(folder, layer))
    return raised, error_of(lambda: checkpoint.save(folder, MoE(CONFIG, EPGroup(), seed=1)))[0]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_of_one_rank_raises_on_every_rank(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for (error, message), afterwards in ranks(2).run(mistaken, str(tmp_path / "saved"), kind):
        assert error == MISTAKES[kind][1]
        assert MISTAKES[kind][2] in message
        assert afterwards == "nothing"


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


@pytest.mark.parametrize(
    ("name", "message"), [("load", r"it refers to torch\.load"), ("float32", "holds a dtype, wanted Metadata")]
)
def test_metadata_refers_to_dtypes_of_torch_and_to_no_function(written: Path, name: str, message: str) -> None:
    (written / METADATA).write_bytes(f"ctorch\n{name}\n.".encode())  # c: the name of a module and one in it
    with pytest.raises(ValueError, match=message):
        read_metadata(written)


def test_values_run_no_code(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "saved"
    layer = MoE(CONFIG, seed=1)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            {"model": layer.state_dict(), "extra": {"step": Runs(str(marker))}}, checkpoint_id=str(folder), no_dist=True
        )
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
