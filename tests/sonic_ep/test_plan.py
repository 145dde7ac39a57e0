"""`sonic-ep plan`: its numbers against a layer's, and what it prints. test_functional.py has what a layer saves."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, cli
from sonic_ep.cli.plan import (
    Layout,
    Sizes,
    balanced_sizes,
    expert_parameters,
    saved_bytes,
    sent_bytes,
    symmetric_buffers,
)
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.transports import GroupTransport
from tests.helpers.launch import RankPool

T = 24


def test_sizes_of_balanced_routing() -> None:
    config = MoEConfig(d=8, n=4, E=4, K=2)
    # Of 6 pairs of experts, 5 need the rank with two of them.
    assert balanced_sizes(config, 600, 2) == Sizes(600, 2, U=1000, R=1000, V=1200, P=1200)
    assert balanced_sizes(config, 600, 1) == Sizes(600, 1, U=600, R=600, V=1200, P=1200)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_parameters(activation: str, bias: bool) -> None:
    config = MoEConfig(d=16, n=8, E=8, K=2, activation=activation, bias=bias)  # type: ignore[arg-type]
    assert expert_parameters(config, 1) == sum(p.numel() for p in MoE(config, seed=0).experts.parameters())
    assert expert_parameters(config, 4) * 4 == expert_parameters(config, 1)


def sent_by_a_layer(rank: int, saves: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Every token needs every rank, so that balanced sizes are exact."""
    config = MoEConfig(d=16, n=8, E=4, K=4, save_dispatched=saves, rounding=RoundingConfig(mode="off"))
    group = EPGroup()
    layer = MoE(config, group, seed=0)
    x = torch.randn(T, config.d, requires_grad=True)
    assert isinstance(layer.transport, GroupTransport)
    transport = layer.transport.on(x)
    assert isinstance(transport, AllToAllTransport)
    before = Counter(transport.wire_bytes)  # other layers of this process may have the same transport
    layer(x).y.sum().backward()
    planned = sent_bytes(config, T, Layout(group.size, group.size), "all_to_all", 4)
    return dict(Counter(transport.wire_bytes) - before), {name: sum(pair) for name, pair in planned.items()}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_bytes_between_ranks(ranks: Callable[[int], RankPool], ep_size: int, saves: bool) -> None:
    for sent, planned in ranks(ep_size).run(sent_by_a_layer, saves):
        assert {name: sent[name] for name in planned} == planned


def test_over_symmetric_memory() -> None:
    """By docs/memory.md and docs/transports.md, in bf16: T=10, S=2, P=V=30, J=8, d=16, e=2."""
    config = MoEConfig(d=16, n=4, E=4, K=3)
    sizes = Sizes(10, 2, U=18, R=18, V=30, P=30)
    rows = 2 * 10
    lists = 16 * 30 + 4 * (rows + 1) + 4 * (2 + 1) + 4 * 2 * 10 + 4 * 2 + 4 * 4
    assert saved_bytes(config, sizes, 2, "symmetric") == {"x": 320, "H": 480, "lists": lists}
    saving = config.replace(save_dispatched=True)
    assert saved_bytes(saving, sizes, 2, "symmetric")["received rows"] == rows * 32
    assert symmetric_buffers(config, sizes, 2) == 3 * 2 * 10 * 32 + 25 * 30


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    cli.main(["plan", *arguments])
    lines = [line.strip().split("  ") for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[-1].strip() for words in lines if len(words) > 1}


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--config", "qwen3_30b_a3b", "--tokens", "8192", "--ranks", "8", "--layers", "48")
    found = printed(capsys, *arguments, "--gpu-memory", "80")
    assert found["rounding"] == "apportion, t=128, G=128"
    assert found["assignments changed, predicted"] == "6.5%"
    assert found["pairs a rank computes"] == "65,536"
    assert found["a layer saves, H"] == "198.0 MiB"
    assert found["in all"] == "68,096.6 MiB"
    assert found["left for the rest of the model"] == "13,823.4 MiB of 80 GiB"
    assert printed(capsys, *arguments, "--gpu-memory", "48")["left for the rest of the model"].endswith("too little")
    alone = printed(capsys, "--config", "tiny", "--tokens", "64")
    assert "buffers over symmetric memory" not in alone
    assert printed(capsys, "--config", "tiny", "--tokens", "64", "--ranks", "4")["rounding"] == "none, padded to 16"


TINY = ("--config", "tiny", "--tokens", "64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "tiny", "--tokens", "64", "--ranks", "3"), "E=16 experts cannot be divided over 3 ranks"),
        (("--config", "tiny", "--tokens", "0"), "--tokens 0 must be at least 1"),
        (("--config", "gpt9", "--tokens", "64"), "no config 'gpt9'"),
        *(
            ((*TINY, "--gpu-memory", memory), f"--gpu-memory {memory} must be 0.001 to 1,000,000, the GiB of a GPU")
            for memory in ("inf", "nan", "-1", "0")
        ),
        *(
            ((*TINY, option, "4"), f"{option} is for plans of several hosts: give --hosts")
            for option in ("--gpus-per-host", "--link", "--skew")
        ),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=f"sonic-ep: error: {message}"):
        cli.main(["plan", *arguments])
