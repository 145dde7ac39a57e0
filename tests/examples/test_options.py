"""The flags: each mistake named with its limit and its remedy, before any other rank is needed."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from options import Options, check_options, moe_config, parse_options


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch 30", r"--batch 30 does not divide among 4 processes; give 32"),
        ("--ep-size 3", r"--ep-size 3 must divide the 4 processes; give one of \[1, 2, 4\]"),
        ("--ep-size 8", r"--ep-size 8 must divide the 4 processes"),
        ("--ep-size 0", r"--ep-size 0 must divide"),
        ("--steps 0", r"--steps 0 must be at least 1"),
        ("--seq 0", r"--seq 0 must be at least 1"),
        ("--save-every -1", r"--save-every -1 must be at least 0"),
        ("--lr nan", r"--lr nan must be a finite number above 0"),
        ("--layers 0", r"--layers 0 must be at least 1"),
        ("--head-dim 48", r"--head-dim 48 must be even and divide the hidden size d=128"),
        ("--t some", r"--t 'some' must be auto or a whole number"),
        ("--t 24", r"G=128 must be a multiple of rounding.t=24"),
        ("--balance-coef -1", r"balance_coef"),
        ("--compare --rounding off", r"--rounding off is plain top-K; give another mode"),
        ("--run-dir .", r"--run-dir '.' exists and is not empty"),
    ],
)
def test_mistakes(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(parse_options(flags.split()), world_size=4)


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    config = tmp_path / "six.toml"
    config.write_text("[moe]\nd = 32\nn = 16\nE = 6\nK = 2\n")
    with pytest.raises(ValueError, match=r"6 experts .* --ep-size 4; give one of \[1, 2\]"):
        check_options(parse_options(["--config", str(config)]), world_size=4)


def test_unknown_config() -> None:
    with pytest.raises(FileNotFoundError, match="tiny"):
        check_options(parse_options(["--config", "huge"]), world_size=1)


def test_defaults_run_on_1_2_4_and_8_processes() -> None:
    for world_size in (1, 2, 4, 8):
        check_options(parse_options([]), world_size)


def test_flags_change_the_config() -> None:
    assert moe_config(parse_options([])).rounding.mode == "apportion"
    moe = moe_config(parse_options("--rounding nearest --t 32 --balance none".split()))
    assert (moe.rounding.mode, moe.rounding.t) == ("nearest", 32)
    assert (moe.router.balance, moe.router.balance_coef) == ("none", 0.0)
    moe = moe_config(parse_options("--balance batch --balance-coef 0.5".split()))
    assert (moe.router.balance, moe.router.balance_coef) == ("batch", 0.5)


def test_resume_takes_the_options_of_the_run(tmp_path: Path) -> None:
    saved = dataclasses.asdict(Options(steps=7, lr=0.5, rounding="up"))
    (tmp_path / "config.json").write_text(json.dumps({"options": {**saved, "gone_since": 1}}))
    options = parse_options(["--resume", str(tmp_path), "--steps", "9"])
    assert options == Options(steps=9, lr=0.5, rounding="up", resume=str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--layers 3", "--layers 3 is not the resumed run's 4"),
        ("--shared-every 0", "--shared-every 0 is not the resumed run's 2"),
        ("--config olmoe", "--config olmoe is not the resumed run's tiny"),
        ("--dtype float64", "--dtype float64 is not the resumed run's float32"),
    ],
)
def test_resume_keeps_the_model(flags: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"options": dataclasses.asdict(Options())}))
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_options(["--resume", str(tmp_path), *flags.split()])
    assert parse_options(["--resume", str(tmp_path), "--layers", "4"]).layers == 4


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run"):
        parse_options(["--resume", str(tmp_path)])


def test_compare_does_not_resume(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"options": dataclasses.asdict(Options())}))
    with pytest.raises(ValueError, match=r"cannot --resume"):
        check_options(parse_options(["--resume", str(tmp_path), "--compare"]), world_size=1)
