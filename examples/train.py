"""Train a small MoE language model over any number of processes.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train.py     (what `make train` runs)
    python examples/train.py --steps 50                                                   one process
    ... examples/train.py --compare                    plain top-K and token rounding from the same seed, side by side
    ... examples/train.py --resume runs/<folder>       go on from the newest checkpoint, exactly

SIGTERM ends a run after the present step, with a checkpoint.
All processes form one expert-parallel group unless --ep-size says otherwise: attention and the other dense weights are
on every rank, each rank owns E / ep_size experts per layer, and tokens travel to their experts inside `sonic_ep.MoE`.
On a host with a GPU per process it runs on those over NCCL, else on the CPU over gloo.
`--help` lists the flags. The files beside this one do one thing each: corpus, language_model, parallel, run_folder, ...
"""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from corpus import Corpus, load_corpus
from language_model import LanguageModel, next_byte_loss
from metrics import BITS_PER_NAT, Stopwatch, comparison_table, expert_load, routing_record
from options import Options, check_options, model_config, parse_options
from parallel import Mesh, choose_device, open_mesh, read_launch, sync_gradients
from plots import plot_comparison, plot_run
from run_folder import RunFolder, checkpoints_to_resume, load_newest, save_checkpoint
from sonic_ep import RoutingStats
from sonic_ep.extras import require_extra
from sonic_ep.optim import clip_grad_norm_, parameter_groups

FINAL_LR = 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    """Check everything that one process can check alone, then join the others and train."""
    launch = read_launch()
    try:
        require_extra("train", "tqdm", "matplotlib", "tensorboard")
        options = parse_options(arguments)
        check_options(options, launch.world_size)
        device = choose_device(options.device, launch)
        corpus = load_corpus(options.text, seq=options.seq)
        checkpoints = checkpoints_to_resume(Path(options.resume), options.steps) if options.resume else []
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise SystemExit(f"train.py: error: {error}") from None
    if options.check:
        return

    mesh = open_mesh(launch, device, launch.world_size if options.ep_size is None else options.ep_size)
    mesh.check_equal("the command line", options)
    mesh.check_equal("the text", corpus.fingerprint())
    folder = Path(options.resume or options.run_dir or mesh.from_main(time.strftime("runs/%Y-%m-%d-%H%M%S")))
    say(
        mesh,
        f"processes: {mesh.world.size} on {describe_device(options, device)}, experts divided among {mesh.ep.size}",
    )
    say(mesh, f"text: {corpus.source}; byte unigram: {corpus.unigram_bits_per_byte():.3f} bits per byte")
    if options.compare:
        compare(options, mesh, corpus, folder)
    else:
        train(options, mesh, corpus, folder, checkpoints)
    mesh.close()


def describe_device(options: Options, device: torch.device) -> str:
    """The device, and why it is not a GPU where there are some."""
    idle = torch.cuda.device_count() if options.device == "auto" and device.type == "cpu" else 0
    return f"cpu (this host has {idle} GPUs, fewer than processes)" if idle else device.type


def say(mesh: Mesh, text: str) -> None:
    """Print on rank 0, above the progress bar if there is one."""
    if mesh.is_main:
        from tqdm import tqdm

        tqdm.write(text)


def compare(options: Options, mesh: Mesh, corpus: Corpus, folder: Path) -> None:
    """The same model, data and seed twice: plain top-K, then token rounding."""
    runs = {"top-K": folder / "topk", "rounding": folder / "rounding"}
    options = dataclasses.replace(options, compare=False)  # either is a run that can be resumed alone
    train(dataclasses.replace(options, rounding="off"), mesh, corpus, runs["top-K"])
    train(options, mesh, corpus, runs["rounding"])
    if mesh.is_main:
        table = comparison_table(runs)
        (folder / "comparison.txt").write_text(table + "\n")
        plot_comparison(runs, folder / "comparison.png")
        say(mesh, f"\n{table}\n\nplot: {folder / 'comparison.png'}")


def train(options: Options, mesh: Mesh, corpus: Corpus, folder: Path, checkpoints: Sequence[Path] = ()) -> None:
    """One run from its first step, or from the first checkpoint that is intact, to its last."""
    with closing(RunFolder(folder, writes=mesh.is_main)) as run:
        problem = mesh.from_main(run.lock())
        if problem is not None:
            raise SystemExit(f"train.py: error: {problem}")
        train_in(run, options, mesh, corpus, checkpoints)
    if mesh.is_main:
        plot_run(folder)


