"""TRL's SFTTrainer trains a model with our experts as one with eager experts, in one process and in two."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="TRL is not installed")
from tests.helpers.hugging_face import VOCABULARY, model_of
from tests.helpers.programs import run_program

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from sonic_ep.integrations.transformers import register

folder, experts, dispatch, processes = *sys.argv[1:4], int(sys.argv[4])
register()
parallel = {}
if processes > 1:
    from transformers.distributed import DistributedConfig

    parallel["distributed_config"] = DistributedConfig(
        fsdp_size=processes, ep_size=processes, ep_implementation=dispatch
    )
model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=experts, **parallel)
words = {word: index for index, word in enumerate(["<end>", *(f"w{number}" for number in range(1, VOCABULARY))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>")
texts = [" ".join(f"w{(start + i) % 50 + 1}" for i in range(8 + start % 5)) for start in range(32)]
arguments = SFTConfig(
    output_dir=f"{folder}/out", max_steps=4, per_device_train_batch_size=8 // processes, learning_rate=3e-3,
    logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
)
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
trainer.train()
if trainer.is_world_process_zero():
    found = [[float(log["loss"]), float(log["grad_norm"])] for log in trainer.state.log_history if "loss" in log]
    print("FOUND " + json.dumps(found))
if dist.is_initialized():
    dist.destroy_process_group()
"""


def trained(path: Path, experts: str, dispatch: str, processes: int) -> list[list[float]]:
    """Loss and gradient norm of each step."""
    program = path / "program.py"
    program.write_text(PROGRAM.replace("VOCABULARY", str(VOCABULARY)))
    arguments = str(path), experts, dispatch, str(processes)
    # A process alone has none of torchrun's variables.
    lines = run_program(str(program), *arguments, processes=processes if processes > 1 else None)
    (line,) = (line for line in lines if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.parallel_registry)])
def test_sft_equals_stock(processes: int, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    ours = trained(tmp_path, "sonic_ep", "sonic_ep", processes)
    stock = trained(tmp_path, "eager", "all_to_all", processes)
    assert ours[-1][0] < ours[0][0]
    for step, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4), step
