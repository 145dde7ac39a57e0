"""Supervised fine-tuning with TRL's SFTTrainer: a model of transformers with sonic_ep's experts.

    python examples/trl_sft.py                     a tiny Qwen3-MoE with random weights learns to count
    python examples/trl_sft.py --model FOLDER --data FILE    a model with its tokenizer; a line {"text": ...} a row
    python examples/trl_sft.py --lora              LoRA on experts and attention, through PEFT (fuse_lora)
    python examples/trl_sft.py --muon              Muon for matrices, those of experts too, and AdamW for the rest
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/trl_sft.py --ep-size 2

Several processes shard the model by FSDP2, and --ep-size of them divide its experts. On a host with GPUs it runs on
those over NCCL, else on the CPU over gloo. Nothing is downloaded. At the end `model/` in the run folder loads in
transformers without us.

Needs the extra transformers, TRL 1.16, and PEFT for --lora; several processes need transformers 5.23.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corpus import VOCABULARY
from finetune_transformers import check_folder, check_registry, require_package
from options import check_processes, check_run_dir
from parallel import Mesh, choose_device, open_mesh, positive, read_launch
from sonic_ep.config import RoundingConfig
from sonic_ep.optim import Muon
from train import say
from transformers_model import add_lora, build, by_mesh, save, write_tiny_model

NUMBERS = 64  # words of the default rows: "0" to "63"
Rows = list[dict[str, str]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("trl_sft.py", steps=20, batch=16, lr=5e-3, column="text")
    parser.add_argument("--muon", action="store_true", help="Muon for matrices, AdamW for the rest")
    options = parser.parse_args(arguments)
    if options.muon and options.lora:
        parser.error("--muon is for whole weights, and --lora trains adapters alone; leave out one")
    train(parser, options, counting, sft_trainer)


def counting(seed: int) -> Rows:
    """Rows such as "61 62 63 0 1 ..."."""
    draw = random.Random(seed)
    starts = [draw.randrange(NUMBERS) for _ in range(512)]
    return [{"text": " ".join(str((start + i) % NUMBERS) for i in range(16))} for start in starts]


def sft_trainer(options: argparse.Namespace, mesh: Mesh, model: Any, tokenizer: Any, rows: Rows, folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments_of(options, mesh, folder)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(MuonAndAdamW(model, options.lr) if options.muon else None, None),
        callbacks=[figures(mesh, "loss")],
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as the one optimizer that Trainer takes: Muon has the hidden matrices, AdamW all others."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_other = name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight", "bias"))
            (others if is_other or parameter.dim() < 2 else matrices).append(parameter)
        # This adjustment lets Muon take AdamW's learning rate.
        muon = Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([{"params": each} for each in by_mesh(others)], lr=lr, weight_decay=0.0)
        self.both = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})  # the same groups, for a schedule of lr

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("MuonAndAdamW takes no closure: call it, and then step()")
        for optimizer in self.both:
            optimizer.step()


# The rest is also for trl_grpo.py.


def parser_of(program: str, *, steps: int, batch: int, lr: float, column: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=f"TRL with sonic_ep's experts: examples/{program}")
    parser.add_argument("--model", help="folder of a model and its tokenizer (default: a tiny Qwen3-MoE)")
    parser.add_argument("--data", help=f'file with a line {{"{column}": ...}} a row (default: numbers from 0 to 63)')
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters of experts and attention alone")
    parser.add_argument("--ep-size", type=positive, help="processes that divide the experts (default: all)")
    parser.add_argument("--steps", type=positive, default=steps, help=f"optimizer steps (default: {steps})")
    parser.add_argument("--batch", type=positive, default=batch, help=f"rows a step of all processes ({batch})")
    parser.add_argument("--lr", type=float, default=lr, help=f"learning rate, which falls to 0 (default: {lr})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--run-dir", help="folder of this run (default: runs/<date and time>)")
    return parser


def train(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    make_rows: Callable[[int], Rows],
    make_trainer: Callable[..., Any],
) -> None:
    """Check everything that one process can check alone, then join the others, train and save."""
    launch = read_launch()
    ep_size = options.ep_size or launch.world_size
    try:
        for package in ("transformers", "trl", *(("peft",) if options.lora else ())):
            require_package(package, parser.prog)
        check_processes(options.batch, ep_size, launch.world_size)
        check_run_dir(options.run_dir)
        if options.model is not None:
            check_folder(options.model)
        if launch.world_size > 1:
            check_registry()
            if options.lora:
                check_adapters()
        rows = make_rows(options.seed) if options.data is None else rows_of(options.data)
        device = choose_device("cuda" if torch.cuda.is_available() else "cpu", launch)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{parser.prog}: error: {error}") from None

    from transformers import AutoTokenizer, PrinterCallback

    be_quiet()
    mesh = open_mesh(launch, device, ep_size)
    folder = Path(options.run_dir or mesh.from_main(time.strftime("runs/%Y-%m-%d-%H%M%S")))
    path = options.model or write_toy(folder / "initial", mesh, options.seed)
    model, tokenizer = build(path, mesh, RoundingConfig(mode="off")), AutoTokenizer.from_pretrained(path)
    if options.lora:
        model = add_lora(model, 8, options.seed)
    trainer = make_trainer(options, mesh, model, tokenizer, rows, folder)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    save(model, path, folder, mesh)
    if mesh.is_main:
        tokenizer.save_pretrained(folder / "model")
    say(mesh, f"written to {folder / 'model'}")
    mesh.close()


def check_adapters() -> None:
    """Raise ValueError where Trainer does not average over processes what is not sharded, as adapters."""
    from transformers import Trainer

    if not hasattr(Trainer, "_sync_replicated_trainable_parameters"):
        raise ValueError("--lora in several processes needs the Trainer of transformers 5.24, which averages adapters")


def be_quiet() -> None:
    """No progress bars, and no warnings of what TRL does: names that transformers has renewed, datasets' hashes."""
    from datasets.utils import disable_progress_bars, logging
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    disable_progress_bars()
    logging.set_verbosity_error()
    set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)


def rows_of(file: str) -> Rows:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]


def write_toy(path: Path, mesh: Mesh, seed: int) -> Path:
    """Write a tiny model with random weights, and a tokenizer whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_tiny_model(path, mesh, seed)
    if mesh.is_main:
        words = ["<end>", "<pad>", *map(str, range(VOCABULARY - 2))]
        toy = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>"))
        toy.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=toy, pad_token="<pad>", eos_token="<end>").save_pretrained(path)
    mesh.wait()
    return path


def arguments_of(options: argparse.Namespace, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """What the configs of TRL's trainers have in common."""
    on_gpu = mesh.device.type == "cuda"
    return {
        "output_dir": str(folder),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch // mesh.world.size,
        "learning_rate": options.lr,
        "seed": options.seed,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def figures(mesh: Mesh, *shown: str) -> Any:
    """A callback that prints these of the figures that Trainer logs."""
    from transformers import TrainerCallback

    class Figures(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and shown[0] in logs:
                say(
                    mesh, f"step {state.global_step}: " + ", ".join(f"{name} {float(logs[name]):.3f}" for name in shown)
                )

    return Figures()


if __name__ == "__main__":
    main()
