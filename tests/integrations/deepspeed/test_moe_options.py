"""Every argument of DeepSpeed's layer is honoured or warned of, and the guide says which."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed.moe.layer import MoE as StockMoE

from sonic_ep.integrations.deepspeed import MoE
from sonic_ep.integrations.deepspeed.moe_options import OPTIONS, table
from tests.helpers.deepspeed_moe import DROPLESS, GatedMLP

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def build(**arguments: Any) -> MoE:
    return MoE(16, GatedMLP(), **{"num_experts": 4, "k": 2, **DROPLESS, **arguments})


def test_the_arguments_are_deepspeeds() -> None:
    stock = list(inspect.signature(StockMoE.__init__).parameters.values())
    ours = list(inspect.signature(MoE.__init__).parameters.values())
    assert [(each.name, each.default) for each in ours[: len(stock)]] == [(each.name, each.default) for each in stock]
    assert [each.name for each in ours[len(stock) :]] == ["options"]
    assert sorted(option.name for option in OPTIONS) == sorted(each.name for each in stock[1:])


def test_dropless_arguments_need_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build()
        build(noisy_gate_policy="Jitter", use_residual=True)
        build(noisy_gate_policy="None", k=1, top2_2nd_expert_sampling=True)
        build(noisy_gate_policy="RSample", k=1, enable_expert_tensor_parallelism=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drop_tokens", True),
        ("capacity_factor", 1.25),
        ("eval_capacity_factor", 2.0),
        ("min_capacity", 0),
        ("use_rts", False),
        ("noisy_gate_policy", "RSample"),
        ("use_tutel", True),
    ],
)
def test_what_has_no_effect_is_said(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"without effect in sonic_ep's MoE: {name}={value!r}"):
        build(**{name: value})


def test_deepspeeds_defaults_are_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            MoE(16, GatedMLP(), num_experts=4, k=2)
    (warning,) = caught
    assert "drop_tokens=True" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noisy_gate_policy": "Gauss"}, "noisy_gate_policy='Gauss' is none of .* set one of None, None, Jitter"),
        ({"num_experts": [4, 8]}, r"num_experts=\[4, 8\] must be an integer in 1..4096; give every layer its own"),
        ({"ep_size": 3}, "num_experts=4 is not a multiple of ep_size=3"),
        ({"k": 5}, "k=5 experts a token exceed num_experts=4"),
        ({"k": 17, "num_experts": 32}, r"k=17 must be an integer in 1\.\.16"),
        ({"k": True}, "k=True must be an integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_the_guide_has_the_table_of_arguments() -> None:
    printed = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = printed.index(table()[0])
    assert printed[start : start + len(table())] == table(), "\n" + "\n".join(table())
