"""Fine-tune a causal language model of Hugging Face transformers with sonic_ep's experts.

    python examples/finetune_transformers.py                   a tiny Qwen3-MoE with random weights
    python examples/finetune_transformers.py --model FOLDER    a model that save_pretrained wrote
    python examples/finetune_transformers.py --trainer         transformers.Trainer instead of our loop
    python examples/finetune_transformers.py --lora            LoRA on experts and attention, through PEFT (fuse_lora)
    python examples/finetune_transformers.py --rounding nearest    experts get multiples of a tile's tokens
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/finetune_transformers.py --ep-size 2
    python examples/finetune_transformers.py --resume runs/2026-01-31-120000

Several processes shard the model by FSDP2, and --ep-size of them divide its experts. On a host with GPUs it runs on
those over NCCL, else on the CPU over gloo. The run folder has what train.py writes, and at the end `model/`, a folder
that transformers loads without us.

Needs the extras transformers and train; several processes need transformers 5.23, --trainer accelerate, --lora PEFT.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from corpus import VOCABULARY, Corpus, load_corpus
from metrics import Stopwatch, loss_record
from options import check_numbers, check_processes, check_run_dir, flag, parse_flags
from parallel import Mesh, choose_device, open_mesh, read_launch
from plots import plot_run
from run_folder import RunFolder, checkpoints_to_resume, save_checkpoint
from sonic_ep.config import RoundingConfig, RoundingMode
from sonic_ep.extras import require_extra
from sonic_ep.optim import clip_grad_norm_
from train import learning_rate, resumed, say, stop_requests
from transformers_model import (
    add_lora,
    average_adapters,
    build,
    by_mesh,
    loss_of,
    save,
    write_tiny_model,
)
from transformers_trainer import newest_checkpoint, train_with_trainer

FIRST_PARALLEL = "5.23"  # the version of transformers that brought its registry for expert parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything a run depends on; written to its config.json."""

    model: str | None = flag(None, "folder of a model (default: a tiny Qwen3-MoE with random weights)", kind=str)
    trainer: bool = flag(False, "train with transformers.Trainer")
    lora: bool = flag(False, "train low-rank adapters of experts and attention alone; with --trainer in one process")
    lora_rank: int = flag(8, "rank of the adapters")
    ep_size: int | None = flag(None, "processes that divide the experts (default: all)", kind=int)
    rounding: str = flag("off", "token rounding mode in training", choices=get_args(RoundingMode))
    t: int = flag(8, "rows that each (process, expert) chunk is a multiple of, with --rounding")

    text: str | None = flag(
        None, "a file or folder to learn from (default: the Python standard library's sources)", kind=str
    )
    steps: int = flag(100, "optimizer steps in all; also the length of the learning-rate schedule")
    batch: int = flag(16, "sequences per step over all processes together")
    seq: int = flag(128, "bytes per sequence")
    lr: float = flag(1e-3, "peak learning rate: linear warm-up, then a cosine down to a tenth")
    warmup: int = flag(10, "steps of warm-up")
    clip: float = flag(1.0, "largest global gradient norm")
    seed: int = flag(0, "seed of the weights and of the order of the data")

    run_dir: str | None = flag(None, "folder of this run (default: runs/<date and time>)", kind=str)
    resume: str | None = flag(
        None, "run folder to continue from its newest checkpoint, with its own options where none are given", kind=str
    )
    save_every: int = flag(40, "steps between checkpoints; 0: one at the end")
    eval_every: int = flag(40, "steps between validations")
    eval_batches: int = flag(8, "batches of one validation, the same ones every time")
    log_every: int = flag(5, "steps between progress lines and records")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything that one process can check alone, then join the others and train."""
    launch = read_launch()
    parser = argparse.ArgumentParser(
        prog="finetune_transformers.py", description="Fine-tune a model of transformers with sonic_ep's experts."
    )
    try:
        require_extra("train", "tqdm", "matplotlib", "tensorboard")
        require_extra("transformers", "transformers")
        options = parse_flags(Options, parser, arguments, of_the_model=("model", "trainer", "lora", "lora_rank"))
        ep_size = launch.world_size if options.ep_size is None else options.ep_size
        check(options, ep_size, launch.world_size)
        device = choose_device("cuda" if torch.cuda.is_available() else "cpu", launch)
        corpus = load_corpus(options.text, seq=options.seq)
        checkpoints = to_resume(options)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise SystemExit(f"finetune_transformers.py: error: {error}") from None

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    mesh = open_mesh(launch, device, ep_size)
    mesh.check_equal("the command line", options)
    mesh.check_equal("the text", corpus.fingerprint())
    folder = Path(options.resume or options.run_dir or mesh.from_main(time.strftime("runs/%Y-%m-%d-%H%M%S")))
    with closing(RunFolder(folder, writes=mesh.is_main)) as run:
        problem = mesh.from_main(run.lock())
        if problem is not None:
            raise SystemExit(f"finetune_transformers.py: error: {problem}")
        path = options.model or write_tiny_model(folder / "initial", mesh, options.seed)
        if options.trainer and not options.lora and checkpoints:
            # Trainer's own loading leaves the experts out: it takes a file's names as they are, one weight per expert.
            path = checkpoints[0]
        model = build(path, mesh, RoundingConfig(mode=options.rounding, t=options.t))  # type: ignore[arg-type]
        if options.lora:
            model = add_lora(model, options.lora_rank, options.seed)
        say(mesh, f"{model.num_parameters():,} parameters; {mesh.world.size} processes on {device.type}")
        say(mesh, f"text: {corpus.source}; byte unigram: {corpus.unigram_bits_per_byte():.3f} bits per byte")
        finished = True
        if options.trainer:
            train_with_trainer(run, options, mesh, model, corpus, checkpoints)
        else:
            finished = train(run, options, mesh, model, corpus, checkpoints)
        if finished:
            save(model, path, folder, mesh)
            say(mesh, f"written to {folder}: metrics, plot, TensorBoard events, checkpoint, model/")
    if mesh.is_main:
        plot_run(folder)
    mesh.close()


def check(options: Options, ep_size: int, world_size: int) -> None:
    """Raise ValueError or ImportError for whatever cannot run. It looks at nothing but this process."""
    check_numbers(
        options,
        above_zero=("lora_rank", "t", "steps", "batch", "seq", "eval_every", "eval_batches", "log_every"),
        not_below_zero=("save_every", "warmup"),
        finite=("lr", "clip"),
    )
    check_processes(options.batch, ep_size, world_size)
    if not options.resume:
        check_run_dir(options.run_dir)
    if options.model is not None:
        check_model(options.model)
    if options.lora:
        require_package("peft", "--lora")
    if options.trainer:
        require_package("accelerate", "--trainer")
    if world_size > 1:
        check_parallel(options)


def check_model(path: str) -> None:
    """Raise ValueError for what is no folder of a model, or of one with too few tokens for bytes."""
    from transformers import AutoConfig

    check_folder(path)
    tokens = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    if tokens < VOCABULARY:
        raise ValueError(f"--model {path!r} has a vocabulary of {tokens}, and bytes need {VOCABULARY}")


def check_folder(path: str) -> None:
    """Raise ValueError for what is no folder of a model, for which transformers would ask the network."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"--model {path!r} is not a folder that save_pretrained wrote: it has no config.json")


