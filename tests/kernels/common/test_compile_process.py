"""GEMMs are compiled in another process, once for all ranks of a host, and what waits for them never waits in vain."""

import fcntl
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sonic_ep.kernels import backend
from sonic_ep.kernels.common import compile_process
from sonic_ep.kernels.common.compile_process import Gemms, Progress, read_progress

HOPPER = (9, 0)
GEMMS = Gemms(64, 32, "swiglu", "bfloat16")

# In place of the module that compiles: "up" at once, the others once the file `go` is there. With a file `die` it ends.
PROGRAM = """
import os, sys, time
from pathlib import Path
gemms, file, processes = sys.argv[1:]
folder = Path(__file__).parent
with open(folder / "starts", "a") as starts:
    starts.write(f"{gemms} {processes} {os.environ['CUTE_DSL_ARCH']} {os.environ['CUDA_VISIBLE_DEVICES']!r}\\n")
os.write(int(file), b"up down down\\nup\\n")
for line in (b"down\\ndo", b"wn\\n"):
    while not (folder / "go").exists():
        time.sleep(0.01)
        if (folder / "die").exists():
            sys.exit(1)
    os.write(int(file), line)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the program above and the cache are."""
    (tmp_path / "compiles_gemms.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compile_process, "_MODULE", "compiles_gemms")
    monkeypatch.setattr(compile_process, "_compilations", [])
    monkeypatch.setattr(compile_process, "_has_another_cache", lambda: False)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SONIC_EP_COMPILE_PROCESSES", "3")
    yield tmp_path
    (tmp_path / "die").touch()
    for thread in threading.enumerate():
        if thread.name == "sonic_ep compiles":
            thread.join()


def start() -> None:
    compile_process.start.__wrapped__(GEMMS, HOPPER)


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines() if (folder / "starts").exists() else []


def progress_file(folder: Path) -> Path:
    (file,) = (folder / "cache" / "sonic_ep").iterdir()
    return file


def test_an_operation_is_waited_for_alone(folder: Path) -> None:
    start()
    compile_process.wait_for("up")
    assert read_progress(progress_file(folder)) == Progress(("up", "down", "down"), ("up",))
    waiting = threading.Thread(target=compile_process.wait_for, args=("down",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    (folder / "go").touch()
    waiting.join()
    assert read_progress(progress_file(folder)).complete
    assert compile_process._compilations == []
    gemms = '{"d": 64, "n": 32, "activation": "swiglu", "dtype": "bfloat16", "bias": false, "split_gate_up": false, '
    rest = '"accumulate": false, "transposed": false, "ranks": [0, 0]}'
    assert starts(folder) == [f"{gemms}{rest} 3 sm_90a ''"]


def test_what_was_compiled_before_starts_nothing(folder: Path) -> None:
    (folder / "go").touch()
    start()
    compile_process.wait_for("down")
    start()
    assert compile_process._compilations == []
    assert len(starts(folder)) == 1


def test_what_was_compiled_ahead_of_time_starts_nothing(folder: Path) -> None:
    compile_process.mark_compiled(GEMMS, HOPPER, ["up", "down"])
    start()
    assert (compile_process._compilations, starts(folder)) == ([], [])


def test_other_ranks_wait_for_the_first(folder: Path) -> None:
    start()
    compile_process.wait_for("up")
    (of_first,) = compile_process._compilations
    compile_process._compilations.clear()
    start()  # as another rank
    compile_process.wait_for("up")
    assert compile_process._compilations != [of_first]
    (folder / "go").touch()
    compile_process.wait_for("down")
    assert len(starts(folder)) == 1


def test_a_process_that_ends_early_is_not_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    start()
    compile_process.wait_for("up")
    (folder / "die").touch()
    compile_process.wait_for("down")
    assert "1/3" in caplog.text
    assert "it has ended, the rest is compiled here" in caplog.text
    (folder / "die").unlink()
    (folder / "go").touch()
    start()  # the next run tries again
    compile_process.wait_for("down")
    assert read_progress(progress_file(folder)).complete
    assert len(starts(folder)) == 2


def test_a_cache_that_is_deleted_meanwhile_is_not_waited_for(folder: Path) -> None:
    start()
    compile_process.wait_for("up")
    progress_file(folder).unlink()
    compile_process.wait_for("down")
    assert compile_process._compilations == []


def test_a_process_that_hangs_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    compile_process.wait_for("up")
    monkeypatch.setattr(compile_process, "_TIMEOUT", 0.0)
    compile_process.wait_for("down")
    assert "it has hung, the rest is compiled here" in caplog.text


@pytest.mark.parametrize("why", ["one process", "no GPU of ours", "a file in the way", "no program"])
def test_without_it_nothing_is_waited_for(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sonic_ep.kernels")
    match why:
        case "one process":
            monkeypatch.setenv("SONIC_EP_COMPILE_PROCESSES", "1")
        case "a file in the way":
            (folder / "cache").touch()
        case "no program":
            monkeypatch.setattr(sys, "executable", str(folder / "python"))
    compile_process.start.__wrapped__(GEMMS, (8, 0) if why == "no GPU of ours" else HOPPER)
    assert compile_process._compilations == []
    assert starts(folder) == []
    assert ("GEMMs are compiled one after the other" in caplog.text) == (why in ("a file in the way", "no program"))


def test_a_cache_that_this_process_does_not_read_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("quack", "sonic_ep.kernels.experts.quack_compat"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert not compile_process._has_another_cache()
    monkeypatch.setitem(sys.modules, "quack", sys)
    assert compile_process._has_another_cache()
    monkeypatch.setitem(sys.modules, "sonic_ep.kernels.experts.quack_compat", sys)
    assert not compile_process._has_another_cache()
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    assert compile_process._has_another_cache()


def test_the_file_depends_on_what_the_kernels_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def file(gemms: Gemms = GEMMS, capability: tuple[int, int] = HOPPER) -> Path:
        return compile_process._progress_file(gemms, capability)

    before = file()
    assert before == file()
    assert len({before, file(GEMMS._replace(bias=True)), file(capability=(10, 0))}) == 3
    monkeypatch.setattr(compile_process, "sources_of", lambda _: "another source")
    assert file() != before
    other = file()
    monkeypatch.setattr(compile_process, "installed_version", lambda _: "another version")
    assert file() not in (before, other)


def test_a_lock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as file:
        assert not compile_process._is_locked(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert compile_process._is_locked(path)
    assert not compile_process._is_locked(path)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_line(is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    line = compile_process._Line()
    for text, seconds in (("1/3, 1 s", 1.0), ("1/3, 1 s", 1.1), ("2/3, 3 s", 3.0), ("2/3, 4 s", 4.0)):
        line.show(text, seconds)
    line.erase()
    shown = "\r\x1b[K1/3, 1 s\r\x1b[K2/3, 3 s\r\x1b[K2/3, 4 s\r\x1b[K" if is_terminal else "2/3, 3 s\n"
    assert capsys.readouterr().err == shown


def test_the_text(folder: Path) -> None:
    start()
    (compilation,) = compile_process._compilations
    text = compilation._text()
    assert text.startswith("sonic_ep: compiling the kernels for sm_90a (once, into ")
    compile_process.wait_for("up")
    assert "compiling 3 kernels for sm_90a" in compilation._text()
    assert "cache): 1/3, " in compilation._text()


def test_layers_start_it_for_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(backend, "start", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(backend, "_problem_before_import", lambda _, dtype, aligned: None if aligned else "not aligned")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    device = torch.device("cuda")
    gemms = GEMMS._replace(transposed=True, ranks=(8, 0))
    backend._start_compiling.__wrapped__(device, gemms)
    backend._start_compiling.__wrapped__(device, gemms._replace(n=33))
    backend.start_compiling(torch.zeros(2, 64, 32), "swiglu", bias=False)
    assert calls == [(gemms, HOPPER)]
