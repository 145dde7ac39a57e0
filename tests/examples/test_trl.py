"""The recipes for TRL print what docs/trl.md says. Those of one process share it, since importing TRL takes longest."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import trl_grpo
import trl_sft
from tests.examples.conftest import EXAMPLES
from tests.helpers.programs import run_program

PAGE = EXAMPLES.parent / "docs" / "trl.md"
# By command: the lines that it prints.
COMMANDS = {
    command: lines.split("\n")
    for command, lines in re.findall(r"^    \$ python (.*)\n((?:    step .*\n)+)", PAGE.read_text(), flags=re.MULTILINE)
}
ALONE = [command for command in COMMANDS if command.startswith("examples/")]
SEVERAL = [command for command in COMMANDS if command not in ALONE]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 "
RUN_ALL = """
import runpy, sys
folder, *commands = sys.argv[1:]
for index, command in enumerate(commands):
    print("$", command, flush=True)
    sys.argv = [*command.split(), "--run-dir", f"{folder}/{index}"]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONE_STEP = """
import json, sys
import trl_grpo
from sonic_ep import record_routing
from sonic_ep.integrations.transformers import recorded_experts

make_trainer, found = trl_grpo.grpo_trainer, {}

def make(options, mesh, model, *others):
    trainer = make_trainer(options, mesh, model, *others)
    compute_loss = trainer._compute_loss

    def compute(_, inputs):
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.neg_()
        with record_routing() as record:
            loss = compute_loss(model, inputs)
        given, ids = inputs["routed_experts"], recorded_experts(model, record, len(inputs["prompt_ids"]))
        found["tokens"] = given[..., 0, 0].numel()
        found["as given"] = int((given == ids).flatten(2).all(2).sum())
        found["with experts"] = int((ids >= 0).flatten(2).all(2).sum())
        return loss

    trainer._compute_loss = compute
    return trainer

trl_grpo.grpo_trainer = make
trl_grpo.main(["--steps", "1", "--batch", "16", "--run-dir", sys.argv[1]])
print(json.dumps(found))
"""
STEP = re.compile(r"step (\d+): (loss|reward) (\d+\.\d+)")
Figures = list[tuple[int, str, float]]


def figures(lines: list[str]) -> Figures:
    found = (STEP.fullmatch(line.strip()) for line in lines)
    return [(int(match[1]), match[2], float(match[3])) for match in found if match]


def start(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES.parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join((str(EXAMPLES.parent), str(EXAMPLES))),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each command of one process prints."""
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    printed: dict[str, list[str]] = {}
    for line in start("-c", RUN_ALL, str(tmp_path_factory.mktemp("runs")), *ALONE):
        if line.startswith("$ "):
            printed[line.removeprefix("$ ")] = []
        else:
            printed[[*printed][-1]].append(line)
    return printed


def check(command: str, printed: list[str]) -> None:
    found, wanted = figures(printed), figures(COMMANDS[command])
    assert [(step, name) for step, name, _ in found] == [(step, name) for step, name, _ in wanted]
    for (_, name, value), (_, _, shown) in zip(found, wanted, strict=True):
        # Another machine sums in another order. A reward counts drawn tokens, and one of these may become another.
        assert value == pytest.approx(shown, abs=0.02 if name == "loss" else 0.05)
    change = found[-1][2] - found[0][2]
    assert change < -0.5 if found[0][1] == "loss" else change > 0.2


def test_the_page_has_the_commands() -> None:
    assert len(ALONE) == 4
    assert len(SEVERAL) == 2


@pytest.mark.parametrize("command", ALONE)
def test_one_process_prints_what_the_page_says(command: str, alone: dict[str, list[str]]) -> None:
    check(command, alone[command])


@pytest.mark.parallel_registry
@pytest.mark.parametrize("command", SEVERAL)
def test_several_processes_print_what_the_page_says(command: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert command.startswith(TORCHRUN)
    program_and_flags = command.removeprefix(TORCHRUN).split()
    check(command, run_program(*program_and_flags, "--run-dir", str(tmp_path / "run"), processes=2))


@pytest.mark.parallel_registry
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--lora --lr 0.02 --steps 10", pytest.param("--muon --steps 10", marks=pytest.mark.exhaustive)]
)
def test_several_processes_learn_what_one_does(flags: str, alone: dict[str, list[str]], tmp_path: Path) -> None:
    flags_of_two = ("--ep-size", "2", *flags.split(), "--run-dir", str(tmp_path / "run"))
    found = figures(run_program("examples/trl_sft.py", *flags_of_two, processes=2))
    wanted = figures(alone[f"examples/trl_sft.py {flags}"])
    assert [value for *_, value in found] == pytest.approx([value for *_, value in wanted], abs=0.01)


def test_what_is_written_loads_without_us(alone: dict[str, list[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = alone[ALONE[0]][-1].removeprefix("written to ")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer("61 62 63 0 1 2", return_tensors="pt")
    following = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, -4:]
    assert tokenizer.decode(following) == "3 4 5 6"


def test_training_has_the_experts_of_generation(tmp_path: Path) -> None:
    """Also where the router is another one than in generation."""
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    found = json.loads(start("-c", ONE_STEP, str(tmp_path / "run"))[-1])
    assert found["tokens"] == 16 * 12
    assert found["as given"] == found["tokens"]
    assert 100 < found["with experts"] <= 16 * 11  # the last token has none


def test_rows_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "1 2"}\n\n{"text": "3"}\n')
    assert trl_sft.rows_of(str(file)) == [{"text": "1 2"}, {"text": "3"}]


def test_the_reward_is_the_share_of_even_numbers() -> None:
    completions = ["2 4 6 8 10 12 14 16", "1 2 3 4 5 6 7 8", "2 4", "<pad> 3", ""]
    assert trl_grpo.share_of_even(completions, prompts=[]) == [1.0, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (trl_sft.main, "--muon --lora", "--muon is for whole weights, and --lora trains adapters alone; leave out one"),
        (trl_sft.main, "--model nowhere", "--model 'nowhere' is not a folder that save_pretrained wrote"),
        (trl_sft.main, "--data nowhere", "No such file or directory: 'nowhere'"),
        (trl_sft.main, "--ep-size 2", "--ep-size 2 must divide the 1 processes"),
        (trl_grpo.main, "--batch 12", "--batch 12 is not a multiple of the 8 completions of a prompt"),
    ],
)
def test_what_cannot_run_is_refused(
    main: trl_sft.Callable[[list[str]], None],
    flags: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trl_sft, "require_package", lambda *_: None)
    with pytest.raises(SystemExit) as refused:
        main(flags.split())
    assert message in f"{refused.value} {capsys.readouterr().err}"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_transformers.find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="pip install"):
        trl_sft.main([])


def test_adapters_in_several_processes_need_a_trainer_that_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    monkeypatch.delattr(Trainer, "_sync_replicated_trainable_parameters", raising=False)
    with pytest.raises(ValueError, match=r"needs the Trainer of transformers 5\.24, which averages adapters"):
        trl_sft.check_adapters()
