"""`sonic-ep compile` says what is wrong before it compiles anything."""

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
