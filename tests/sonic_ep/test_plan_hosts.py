"""`sonic-ep plan --hosts`: bytes against those of a layer, the choice of a transport, and what is printed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, cli, load_config
from sonic_ep.cli.load import BALANCED
from sonic_ep.cli.plan import Kind, Layout, sent_bytes
from sonic_ep.cli.plan_hosts import Cluster, Option, best_of, memory_of, options_of, transports_on
from sonic_ep.cli.time_model import host_ms
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.transports import GroupTransport
from tests.helpers.launch import RankPool

T = 24
CONFIG = load_config("qwen3_30b_a3b")


def sent_by_a_layer(rank: int, kind: Kind, saves: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Two imitated hosts of two ranks. Every token needs every rank, so that expected rows are exact."""
    transport = TransportConfig(kind=kind, ranks_per_host=2 if kind == "two_hop" else None)  # type: ignore[arg-type]
    rounding = RoundingConfig(mode="off")
    config = MoEConfig(d=16, n=4, E=4, K=4, save_dispatched=saves, rounding=rounding, transport=transport)
    layer = MoE(config, EPGroup(), seed=0)
    x = torch.randn(T, config.d, requires_grad=True)
    assert isinstance(layer.transport, GroupTransport)
    used = layer.transport.on(x)
    assert isinstance(used, AllToAllTransport | TwoHopTransport)
    counters = [used.wire_bytes]
    if isinstance(used, TwoHopTransport):
        counters.append(used.bytes_across_hosts)
    before = [Counter(each) for each in counters]  # other layers of this process may have the same transport
    layer(x).y.sum().backward()
    sent, *remote = (dict(Counter(now) - then) for now, then in zip(counters, before, strict=True))
    return sent, remote[0] if remote else {}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kind", ["two_hop", "all_to_all"])
def test_bytes_of_a_layer(ranks: Callable[[int], RankPool], kind: Kind, saves: bool) -> None:
    planned = sent_bytes(MoEConfig(d=16, n=4, E=4, K=4, save_dispatched=saves), T, Layout(4, 2), kind, 4)
    for sent, remote in ranks(4).run(sent_by_a_layer, kind, saves):
        assert {name: sent[name] for name in planned} == {name: sum(pair) for name, pair in planned.items()}
        if remote:
            assert {name: remote[name] for name in planned} == {name: pair[1] for name, pair in planned.items()}


def test_bytes_that_the_interfaces_of_imitated_hosts_counted() -> None:
    """docs/multi_host.md: two hosts of two ranks; T=256, d=512, fp32, K=6 of 16 experts; 10 dispatches and combines."""
    config = MoEConfig(d=512, n=8, E=16, K=6)
    for kind, of_a_host in (("two_hop", 20_910_080), ("all_to_all", 37_150_720)):
        combine = sent_bytes(config, 256, Layout(4, 2), kind, 4)["combine"][1] / 2  # type: ignore[arg-type]
        assert combine * 20 * 2 == pytest.approx(of_a_host, rel=2e-3)


def test_transports_of_a_layout() -> None:
    assert transports_on(Layout(8, 8)) == ("symmetric", "all_to_all", "pairs")
    assert transports_on(Layout(16, 8)) == ("two_hop", "all_to_all", "pairs")
    assert transports_on(Layout(16, 1)) == ("all_to_all", "pairs")


def test_memory_of_two_hops() -> None:
    """By docs/memory.md: 8 bytes more a row of hop 1, prefix sums of the rows that hop 1 brings, and two buffers, in
    which each of 8 ranks of a host has room for 5/4 of the 2048 rows from each of 4 hosts."""
    layout = Layout(32, 8, 45)
    more = sum(memory_of(CONFIG, 8192, layout, "two_hop", 3).values())
    more -= sum(memory_of(CONFIG, 8192, layout, "all_to_all", 3).values())
    assert more == 3 * (12 * round(8192 * 3.6290109244257005) + 4) + 2 * 8 * 10_240 * 4096
    assert memory_of(CONFIG, 8192, Layout(8, 8), "symmetric", 1)["buffers over symmetric memory"] > 0


def test_the_device_or_the_host_sets_the_pace() -> None:
    few, many = (options_of(CONFIG, T, Cluster(4, 8, 32, 45), BALANCED) for T in (64, 8192))
    assert {each.step_ms for each in few if each.transport == "two_hop"} == {host_ms("two_hop")}
    assert all(each.step_ms == each.device_ms for each in many)


