"""examples/finetune_transformers.py: one process or two, our loop or Trainer, all weights or LoRA.

Our loop runs as a user starts it. Other runs are forked, which spares their imports. With eager experts and no name of
ours registered, a saved folder computes what was trained.
"""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import finetune_transformers
from corpus import load_corpus
from run_folder import read_metrics
from tests.examples.conftest import EXAMPLES
from tests.helpers.programs import run_program

PROGRAM = "examples/finetune_transformers.py"
SMALL = ("--steps", "6", "--batch", "4", "--seq", "16", "--warmup", "1", "--lr", "0.003")
OFTEN = ("--save-every", "3", "--eval-every", "3", "--eval-batches", "2", "--log-every", "1")
REGISTER = importlib.import_module("sonic_ep.integrations.transformers.register")  # the package has a function so named
CLOCK = {"tokens_per_s", "seconds"}
# Loads a folder where sonic_ep was never imported, and writes the logits of some windows.
PLAIN = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="eager").eval()
with torch.no_grad():
    logits = model(input_ids=torch.load(sys.argv[2])).logits
assert "sonic_ep" not in sys.modules
torch.save(logits, sys.argv[3])
"""

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate, which Trainer needs, is not installed"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"part_{number}.txt").write_text(f"{number} times {number} is {number * number}; " * 20)
    return folder


def torchrun(processes: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")


def start(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(EXAMPLES.parent),
        },
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLES.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def flags_of(run: Path, text: Path) -> tuple[str, ...]:
    return *SMALL, *OFTEN, "--text", str(text), "--run-dir", str(run)


def finetune(run: Path, text: Path, *flags: str, processes: int | None = None) -> list[str]:
    """The lines that a new run prints."""
    return run_program(PROGRAM, *flags_of(run, text), *flags, processes=processes)


def resume(run: Path, *, processes: int | None = None) -> list[str]:
    return run_program(PROGRAM, "--resume", str(run), processes=processes)


def killed_at_step_3(run: Path, copy: Path, last: str) -> Path:
    """A copy of a finished run as a kill would leave it: later lines are in the records, `last` and `model` are not."""
    shutil.copytree(run, copy)
    for folder in (last, "model"):
        shutil.rmtree(copy / folder)
    return copy


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name not in CLOCK} for each in read_metrics(run)]


def assert_learned(run: Path) -> None:
    """Loss falls, and the folder has records, plot, events and the options."""
    train, validation = read_metrics(run, "train"), read_metrics(run, "validation")
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in validation] == [3, 6]
    assert train[-1]["loss"] < train[0]["loss"] - 0.3
    assert validation[1]["loss"] < validation[0]["loss"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("events.out.tfevents.*"))
    assert json.loads((run / "config.json").read_text())["options"]["steps"] == 6


def assert_loads_without_us(run: Path, text: Path, folder: Path) -> None:
    """In another process, transformers alone computes our logits and the last validation loss of the run."""
    from transformers import AutoModelForCausalLM

    from sonic_ep.integrations.transformers import register

    corpus = load_corpus(str(text), seq=16)
    windows = torch.cat([corpus.validation_windows(index, batches=2, batch=4, seq=16) for index in range(2)])
    torch.save(windows, folder / "windows.pt")
    start("-c", PLAIN, str(run / "model"), str(folder / "windows.pt"), str(folder / "logits.pt"))
    logits = torch.load(folder / "logits.pt")
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert float(loss) == pytest.approx(read_metrics(run, "validation")[-1]["loss"], abs=1e-4)
    register()
    ours: Any = AutoModelForCausalLM.from_pretrained(run / "model", experts_implementation="sonic_ep").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=windows).logits, logits, rtol=1e-4, atol=1e-4)
    assert "sonic_ep" not in (run / "model" / "config.json").read_text()


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our loop in one process."""
    run = tmp_path_factory.mktemp("plain") / "run"
    lines = start(PROGRAM, *flags_of(run, text)).stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 8
    return run


def test_our_loop(plain: Path, text: Path, tmp_path: Path) -> None:
    assert_learned(plain)
    assert_loads_without_us(plain, text, tmp_path)


def test_resume_is_exact(plain: Path, tmp_path: Path) -> None:
    copy = killed_at_step_3(plain, tmp_path / "copy", "checkpoints/step_000006")
    assert any(line.endswith("steps 4 to 6") for line in resume(copy))
    assert timeless(copy) == timeless(plain)
    assert (copy / "model" / "config.json").is_file()


def test_a_saved_model_goes_on(plain: Path, text: Path, tmp_path: Path) -> None:
    finetune(tmp_path / "run", text, "--model", str(plain / "model"), "--steps", "1")
    first = read_metrics(tmp_path / "run", "train")[0]
    assert first["loss"] < read_metrics(plain, "train")[0]["loss"] - 0.3


