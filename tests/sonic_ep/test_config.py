"""Configs: every limit is named with the value, TOML round-trips, unknown keys are refused with a suggestion."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from sonic_ep import MoEConfig, RoundingConfig, RouterConfig, TransportConfig, load_config

SIZES: dict[str, Any] = {"d": 64, "n": 32, "E": 16, "K": 4}
INVARIANT: dict[str, Any] = {"batch_invariant": True, "rounding": RoundingConfig(mode="off")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"K": 17}, "K=17 must be in 1..16"),
        ({"K": 0}, "K=0 must be in 1..16"),
        ({"E": 4097}, "E=4097 must be in 1..4096"),
        ({"E": 2}, "K=4 experts per token exceed the E=2 experts there are"),
        ({"d": 0}, "d=0 must be >= 1"),
        ({"d": 64.0}, r"d=64.0 must be an integer >= 1"),
        ({"d": True}, "d=True must be an integer"),
        ({"d": numpy.int64(64)}, r"d=np.int64\(64\) must be an integer >= 1; use int\(\) to make it one"),
        ({"activation": "swish"}, "activation='swish' is not one of swiglu"),
        ({"activation": numpy.ones(2)}, r"activation=array\(\[1., 1.\]\) is not one of swiglu"),
        ({"name": numpy.float32(2)}, r"name=np.float32\(2.0\) must be a string"),
        ({"bias": 1}, "bias=1 must be true or false"),
        ({"init_std": float("nan")}, "init_std=nan must be a finite number >= 0"),
        ({"shared_gate": True}, "shared_gate=True needs a shared expert"),
        ({"K": 1}, "K=1 with router.renormalize=True gives every pair the weight 1.*set router.renormalize=False"),
        ({"router": RouterConfig(num_groups=3)}, "E=16 experts do not divide into router.num_groups=3"),
        ({"router": RouterConfig(num_groups=16)}, "leaves 1 expert a group"),
        ({"router": RouterConfig(num_groups=8)}, "K=4 exceeds the 2 experts in router.groups_per_token=1"),
        ({"batch_invariant": 1}, "batch_invariant=1 must be true or false"),
        (INVARIANT | {"rounding": RoundingConfig()}, "batch_invariant=True with rounding.mode='apportion' and .*'off'"),
        (
            INVARIANT | {"rounding": RoundingConfig(mode="off", capacity_factor=1.5)},
            "batch_invariant=True with .* rounding.capacity_factor=1.5: .*; set mode='off' and capacity_factor=None",
        ),
        (INVARIANT | {"d": 12}, "batch_invariant=True wants d=12 to be a multiple of 8"),
        (INVARIANT | {"shared_n": 4}, "batch_invariant=True wants shared_n=4 to be a multiple of 8"),
        (
            INVARIANT | {"router": RouterConfig(jitter=0.1)},
            "batch_invariant=True with router.jitter=0.1, .*; set it to",
        ),
        (INVARIANT | {"router": RouterConfig(z_loss_coef=0.1)}, "True with router.z_loss_coef=0.1, .*; set it to 0"),
        (
            INVARIANT | {"router": RouterConfig(balance="batch", balance_coef=0.1)},
            "True with router.balance_coef=0.1, which has a gradient that depends on the batch; set it to 0",
        ),
        (
            INVARIANT | {"transport": TransportConfig(kind="symmetric")},
            "batch_invariant=True with transport.kind='symmetric', .*; set kind='auto'",
        ),
    ],
)
def test_limits_of_the_layer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "relu"}, "router.score='relu' is not one of softmax, sigmoid"),
        ({"linear_dtype": "bfloat16"}, "router.linear_dtype='bfloat16' is not one of float32, input"),
        ({"balance": "global"}, "router.balance='global' with router.balance_coef=0.0: set both"),
        ({"balance_coef": 0.1}, "router.balance='none' with router.balance_coef=0.1: set both"),
        ({"jitter": 1.0}, "router.jitter=1.0 must be below 1"),
        ({"z_loss_coef": -1}, "router.z_loss_coef=-1 must be a finite number >= 0"),
        ({"scale": 10**400}, "router.scale=10+ must be a finite number >= 0; write it as a float"),
        ({"scale": 2**63}, "router.scale=9223372036854775808 must be a finite number >= 0; write it as a float"),
        ({"groups_per_token": 2}, "router.groups_per_token=2 must be in 1..1"),
    ],
)
def test_limits_of_the_router(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "round"}, "rounding.mode='round' is not one of apportion, nearest"),
        ({"t": 48}, "rounding.G=128 must be a multiple of rounding.t=48"),
        ({"t": 256}, "rounding.t=256 must be in 1..128"),
        ({"G": 2**62}, r"rounding.G=4611686018427387904 must be in 1..1048576"),
        ({"t": "automatic"}, "rounding.t='automatic' must be an integer in 1..128"),
        ({"t": numpy.ones(2)}, r"rounding.t=array\(\[1., 1.\]\) must be an integer in 1..128"),
        ({"capacity_factor": 0.9}, "rounding.capacity_factor=0.9 must be >= 1"),
        ({"capacity_factor": 1e15}, "rounding.capacity_factor=1000000000000000.0 exceeds 1000000; leave it out"),
    ],
)
def test_limits_of_rounding(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoundingConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"timeout": value}, re.escape(f"transport.timeout={value:g} must be within 0.001 and 1e+06 seconds: "))
            for value in (0, 1e-300, 1e10, 1e300, 10**15)
        ),
        ({"kind": "two_hops"}, "transport.kind='two_hops' is not one of auto, symmetric, all_to_all, two_hop"),
        (
            {"kind": "two_hop", "buffers": "static"},
            "transport.buffers='static' is the symmetric transport's; set transport.kind='symmetric', or buffers",
        ),
        ({"kind": "two_hop", "dispatch": "copy"}, "transport.dispatch='copy' is the symmetric transport's"),
        ({"kind": "two_hop", "ranks_per_host": 0}, "transport.ranks_per_host=0 must be >= 1"),
        ({"ranks_per_host": 2.0}, "transport.ranks_per_host=2.0 must be an integer >= 1"),
        (
            {"kind": "all_to_all", "ranks_per_host": 2},
            "transport.ranks_per_host=2 has no effect on transport.kind='all_to_all'; set transport.kind='two_hop', or",
        ),
    ],
)
def test_limits_of_the_transport(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransportConfig(**arguments)


def test_batch_invariance_follows_the_layer_to_its_transport() -> None:
    config = MoEConfig(**{**SIZES, **INVARIANT})
    assert config.transport.batch_invariant
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert config.replace(batch_invariant=False).transport == TransportConfig()


def test_static_buffers_need_a_bound() -> None:
    static = TransportConfig(buffers="static")
    MoEConfig(**SIZES, transport=static, rounding=RoundingConfig(capacity_factor=1.25))
    with pytest.raises(ValueError, match=r"^transport.buffers='static' needs a bound: set rounding.capacity_factor"):
        MoEConfig(**SIZES, transport=static)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("rounding", None, "rounding=None must be a RoundingConfig; MoEConfig.from_dict takes nested dicts"),
        ("router", {"balance": "global"}, "router={'balance': 'global'} must be a RouterConfig"),
        ("transport", "nccl", "transport='nccl' must be a TransportConfig"),
    ],
)
def test_parts_have_their_types(part: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MoEConfig(**SIZES, **{part: value})
    if not isinstance(value, dict):
        with pytest.raises(ValueError, match=f"^{part}={value!r} must be a table of {part.title()}Config's fields"):
            MoEConfig.from_dict({**SIZES, part: value})


@pytest.mark.parametrize("values", [None, [], "tiny", 3, SIZES.items()])
def test_only_a_dict_is_a_config(values: Any) -> None:
    with pytest.raises(ValueError, match=r"^config=.* must be a dict of MoEConfig's fields, as to_dict returns"):
        MoEConfig.from_dict(values)


def test_keys_that_are_no_names_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"^unknown config key router.1; known keys: score"):
        MoEConfig.from_dict({**SIZES, "router": {1: 2}})


def write(folder: Path, text: str) -> Path:
    path = folder / "layer.toml"
    path.write_text(text)
    return path


def test_toml_gives_the_values_and_the_rest_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, "[moe]\nd = 64\nn = 32\nE = 16\nK = 4\n[router]\nscore = 'sigmoid'\n[rounding]\nt = 16\n")
    wanted = MoEConfig(**SIZES, name="layer", router=RouterConfig(score="sigmoid"), rounding=RoundingConfig(t=16))
    assert load_config(path) == wanted
    assert MoEConfig.from_dict(wanted.to_dict()) == wanted
    assert wanted.replace(K=2).K == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[moe]\nactivaton = 'silu'\n",
            "unknown config key activaton; did you mean activation",
        ),
        (
            "[router]\nscores = 1\n",
            "unknown config key router.scores; did you mean router.score",
        ),
        ("[rounding]\nzzz = 1\n", "unknown config key rounding.zzz; known keys: mode, t, G"),
        ("[moe]\nd = 64\nn = 32\n", "config lacks E, K, which have no default; give them, in TOML under"),
        ("[layer]\nd = 64\n", r"unknown table \[layer\]"),
        ("moe = 3\n", r"moe=3 in .*layer.toml must be a table \[moe\]"),
        ("[moe]\nd = \n", r"layer.toml is no TOML: Invalid value"),
        (f"[moe]\nd = {'9' * 5000}\n", r"layer.toml is no TOML: Exceeds the limit"),
        (
            f"[moe]\nd = {'[' * 5000}{']' * 5000}\n",
            "layer.toml nests tables or lists too deeply; the fields of a config",
        ),
        (f"[router]\nscore{'.a' * 5000} = 1\n", "layer.toml nests tables or lists too deeply"),
    ],
)
def test_wrong_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, text))


def test_toml_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "layer.toml").write_bytes("[moe]\nd = 64  # größer\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"layer.toml is no TOML: 'utf-8' codec can't decode byte 0xf6"):
        load_config(path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match=r"no config 'gpt9'.*mixtral_8x7b.*tiny"):
        load_config("gpt9")


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config("tiny").K = 3  # type: ignore[misc]