def test_the_best_option() -> None:
    def option(kind: Kind, saves: bool, step_ms: float, memory: int) -> Option:
        return Option(kind, saves, {}, {}, step_ms, 0.0, step_ms, step_ms, {}, {"all": memory})

    slow, fast, large = (
        option("all_to_all", False, 10.0, 2**30),
        option("two_hop", False, 8.0, 2**31),
        option("two_hop", True, 7.95, 2**32),
    )
    other = option("pairs", False, 1.0, 0)
    assert best_of([slow, fast, large, other], None) is fast  # large is faster by less than a percent
    assert best_of([slow, fast._replace(step_ms=8.1), large, other], None) is large
    assert best_of([slow, fast, large, other], 1.5) is slow
    assert best_of([slow, fast, large, other], 0.5) is None


ARGUMENTS = ("plan", "--config", "qwen3_30b_a3b", "--tokens", "8192", "--hosts", "4", "--link", "45")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main([*ARGUMENTS, *arguments])
    return capsys.readouterr().out


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--layers", "48", "--gpu-memory", "80")
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert "tokens a rank: 8192; 4 hosts of 8 GPUs; EP groups of 32 ranks on 4 hosts" in words
    assert "to ranks of other hosts 5.52" in words
    assert "to other hosts, once each 2.72" in words
    assert "two_hop all_to_all pairs" in words
    assert "rounding apportion, t=128, G=128" in words
    assert words[-1] == "best: two_hop, save_dispatched=True, t=128"
    assert printed(capsys, "--gpu-memory", "0.1").endswith("no transport fits the memory\n")


def test_the_lines_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    shown = text.partition("$ sonic-ep plan")[2].partition("\n\n")[0].splitlines()[1:]
    lines = printed(capsys).splitlines()
    assert len(shown) > 8
    assert [line for line in shown if line.removeprefix("    ") not in ("...", *lines)] == []


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan: dict[str, Any] = json.loads(printed(capsys, "--json", "--ranks", "16", "--skew", "0"))
    assert (plan["ranks"], plan["gpus_per_host"], plan["link_gb_s"]) == (16, 8, 45)
    assert plan["rounding"] == {"mode": "apportion", "t": 128}
    assert plan["load"]["pairs"] < 1.05
    assert plan["best"] == {"transport": "two_hop", "save_dispatched": True}
    for option in plan["options"]:
        total = sum(sum(option[f"{way}_ms"].values()) for way in ("forward", "backward"))
        assert option["device_ms"] == pytest.approx(total)
        assert option["balanced_step_ms"] <= option["step_ms"]
    one_host = json.loads(printed(capsys, "--json", "--ranks", "8"))
    assert [option["transport"] for option in one_host["options"][::2]] == ["symmetric", "all_to_all", "pairs"]
    assert one_host["link_gb_s"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "0"), "--hosts 0 must be at least 1"),
        (("--hosts", "1", "--ranks", "1"), "--ranks 1: a rank alone sends nothing; leave out --hosts"),
        (("--gpus-per-host", "6"), "E=128 experts cannot be divided over 24 ranks"),
        (("--ranks", "64"), "--ranks 64 does not fit 4 hosts of 8 GPUs"),
        (("--gpus-per-host", "6", "--ranks", "4"), "--ranks 4 does not fit 4 hosts of 6 GPUs: give a divisor of 24"),
        *(
            (("--link", link), f"--link {link} must be 0.001 to 1,000,000, the GB/s that a GPU sends to other hosts")
            for link in ("0", "-1", "nan", "inf")
        ),
        *((("--skew", skew), f"--skew {skew} must be 0 to 64") for skew in ("-1", "nan", "inf", "65")),
        (("--hosts", str(2**20), "--ranks", "8"), "--hosts 1048576 of 8 GPUs: more than 1,048,576; use fewer"),
        (("--dtype", "float32"), "--dtype float32: times are known for bfloat16 and float16"),
        (("--tokens", "0"), "--tokens 0 must be at least 1"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=f"sonic-ep: error: {message}"):
        cli.main([*ARGUMENTS, *arguments])


def test_several_hosts_need_a_link() -> None:
    with pytest.raises(SystemExit, match="--link is missing: give the GB/s that a GPU sends to other hosts"):
        cli.main(["plan", "--config", "tiny", "--tokens", "64", "--hosts", "2"])


def test_json_needs_hosts() -> None:
    with pytest.raises(SystemExit, match="--json is for plans of several hosts: give --hosts"):
        cli.main(["plan", "--config", "tiny", "--tokens", "64", "--json"])
