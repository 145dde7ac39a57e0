"""The commands say what is wrong before they import or compile anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonic_ep import cli
from sonic_ep.cli import compile as compile_module


def test_an_unknown_config_lists_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"sonic-ep: error: no config 'gpt9'.*tiny"):
        cli.main(["compile", "--config", "gpt9", "--arch", "sm_90a"])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(extra: str, *modules: str) -> None:
        raise ImportError(f"{modules} of {extra}")

    monkeypatch.setattr(compile_module, "require_extra", missing)
    with pytest.raises(SystemExit, match=r"sonic-ep: error: \('quack', 'cutlass', 'triton'\) of cuda"):
        cli.main(["compile", "--config", "tiny", "--arch", "sm_90a"])


def test_an_unknown_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compile", "--config", "tiny", "--arch", "sm_80"])
    assert "invalid choice: 'sm_80'" in capsys.readouterr().err


def test_a_cache_that_all_may_write_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUACK_ARCH", "CUTE_DSL_ARCH", "QUACK_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(compile_module, "require_extra", lambda *_: None)
    tmp_path.chmod(0o777)
    with pytest.raises(SystemExit, match=f"sonic-ep: error: {tmp_path} with compiled code has mode 777: all may write"):
        cli.main(["compile", "--config", "tiny", "--arch", "sm_90a", "--cache", str(tmp_path)])


MISTAKES = """
import sys
from sonic_ep import cli
plan = ["plan", "--tokens", "64", "--config"]
wrong = [*plan, "gpt9"], [*plan, "tiny", "--gpu-memory", "nan"], [*plan, "tiny", "--json"]
for arguments in (["--version"], ["--help"], *wrong):
    try:
        cli.main(arguments)
    except SystemExit:
        assert "torch" not in sys.modules, arguments
    else:
        raise AssertionError(arguments)
"""


def test_mistakes_are_found_before_torch_is_imported() -> None:
    subprocess.run([sys.executable, "-c", MISTAKES], check=True, capture_output=True, cwd=Path(__file__).parents[2])


def test_without_numpy_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    command = [sys.executable, "-m", "sonic_ep.cli", "plan", "--config", "tiny", "--tokens", "64"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ran.stderr == ""


@pytest.mark.parametrize("number", ["0", "-1"])
def test_as_many_kernels_at_once_as_can_be(number: str) -> None:
    with pytest.raises(SystemExit, match=f"sonic-ep: error: --processes {number} must be 1 to 4,096"):
        cli.main(["compile", "--config", "tiny", "--arch", "sm_90a", "--processes", number])