def to_resume(options: Options) -> Sequence[Path]:
    """The checkpoints of the run to resume, newest first. Raises ValueError if there is none, or nothing left to do."""
    if options.resume is None:
        return []
    if options.trainer:
        return [newest_checkpoint(Path(options.resume), options.steps)]
    return checkpoints_to_resume(Path(options.resume), options.steps)


def require_package(name: str, flag_name: str) -> None:
    """Raise ImportError for a package that a flag needs and no extra of ours installs."""
    if find_spec(name) is None:
        raise ImportError(f"{flag_name} needs the package {name}; pip install {name}")


def check_parallel(options: Options) -> None:
    """Raise ValueError for what several processes cannot do."""
    check_registry()
    if options.lora and options.trainer:
        raise ValueError("--lora with --trainer trains in one process: Trainer does not average adapters over several")


def check_registry() -> None:
    """Raise ValueError where transformers cannot divide a model among several processes with our experts."""
    import transformers

    from sonic_ep.integrations.transformers.register import has_parallel_registry

    if not has_parallel_registry():
        raise ValueError(
            f"transformers {transformers.__version__} has no registry for expert parallelism, which several processes "
            f"need; pip install 'transformers>={FIRST_PARALLEL}', or start one process"
        )


def train(
    run: RunFolder, options: Options, mesh: Mesh, model: Any, corpus: Corpus, checkpoints: Sequence[Path]
) -> bool:
    """Our own loop, from its first step or the newest checkpoint. Returns False if SIGTERM ended it."""
    groups = [{"params": parameters} for parameters in by_mesh(model.parameters())]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    start = resumed(checkpoints, mesh, model, optimizer) if checkpoints else 0
    run.open(options, None, world_size=mesh.world.size, step=start)
    say(mesh, f"{run.path}: steps {start + 1} to {options.steps}")

    unigram, watch = corpus.unigram_bits_per_byte(), Stopwatch()
    model.train()
    with stop_requests() as stop_requested:
        for step in range(start + 1, options.steps + 1):
            last = step == options.steps or mesh.any(stop_requested.is_set())
            windows = corpus.training_windows(step, seed=options.seed, batch=options.batch, seq=options.seq)
            loss = loss_of(model, mesh.own_rows(windows))
            loss.backward()
            average_adapters(model, mesh)
            norm = float(clip_grad_norm_(model.parameters(), options.clip))
            lr = learning_rate(step, peak=options.lr, warmup=options.warmup, steps=options.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            watch.count(options.batch * options.seq)
            if step % options.log_every == 0 or last:
                figures = {
                    "lr": lr,
                    "grad_norm": norm,
                    "tokens_per_s": watch.tokens_per_second(),
                    "seconds": watch.seconds,
                }
                record = loss_record("train", step, float(mesh.mean(loss.detach())), **figures)
                run.log(record)
                say(mesh, "step {step}: loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s".format(**record))
            with watch.paused():
                if step % options.eval_every == 0 or step == options.steps:
                    loss = evaluate(model, corpus, mesh, options)
                    record = loss_record("validation", step, loss, unigram_bits_per_byte=unigram)
                    run.log(record)
                    bits = record["bits_per_byte"]
                    say(mesh, f"step {step}: validation {bits:.3f} bits per byte (byte unigram {unigram:.3f})")
                if last or (options.save_every and step % options.save_every == 0):
                    save_checkpoint(run.path, mesh, model, optimizer, step)
            if last and step < options.steps:
                say(mesh, f"stopped by SIGTERM after step {step}; go on with --resume {run.path}")
                return False
    return True


@torch.no_grad()
def evaluate(model: Any, corpus: Corpus, mesh: Mesh, options: Options) -> float:
    """Mean validation loss in nats."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for index in range(options.eval_batches):
        windows = corpus.validation_windows(index, batches=options.eval_batches, batch=options.batch, seq=options.seq)
        total += loss_of(model, mesh.own_rows(windows))
    model.train()
    return float(mesh.mean(total)) / options.eval_batches


if __name__ == "__main__":
    main()