def test_rounding(plain: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finetune(run, text, "--rounding", "nearest")
    assert_learned(run)
    rounded, others = read_metrics(run, "train"), read_metrics(plain, "train")
    assert rounded[0]["loss"] != others[0]["loss"]
    assert rounded[0]["loss"] == pytest.approx(others[0]["loss"], rel=0.1)


@needs_accelerate
def test_trainer(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finetune(run, text, "--trainer")
    assert_learned(run)
    assert_loads_without_us(run, text, tmp_path)
    copy = killed_at_step_3(run, tmp_path / "copy", "trainer/checkpoint-6")
    assert any(line.endswith("steps 4 to 6") for line in resume(copy))
    assert timeless(copy) == timeless(run)


@needs_peft
def test_lora(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finetune(run, text, "--lora", "--lr", "0.01")
    assert_learned(run)
    assert_loads_without_us(run, text, tmp_path)
    adapter = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.0.mlp.experts.gate_up_proj" in adapter["target_parameters"]
    copy = killed_at_step_3(run, tmp_path / "copy", "checkpoints/step_000006")
    assert any(line.endswith("steps 4 to 6") for line in resume(copy))
    assert timeless(copy) == timeless(run)


@needs_peft
@pytest.mark.parallel_registry
@pytest.mark.exhaustive
@pytest.mark.parametrize("ep_size", [2, 1])
def test_lora_in_two_processes_learns_what_it_does_in_one(ep_size: int, text: Path, tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    finetune(alone, text, "--lora", "--lr", "0.01")
    finetune(run, text, "--lora", "--lr", "0.01", "--ep-size", str(ep_size), processes=2)
    for ours, wanted in zip(read_metrics(run), read_metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
        assert ours.get("grad_norm", 0.0) == pytest.approx(wanted.get("grad_norm", 0.0), rel=1e-3)
    assert_loads_without_us(run, text, tmp_path)
    copy = killed_at_step_3(run, tmp_path / "copy", "checkpoints/step_000006")
    assert any(line.endswith("steps 4 to 6") for line in resume(copy, processes=2))
    assert timeless(copy) == timeless(run)


@needs_peft
@needs_accelerate
def test_lora_under_trainer(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finetune(run, text, "--lora", "--trainer", "--lr", "0.01")
    assert_learned(run)
    copy = killed_at_step_3(run, tmp_path / "copy", "trainer/checkpoint-6")
    resume(copy)
    assert timeless(copy) == timeless(run)


@pytest.mark.parallel_registry
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_processes_learn_what_one_does(processes: int, plain: Path, text: Path, tmp_path: Path) -> None:
    """Two divide the experts; of four, two hold the same experts, and FSDP2 shards these further."""
    run = tmp_path / "run"
    start(*torchrun(processes), PROGRAM, *flags_of(run, text), "--ep-size", "2")
    assert_learned(run)
    assert_loads_without_us(run, text, tmp_path)
    for ours, alone in zip(read_metrics(run), read_metrics(plain), strict=True):
        assert ours["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert ours.get("grad_norm", 0.0) == pytest.approx(alone.get("grad_norm", 0.0), rel=1e-3)
    copy = killed_at_step_3(run, tmp_path / "copy", "checkpoints/step_000006")
    assert any(line.endswith("steps 4 to 6") for line in resume(copy, processes=processes))
    assert timeless(copy) == timeless(run)


@pytest.mark.parallel_registry
@needs_accelerate
def test_two_processes_under_trainer(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finetune(run, text, "--ep-size", "2", "--trainer", processes=2)
    assert_learned(run)
    assert_loads_without_us(run, text, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "0"), "--steps 0 must be at least 1"),
        (("--ep-size", "2"), "--ep-size 2 must divide the 1 processes"),
        (("--model", "nowhere"), "--model 'nowhere' is not a folder that save_pretrained wrote"),
        (("--resume", "nowhere"), "--resume 'nowhere' is not the folder of a run"),
    ],
)
def test_what_cannot_run_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        finetune_transformers.main(flags)


def test_a_vocabulary_too_small_for_bytes(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    with pytest.raises(SystemExit, match="has a vocabulary of 64, and bytes need 256"):
        finetune_transformers.main(["--model", str(tmp_path)])


def test_several_processes_need_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(REGISTER, "has_parallel_registry", lambda: False)
    with pytest.raises(SystemExit, match=r"has no registry .*pip install 'transformers>=5\.23'"):
        finetune_transformers.main([])


def test_lora_under_trainer_in_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(REGISTER, "has_parallel_registry", lambda: True)
    monkeypatch.setattr(finetune_transformers, "require_package", lambda *_: None)
    with pytest.raises(SystemExit, match="--lora with --trainer trains in one process"):
        finetune_transformers.main(["--lora", "--trainer"])


@pytest.mark.parametrize(("flag", "package"), [("--lora", "peft"), ("--trainer", "accelerate")])
def test_missing_packages_are_named(flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_transformers, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=f"{flag} needs the package {package}; pip install {package}"):
        finetune_transformers.main([flag])
