"""The flags of examples/train.py: one dataclass, one line per flag, and the checks that need no other rank.

`parse_flags` and the checks with a public name serve the flags of the other examples too.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from language_model import ModelConfig
from sonic_ep.config import Balance, MoEConfig, RoundingMode, load_config


def flag(default: Any, text: str, *, kind: type | None = None, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field that is also a command-line flag; `kind` says the type where the default is None."""
    return field(default=default, metadata={"help": text, "kind": kind or type(default), "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything a run depends on; written to its config.json."""

    config: str = flag("tiny", "MoE layer: a name from configs/ or the path of a .toml file")
    layers: int = flag(4, "transformer blocks")
    head_dim: int = flag(32, "width of one attention head; divides the config's d")
    shared_every: int = flag(2, "every N-th block has a shared expert; 0: as the config says, in all blocks alike")
    rounding: str | None = flag(
        None,
        "token rounding mode, off for plain top-K (default: the config's)",
        kind=str,
        choices=get_args(RoundingMode),
    )
    t: str | None = flag(
        None, "rows that each (rank, expert) chunk is a multiple of, or auto (default: the config's)", kind=str
    )
    balance: str | None = flag(
        None,
        "load-balancing loss per sequence, rank batch or EP group (default: the config's)",
        kind=str,
        choices=get_args(Balance),
    )
    balance_coef: float | None = flag(None, "weight of the load-balancing loss (default: the config's)", kind=float)

    text: str | None = flag(
        None, "a file or folder to learn from (default: the Python standard library's sources)", kind=str
    )
    steps: int = flag(240, "optimizer steps in all; also the length of the learning-rate schedule")
    batch: int = flag(32, "sequences per step over all processes together")
    seq: int = flag(128, "bytes per sequence")
    lr: float = flag(3e-3, "peak learning rate: linear warm-up, then a cosine down to a tenth")
    warmup: int = flag(40, "steps of warm-up")
    weight_decay: float = flag(0.1, "AdamW's weight decay, on matrices only")
    clip: float = flag(1.0, "largest global gradient norm")
    seed: int = flag(0, "seed of the weights and of the order of the data")

    ep_size: int | None = flag(None, "processes that share one set of experts (default: all)", kind=int)
    device: str = flag(
        "auto", "auto: one GPU per process if there are enough, else the CPU", choices=("auto", "cpu", "cuda")
    )
    dtype: str = flag(
        "float32",
        "of weights and optimizer state; float64 to compare runs closely",
        choices=("float32", "bfloat16", "float64"),
    )

    precision: str = flag(
        "auto",
        "arithmetic: bfloat16 by autocast, or that of the weights; auto: bfloat16 for float32 weights on a GPU",
        choices=("auto", "bfloat16", "weights"),
    )

    run_dir: str | None = flag(None, "folder of this run (default: runs/<date and time>)", kind=str)
    resume: str | None = flag(
        None, "run folder to continue from its newest checkpoint, with its own options where none are given", kind=str
    )
    check: bool = flag(False, "check the options and the text, and exit")
    compare: bool = flag(False, "train plain top-K and token rounding from the same seed; print and plot both")
    save_every: int = flag(40, "steps between checkpoints; 0: one at the end")
    eval_every: int = flag(40, "steps between validations, always plain top-K")
    eval_batches: int = flag(8, "batches of one validation, the same ones every time")
    log_every: int = flag(5, "steps between records in metrics.jsonl")


_OF_THE_MODEL = ("config", "layers", "head_dim", "shared_every", "dtype")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. With --resume, what it leaves out comes from the resumed run, the model always."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a small MoE language model with expert parallelism and token rounding.",
    )
    return parse_flags(Options, parser, arguments, of_the_model=_OF_THE_MODEL)


_Flags = TypeVar("_Flags")


def parse_flags(
    kind: type[_Flags],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    of_the_model: Sequence[str],
) -> _Flags:
    """Read flags into a dataclass with fields by `flag`, among them `resume`: a run folder with defaults of its own.

    of_the_model: the fields that a resumed run cannot change. Raises ValueError where the command line does.
    """
    entries = fields(kind)  # type: ignore[arg-type]
    for entry in entries:
        name = "--" + entry.name.replace("_", "-")
        shown = "" if entry.default is None or entry.default is False else f" (default: {entry.default})"
        about = {"help": entry.metadata["help"] + shown, "default": entry.default}
        if entry.metadata["kind"] is bool:
            parser.add_argument(name, action="store_true", **about)
        else:
            parser.add_argument(name, type=entry.metadata["kind"], choices=entry.metadata["choices"], **about)
    given = parser.parse_args(arguments)
    if given.resume is None:
        return kind(**vars(given))
    saved = saved_options(Path(given.resume), {entry.name for entry in entries})
    parser.set_defaults(**saved)
    given = parser.parse_args(arguments)
    for name in of_the_model:
        if getattr(given, name) != saved.get(name, getattr(given, name)):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(given, name)} is not the resumed run's {saved[name]}, whose "
                "checkpoint holds that model; leave it out, or start a new run"
            )
    return kind(**vars(given))


