"""The text: which bytes train, which validate, and that batches depend on seed and step alone."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corpus import STANDARD_LIBRARY_LIMIT, Corpus, load_corpus, split_by_file, standard_library_files


def text_of(values: Tensor) -> str:
    return bytes(values.tolist()).decode()


def as_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def write_files(folder: Path, count: int) -> list[str]:
    (folder / "deep").mkdir()
    names = [f"{'deep/' if number % 2 else ''}{number}.txt" for number in range(count)]
    for name in names:
        (folder / name).write_text(f"<{name}>" * 10)
    return names


def test_whole_files_train_or_validate(tmp_path: Path) -> None:
    names = write_files(tmp_path, 50)
    corpus = load_corpus(str(tmp_path), seq=16)
    train, validation = text_of(corpus.train).split("\0"), text_of(corpus.validation).split("\0")
    assert train.pop() == validation.pop() == ""
    assert sorted(train + validation) == sorted(f"<{name}>" * 10 for name in names)
    assert 1 <= len(validation) <= 15


def test_a_file_stays_on_its_side_when_others_come() -> None:
    some, all_names = [f"file_{n}" for n in range(100)], [f"file_{n}" for n in range(200)]
    train, validation = split_by_file(all_names)
    assert not set(train) & set(validation)
    assert (set(split_by_file(some)[0]), set(split_by_file(some)[1])) == (
        set(train) & {*some},
        set(validation) & {*some},
    )


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_files_leave_no_side_empty(count: int) -> None:
    for start in range(50):
        train, validation = split_by_file([f"{start + number}.txt" for number in range(count)])
        assert train
        assert validation
        assert len(train) + len(validation) == count


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(str(number % 10) for number in range(1000)))
    corpus = load_corpus(str(file), seq=16)
    assert text_of(corpus.train) + text_of(corpus.validation) == file.read_text()
    assert len(corpus.validation) == 100
    assert "last 10% validate" in corpus.source


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    names = write_files(tmp_path, 10)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_text("secret")
    corpus = load_corpus(str(tmp_path), seq=16)
    assert (text_of(corpus.train) + text_of(corpus.validation)).count("\0") == len(names)


def test_unigram_by_hand() -> None:
    # Counts with one added: a 3, b 2, c 1, each over 3 + 256.
    corpus = Corpus(train=as_tensor("aab"), validation=as_tensor("abbc"), source="")
    expected = -(math.log2(3 / 259) + 2 * math.log2(2 / 259) + math.log2(1 / 259)) / 4
    assert corpus.unigram_bits_per_byte() == pytest.approx(expected, rel=1e-12)


def test_windows() -> None:
    corpus = Corpus(
        train=torch.arange(200, dtype=torch.uint8), validation=torch.arange(9, dtype=torch.uint8), source=""
    )
    first = corpus.training_windows(3, seed=0, batch=5, seq=8)
    assert first.shape == (5, 9)
    assert (first.diff(dim=1) == 1).all()
    assert torch.equal(first, corpus.training_windows(3, seed=0, batch=5, seq=8))
    assert torch.equal(first[:2], corpus.training_windows(3, seed=0, batch=2, seq=8))
    assert not torch.equal(first, corpus.training_windows(4, seed=0, batch=5, seq=8))
    assert not torch.equal(first, corpus.training_windows(3, seed=1, batch=5, seq=8))


def test_validation_windows_span_the_text() -> None:
    corpus = Corpus(train=torch.zeros(9, dtype=torch.uint8), validation=torch.arange(100, dtype=torch.uint8), source="")
    windows = torch.cat([corpus.validation_windows(index, batches=2, batch=4, seq=8) for index in range(2)])
    assert windows[0].tolist() == list(range(9))
    assert windows[-1].tolist() == list(range(91, 100))
    assert (windows[:, 0].diff() > 0).all()


def test_the_shortest_text_that_fits() -> None:
    corpus = Corpus(train=torch.arange(9, dtype=torch.uint8), validation=torch.arange(9, dtype=torch.uint8), source="")
    assert corpus.training_windows(1, seed=0, batch=2, seq=8).tolist() == [list(range(9))] * 2
    assert corpus.validation_windows(0, batches=1, batch=1, seq=8).tolist() == [list(range(9))]


def test_the_standard_library_is_small_and_its_own() -> None:
    files = standard_library_files()
    assert "argparse.py" in files
    assert not [name for name in files if "site-packages" in name]
    assert sum(path.stat().st_size for path in files.values()) <= STANDARD_LIBRARY_LIMIT
    assert list(files) == list(standard_library_files())


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_corpus(str(tmp_path / "absent"), seq=16)
    with pytest.raises(ValueError, match="holds no file"):
        load_corpus(str(tmp_path), seq=16)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"training text .* has 5 bytes.* --seq 16"):
        load_corpus(str(tmp_path), seq=16)
