"""`sonic-ep doctor` on the CPU: what it finds, how it says it, and its exit status."""

import json
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sonic_ep import cli
from sonic_ep.cli import doctor as module
from sonic_ep.cli.doctor import Finding


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        cli.main(["doctor", *arguments])
    assert isinstance(raised.value.code, int)
    return raised.value.code


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_machine_without_gpus_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert status_of() == 0
    shown = capsys.readouterr().out
    assert f"ok       torch                {torch.__version__}" in shown
    assert "note     GPU                  none\n" in shown
    assert "ok       self-test            forward and backward agree with float64 to " in shown
    assert status_of("--json") == 0
    found = findings(capsys)
    assert {"python", "torch", "triton", "quack-kernels", "experts", "router", "transport", "self-test"} <= {*found}
    assert found["GPU"]["fix"] == "experts and routing run on the CPU in plain torch"


def test_a_layer_that_computes_something_else_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    step = module._step

    def wrong(group: Any, device: Any, dtype: torch.dtype, transport: Any) -> dict[str, torch.Tensor]:
        results = step(group, device, dtype, transport)
        results["experts.w2"] = results["experts.w2"] * (1.001 if dtype == torch.float32 else 1)
        return results

    with patch.object(module, "_step", wrong):
        assert status_of("--json") == 1
    found = findings(capsys)["self-test"]
    assert found["state"] == "problem"
    assert "experts.w2 1.0e-03" in found["text"]
    assert "sonic-ep doctor --json" in found["fix"]


def test_a_layer_that_does_not_run_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(module, "_step", side_effect=RuntimeError("no such kernel\nmore")):
        assert status_of() == 1
    assert "problem  self-test            RuntimeError: no such kernel\n" in capsys.readouterr().out


def test_what_only_another_rank_found_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    same, own = Finding("note", "GPU", "none", "on the CPU"), Finding("problem", "router", "plain torch", "install it")
    module._print([[same], [same, own, Finding("ok", "python", "3.13")]], as_json=False)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines] == ["note", "on", "problem", "install"]
    assert lines[2][1] == "rank 1: router       plain torch"


def test_ranks_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*command, "-m", "sonic_ep.cli", "doctor"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("self-test") == 1
    if not torch.cuda.is_available():
        assert "all-to-all over gloo, 2 ranks" in result.stdout


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--json") == 0
    found = findings(capsys)
    assert found["experts"]["text"] == "fused grouped GEMMs, in bf16 and fp16"
    assert found["programs"]["state"] == "ok"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("sonic-ep ")