def saved_options(run: Path, known: set[str]) -> dict[str, Any]:
    """The options that a run was started with, of those `known` by name."""
    file = run / "config.json"
    if not file.is_file():
        raise ValueError(f"--resume {str(run)!r} is not the folder of a run: it has no config.json")
    return {name: value for name, value in json.loads(file.read_text())["options"].items() if name in known}


def model_config(options: Options) -> ModelConfig:
    """The model that the options describe. Raises ValueError, or FileNotFoundError for an unknown config."""
    return ModelConfig(
        moe=moe_config(options),
        layers=options.layers,
        head_dim=options.head_dim,
        shared_every=options.shared_every,
    )


def moe_config(options: Options) -> MoEConfig:
    """The config file's MoE layer with the flags' changes."""
    moe = load_config(options.config)
    rounding, router = moe.rounding, moe.router
    if options.rounding is not None:
        rounding = dataclasses.replace(rounding, mode=options.rounding)
    if options.t is not None:
        rounding = dataclasses.replace(rounding, t=_chunk_multiple(options.t))
    if options.balance is not None or options.balance_coef is not None:
        balance = router.balance if options.balance is None else options.balance
        coef = router.balance_coef if options.balance_coef is None else options.balance_coef
        router = dataclasses.replace(router, balance=balance, balance_coef=0.0 if balance == "none" else coef)
    return moe.replace(rounding=rounding, router=router)


def _chunk_multiple(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"--t {text!r} must be auto or a whole number of rows")
    return text if text == "auto" else int(text)


def check_options(options: Options, world_size: int) -> None:
    """Raise ValueError for whatever cannot run. It looks at nothing but this process, so every rank raises alike."""
    check_numbers(
        options,
        above_zero=("steps", "batch", "seq", "eval_every", "eval_batches", "log_every"),
        not_below_zero=("save_every", "warmup", "weight_decay"),
        finite=("lr", "clip"),
    )
    experts = model_config(options).moe.E
    ep_size = world_size if options.ep_size is None else options.ep_size
    check_processes(options.batch, ep_size, world_size)
    if experts % ep_size:
        raise ValueError(
            f"the {experts} experts of --config {options.config} do not divide among --ep-size {ep_size}; "
            f"give one of {[size for size in _divisors(world_size) if experts % size == 0]}"
        )
    _check_run(options)


def check_numbers(
    options: object, *, above_zero: Sequence[str], not_below_zero: Sequence[str], finite: Sequence[str]
) -> None:
    """Raise ValueError for a flag below its limit. Those in `finite` are above 0 too."""
    for limit, names in ((1, above_zero), (0, not_below_zero)):
        for name in names:
            _check_at_least(limit, name, getattr(options, name))
    for name in finite:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} {value} must be a finite number above 0")


def check_processes(batch: int, ep_size: int, world_size: int) -> None:
    """Raise ValueError for a batch or an EP group that does not divide the processes."""
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(
            f"--ep-size {ep_size} must divide the {world_size} processes; give one of {_divisors(world_size)}"
        )
    if batch % world_size:
        higher = -(-batch // world_size) * world_size
        raise ValueError(f"--batch {batch} does not divide among {world_size} processes; give {higher}")


def _check_at_least(limit: int, name: str, value: float) -> None:
    if not value >= limit:
        raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {limit}")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_run(options: Options) -> None:
    if options.compare and options.resume:
        raise ValueError("--compare trains two runs from the start and cannot --resume one; resume either one alone")
    if options.compare and moe_config(options).rounding.mode == "off":
        raise ValueError(
            "--compare sets token rounding beside plain top-K, and --rounding off is plain top-K; give another mode"
        )
    if not options.resume:
        check_run_dir(options.run_dir)


def check_run_dir(run_dir: str | None) -> None:
    """Raise ValueError for a folder of a new run that is not empty."""
    folder = Path(run_dir) if run_dir else None
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--run-dir {run_dir!r} exists and is not empty; give another, or --resume it")