def train_in(run: RunFolder, options: Options, mesh: Mesh, corpus: Corpus, checkpoints: Sequence[Path]) -> None:
    """The run in its folder, which is locked."""
    folder, config = run.path, model_config(options)
    mesh.set_limits(config.moe.transport)
    torch.manual_seed(1_000_003 * options.seed + mesh.world.rank)  # jitter is drawn from it, on each rank its own
    model = LanguageModel(
        config,
        seq=options.seq,
        group=mesh.ep,
        seed=options.seed,
        device=mesh.device,
        dtype=getattr(torch, options.dtype),
    )
    optimizer = make_optimizer(model, options)
    start = resumed(checkpoints, mesh, model, optimizer) if checkpoints else 0
    run.open(options, config.moe, world_size=mesh.world.size, step=start)
    unigram = corpus.unigram_bits_per_byte()
    say(mesh, f"{folder}: steps {start + 1} to {options.steps}, rounding {config.moe.rounding.mode}")

    watch = Stopwatch()
    from tqdm import tqdm

    bar = tqdm(total=options.steps, initial=start, unit="step", disable=None if mesh.is_main else True)
    with stop_requests() as stop_requested:
        for step in range(start + 1, options.steps + 1):
            last = step == options.steps or mesh.any(stop_requested.is_set())
            windows = corpus.training_windows(step, seed=options.seed, batch=options.batch, seq=options.seq)
            result = training_step(model, optimizer, mesh.own_rows(windows), mesh, options, step)
            watch.count(options.batch * options.seq)
            bar.update()
            if step % options.log_every == 0 or last:
                record = training_record(result, mesh, step, watch)
                run.log(record)
                bar.set_postfix_str(progress_text(record))
            with watch.paused():
                if step % options.eval_every == 0 or step == options.steps:
                    loss = evaluate(model, corpus, mesh, options)
                    run.log(validation_record(loss, unigram, step, expert_load(result.stats, mesh)))
                    bits = loss * BITS_PER_NAT
                    say(mesh, f"step {step}: validation {bits:.3f} bits per byte (byte unigram {unigram:.3f})")
                if last or (options.save_every and step % options.save_every == 0):
                    save_checkpoint(folder, mesh, model, optimizer, step)
            if last and step < options.steps:
                say(mesh, f"stopped by SIGTERM after step {step} of {options.steps}; go on with --resume {folder}")
                break
    bar.close()
    say(mesh, f"{watch.seconds:.0f} s of training; written to {folder}: metrics, plot, TensorBoard events, checkpoint")


def resumed(checkpoints: Sequence[Path], mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer, and return the step to go on from. Exits if no checkpoint is intact."""
    try:
        start, damaged = load_newest(list(checkpoints), mesh, model, optimizer)
    except ValueError as error:
        raise SystemExit(f"error: no checkpoint can be read: {error}") from None
    for problem in damaged:
        say(mesh, f"{problem}: going on from the checkpoint before it, step {start}")
    return start


@contextmanager
def stop_requests() -> Generator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield requested
        return
    before = signal.signal(signal.SIGTERM, lambda *_: requested.set())
    try:
        yield requested
    finally:
        signal.signal(signal.SIGTERM, before)


def autocast(mesh: Mesh, options: Options) -> torch.autocast:
    """The arithmetic that options.precision asks for."""
    fits = mesh.device.type == "cuda" and options.dtype == "float32"
    wanted = options.precision == "bfloat16" or (options.precision == "auto" and fits)
    return torch.autocast(mesh.device.type, torch.bfloat16, enabled=wanted)


def make_optimizer(model: LanguageModel, options: Options) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and biases alone."""
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to FINAL_LR of the peak at the last step."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step leaves to be reported; tensors stay on the device until somebody reads them."""

    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor
    lr: float
    stats: list[RoutingStats]


def training_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    windows: Tensor,
    mesh: Mesh,
    options: Options,
    step: int,
) -> StepResult:
    """Forward, backward, gradients of the global batch, update; `windows` are this rank's rows of the batch."""
    with autocast(mesh, options):
        output = model(windows[:, :-1])
    loss = next_byte_loss(output, windows)
    (loss + output.aux_loss).backward()

    sync_gradients(model, mesh)
    grad_norm = clip_grad_norm_(model.parameters(), options.clip)
    lr = learning_rate(step, peak=options.lr, warmup=options.warmup, steps=options.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    for moe in model.moe_layers():
        if moe.config.router.expert_bias:
            moe.update_expert_bias(mesh.expert_data)
    return StepResult(loss.detach(), output.aux_loss.detach(), grad_norm, lr, output.stats)


def training_record(result: StepResult, mesh: Mesh, step: int, watch: Stopwatch) -> dict[str, object]:
    """One training line of metrics.jsonl, over all ranks. A collective."""
    loss, aux_loss = mesh.mean(torch.stack((result.loss, result.aux_loss))).tolist()
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "bits_per_byte": loss * BITS_PER_NAT,
        "aux": aux_loss,
        "lr": result.lr,
        "grad_norm": float(result.grad_norm),
        "tokens_per_s": watch.tokens_per_second(),
        "seconds": watch.seconds,
        **routing_record(result.stats, mesh),
    }


def validation_record(loss: float, unigram: float, step: int, load: list[list[float]]) -> dict[str, object]:
    """One validation line of metrics.jsonl; the load is that of the training step just before."""
    return {
        "kind": "validation",
        "step": step,
        "loss": loss,
        "bits_per_byte": loss * BITS_PER_NAT,
        "unigram_bits_per_byte": unigram,
        "expert_load": load,
    }


def progress_text(record: dict[str, object]) -> str:
    return (
        "loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s, changed {changed_share:.1%}, "
        "load max/mean: rank {rank_load_max_over_mean:.2f} expert {expert_load_max_over_mean:.2f}"
    ).format(**record)


@torch.no_grad()
def evaluate(model: LanguageModel, corpus: Corpus, mesh: Mesh, options: Options) -> float:
    """Mean validation loss in nats. In eval mode every MoE layer is plain top-K, whatever training does."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for index in range(options.eval_batches):
        windows = mesh.own_rows(
            corpus.validation_windows(index, batches=options.eval_batches, batch=options.batch, seq=options.seq)
        )
        with autocast(mesh, options):
            output = model(windows[:, :-1])
        total += next_byte_loss(output, windows)
    model.train()
    return float(mesh.mean(total)) / options.eval_batches


if __name__ == "__main__":
    main()
