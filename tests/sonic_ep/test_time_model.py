"""The time model against our records of 2, 4 and 8 GPUs: within 15 %, but for the cases below, which say why not.

Not compared, since a launching host sets their pace and has changed since: what starts on an idle device ("all_to_all",
"symmetric" and "symmetric, static" of ep_layer), the layers in other engines (deepspeed_layer, megatron_layer) and the
steps of a model with attention (training_step, pretrain).
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.fit_time_model import PLAIN, record
from sonic_ep import MoEConfig, load_config
from sonic_ep.cli.expected_rows import rows_per_token
from sonic_ep.cli.load import BALANCED, Load
from sonic_ep.cli.plan import Kind, Layout, rounding_tile
from sonic_ep.cli.time_constants import CONSTANTS
from sonic_ep.cli.time_model import (
    ITEM_BYTES,
    exchange_us,
    host_ms,
    sent_features,
    stages,
    us,
)

TOLERANCE = 0.15
LAYERS = ("router_2_ranks", "4_ranks", "tokens_4_ranks", "8_ranks")

LAUNCHES = "the host has not launched all of a short layer when the device needs it"
SIZES = "the host waits for sizes of exact buffers; static ones are met"
WAITS = "the host waited for 0.8 ms more for sizes than in any other record"
OLDER = "8 ranks, older kernels: copies that the model hides behind GEMMs took 0.4 ms of their own"
SMALL = "short exchanges through NCCL took 110 to 178 us, in no order of size"
SLOW = "slower than its neighbours in the same record: 200 against 250 GB/s to other ranks"
SUMS = "the busiest rank has most pairs and most rows; the model adds both up"
SKEWED = "the model takes the busiest link for the limit; it is 16 to 19 % above"

UNMET_LAYERS = {
    "tokens_4_ranks qwen3_30b_a3b 1024 symmetric, behind a backlog forward": SIZES,
    "tokens_4_ranks qwen3_30b_a3b 1024 symmetric, with router forward": SIZES,
    "tokens_4_ranks qwen3_30b_a3b 1024 symmetric, static, with router forward": LAUNCHES,
    "tokens_4_ranks qwen3_30b_a3b 1024 symmetric, graph forward": LAUNCHES,
    "8_ranks sonic_7b 8192 symmetric, behind a backlog forward": SIZES,
    "8_ranks qwen3_30b_a3b 8192 all_to_all, behind a backlog forward": WAITS,
    "8_ranks qwen3_30b_a3b 8192 symmetric, with router backward": OLDER,
    "8_ranks qwen3_30b_a3b 8192 symmetric, static, with router backward": OLDER,
    "8_ranks qwen3_30b_a3b 8192 symmetric, graph backward": OLDER,
    "8_ranks qwen3_next_80b_a3b 8192 symmetric, behind a backlog backward": OLDER,
    "8_ranks qwen3_next_80b_a3b 8192 symmetric, static, behind a backlog backward": OLDER,
    "8_ranks qwen3_next_80b_a3b 8192 symmetric, with router backward": OLDER,
    "8_ranks qwen3_next_80b_a3b 8192 symmetric, static, with router backward": OLDER,
    "8_ranks qwen3_next_80b_a3b 8192 symmetric, graph backward": OLDER,
}
UNMET_EXCHANGES = {
    "2 ranks, d=7168, T=1024, skew 0: all_to_all, dedup, combine": SMALL,
    "4 ranks, d=2048, T=1024, skew 0: all_to_all, dedup, combine": SMALL,
    "2 ranks, d=4096, T=8192, skew 0: all_to_all, pairs, dispatch": SLOW,
    "2 ranks, d=4096, T=8192, skew 0: all_to_all, pairs, combine": SLOW,
    "4 ranks, d=4096, T=8192, skew 0: all_to_all, pairs, dispatch": SLOW,
    "4 ranks, d=4096, T=8192, skew 0: all_to_all, pairs, combine": SLOW,
    "4 ranks, d=2048, T=32768, skew 0: all_to_all, pairs, combine": SLOW,
    "4 ranks, d=2048, T=8192, skew 2: all_to_all, dedup, dispatch": SKEWED,
    "4 ranks, d=4096, T=8192, skew 2: all_to_all, pairs, dispatch": SKEWED,
    "8 ranks, d=2048, T=8192, skew 2: all_to_all, pairs, dispatch": SKEWED,
} | {
    f"{S} ranks, d={d}, T=8192, skew 2: symmetric, {dispatch}, combine": SUMS
    for S, d in ((4, 2048), (4, 4096), (4, 7168), (8, 2048), (8, 7168))
    for dispatch in ("push", "copy")
}


def within(modelled: float, measured: float) -> bool:
    return abs(modelled / measured - 1) <= TOLERANCE


def layers() -> Iterator[tuple[str, float, float]]:
    """Yields a case's name, modelled and measured milliseconds, behind a backlog: rested clocks, the host in front."""
    for name in LAYERS:
        found = record(f"ep_layer_{name}_h200.json")
        for case in found["cases"]:
            for contestant, times in case["times"].items():
                if contestant in ("all_to_all", "symmetric", "symmetric, static"):
                    continue
                router = "with router" in contestant
                config = load_config(case["shape"]).replace(shared_n=0, shared_gate=False)
                kind: Kind = "all_to_all" if "all_to_all" in contestant else "symmetric"
                layout = Layout(found["ranks"], found["ranks"])
                config = config if router else config.replace(rounding=PLAIN)
                modelled = stages(config, case["T"], layout, kind, sustained=False, router=router, overlap="nothing")
                for way, each in zip(("forward", "backward"), modelled, strict=True):
                    label = f"{name} {case['shape']} {case['T']} {contestant} {way}"
                    yield label, sum(each.values()), times[f"{way}_ms"]


@functools.cache
def counted(S: int, skew: float) -> dict[str, float]:
    """Returns rows of a token, drawn as in benchmarks/across_ranks.py: of the busiest rank, and the mean."""
    if skew == 0:
        rows = rows_per_token(MoEConfig(d=8, n=8, E=128, K=8), S, S)
        return {"sent": rows.local_ranks, "rows": rows.ranks, "sent_pairs": rows.local_pairs, "pairs": 8}
    generator = torch.Generator().manual_seed(0)
    T = 2**16
    scores_TE = torch.randn(T, 128, generator=generator) + torch.linspace(0, skew, 128)
    ranks_TK = scores_TE.topk(8).indices // (128 // S)
    rows_S = torch.zeros(T, S).scatter_(1, ranks_TK, 1.0).mean(0)
    pairs = float(torch.bincount(ranks_TK.flatten(), minlength=S).max()) / T
    sent = {"sent": float(rows_S.max()) * (S - 1), "sent_pairs": pairs * (S - 1)}
    return {**sent, "rows": float(rows_S.sum()), "pairs": pairs * S}


def exchanges() -> Iterator[tuple[str, float, float]]:
    """Yields a case's name, modelled and measured microseconds, of benchmarks/dispatch.py."""
    least = CONSTANTS["least exchange"].values
    for S in (2, 4, 8):
        for case in record(f"dispatch_{S}_ranks_h200.json")["cases"]:
            row_mb = case["T"] * case["d"] * ITEM_BYTES / 1e6
            mb = {name: count * row_mb for name, count in counted(S, case["skew"]).items()}
            sums = us("combine_push", (*sent_features(S, mb["sent"]), mb["pairs"]))
            dedup, pairs = (
                [exchange_us(f"{way}{of}", mb[sent], 0, handled, 1) for way in ("dispatch", "combine")]
                for of, sent, handled in (("", "sent", mb["rows"]), (" of pairs", "sent_pairs", 8 * row_mb))
            )
            modelled = {
                "symmetric, push": (us("push", sent_features(S, mb["sent"])), sums),
                "symmetric, copy": (us("copy", (1, (S - 1) * row_mb)), sums),
                "all_to_all, dedup": [max(pair) for pair in zip(least, dedup, strict=True)],
                "all_to_all, pairs": pairs,
            }
            for contestant, times in modelled.items():
                for way, t in zip(("dispatch", "combine"), times, strict=True):
                    label = f"{S} ranks, d={case['d']}, T={case['T']}, skew {case['skew']:g}: {contestant}, {way}"
                    yield label, t, case["times"][contestant][f"{way}_us"]


@pytest.mark.parametrize(("cases", "unmet", "least"), [(layers, UNMET_LAYERS, 200), (exchanges, UNMET_EXCHANGES, 200)])
def test_records(cases: Any, unmet: dict[str, str], least: int) -> None:
    """Every case that is not listed is met, and every one that is listed is not."""
    found = {name: (modelled, measured) for name, modelled, measured in cases()}
    assert len(found) >= least
    off = {name: pair for name, pair in found.items() if not within(*pair)}
    assert off.keys() == unmet.keys(), {name: off.get(name) for name in off.keys() ^ unmet.keys()}


def test_sustained_steps_of_two_gpus() -> None:
    """Eager and back to back, on H100s: what the device takes, or the host, if that is more."""
    for name, case in record("sustained_2_gpus.json")["cases"].items():
        sizes = case["sizes"]
        for contestant in ("off, symmetric", "apportion, symmetric", "apportion, symmetric, static", "off, all_to_all"):
            kind: Kind = "all_to_all" if "all_to_all" in contestant else "symmetric"
            config = load_config(name.split(":")[0]).replace(E=sizes["E"], K=sizes["K"])
            config = config.replace(rounding=PLAIN) if "off" in contestant else config
            modelled = max(stages(config, sizes["T"], Layout(2, 2), kind).step_ms, host_ms(kind))
            assert within(modelled, case["contestants"][contestant]["step"]), (name, contestant, modelled)


CONFIG = load_config("qwen3_30b_a3b")


@pytest.mark.parametrize("name", ["two_hop_4_gpus", "two_hop_memory_4_gpus"])
def test_one_link_explains_both_ways_between_two_hosts(name: str) -> None:
    """Four GPUs as two hosts: the link at which the all-to-all takes what was measured, and two hops over it."""
    (case,) = record(f"{name}.json")["cases"].values()
    measured, config = case["contestants"], CONFIG.replace(rounding=PLAIN)

    def step(kind: Kind, link: float) -> float:
        return stages(config, case["sizes"]["T"], Layout(4, 2, link), kind).step_ms

    wanted = measured["off, all_to_all"]["step"]
    link = min((tenths / 10 for tenths in range(10, 100)), key=lambda link: abs(step("all_to_all", link) - wanted))
    assert within(step("all_to_all", link), wanted)
    assert within(step("two_hop", link), measured["off, two_hop"]["step"]), (link, step("two_hop", link))


def of_dispatch(kind: Kind, link: float, load: Load = BALANCED) -> dict[str, float]:
    forward = stages(CONFIG, 8192, Layout(32, 8, link), kind, load=load).forward
    return {name: ms for name, ms in forward.items() if name.startswith("dispatch")}


def test_a_slow_link_is_all_that_counts() -> None:
    """At 1 GB/s rows take their bytes; 8192 tokens of 4096 bytes, rows by rows_per_token."""
    rows, row_mb = rows_per_token(CONFIG, 32, 8), 8192 * 4096 / 1e6
    assert of_dispatch("pairs", 1)["dispatch"] == pytest.approx(6 * row_mb, rel=0.02)
    assert of_dispatch("all_to_all", 1)["dispatch"] == pytest.approx(rows.remote_ranks * row_mb, rel=0.02)
    two_hop = of_dispatch("two_hop", 1)
    assert list(two_hop) == ["dispatch across hosts", "dispatch within a host"]
    assert two_hop["dispatch across hosts"] == pytest.approx(rows.remote_hosts * row_mb, rel=0.02)
    assert two_hop["dispatch within a host"] == of_dispatch("two_hop", 45)["dispatch within a host"]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("link", [0.5, 5, 45, 500, 5000])
def test_exchanges_behind_the_experts(link: float, saved: bool) -> None:
    """Between what the longer of both takes and their sum; x before dX, and dW1 after x."""
    config, layout = CONFIG.replace(save_dispatched=saved), Layout(32, 8, link)
    now = stages(config, 8192, layout, "all_to_all").backward
    before = stages(config, 8192, layout, "all_to_all", overlap="nothing").backward
    exchanges = before.get("dispatch of x", 0) + before["combine of dX"]
    gemms = sum(now[name] for name in ("down_backward", "up_backward", "weight_down", "weight_up"))
    took = sum(now.values()) - now["dispatch of dO"] - now["router"] - now["sum of pairs"]
    assert max(gemms, exchanges) <= (took + now["sum of pairs"]) * (1 + 1e-9)
    assert took <= (gemms + exchanges) * (1 + 1e-9)
    assert sum(now.values()) <= sum(before.values()) * 8 / 7
    if link <= 5 and not saved:  # the link never rests
        last = now["dispatch of dO"] + exchanges + now["router"]
        assert sum(now.values()) == pytest.approx(last)


def test_hops_that_overlap() -> None:
    layout = Layout(32, 8, 45)
    two, at_once = (stages(CONFIG, 8192, layout, "two_hop", overlap=how) for how in ("experts", "experts and hops"))
    hops = [two.forward[f"dispatch {where}"] for where in ("across hosts", "within a host")]
    assert at_once.forward["dispatch"] == max(hops)
    assert at_once.step_ms < two.step_ms - min(hops)


def test_loads_make_the_stage_slower_that_they_are_of() -> None:
    even, hosts, rows = (of_dispatch("two_hop", 1, load) for load in (BALANCED, Load(hosts=2), Load(rows=2)))
    across, within_host = "dispatch across hosts", "dispatch within a host"
    assert hosts[across] == pytest.approx(2 * even[across], rel=0.02)
    assert (hosts[within_host], rows[across]) == (even[within_host], even[across])
    assert rows[within_host] > 1.4 * even[within_host]
    slow = stages(CONFIG, 8192, Layout(8, 8), "symmetric", load=Load(gpu=1.5))
    base = stages(CONFIG, 8192, Layout(8, 8), "symmetric")
    assert slow.forward["up"] == pytest.approx(1.5 * base.forward["up"])
    assert slow.forward["dispatch"] == base.forward["dispatch"]


def test_symmetric_memory_is_for_one_host() -> None:
    with pytest.raises(ValueError, match="symmetric memory is for one host, not 4; take two_hop or all_to_all"):
        stages(CONFIG, 8192, Layout(32, 8, 45), "symmetric")


def test_saved_rows_and_shared_experts() -> None:
    saving, layout = CONFIG.replace(save_dispatched=True), Layout(32, 8, 45)
    again, saved = (stages(config, 8192, layout, "two_hop").backward for config in (CONFIG, saving))
    assert again["dispatch of x, not hidden"] > saved["dispatch of x, not hidden"] == 0
    assert again["up_backward"] == pytest.approx(saved["up_backward"] * 8 / 7)  # it leaves SMs to the exchange of x
    assert again["weight_up"] == saved["weight_up"]
    before = [stages(config, 8192, layout, "two_hop", overlap="nothing").backward for config in (CONFIG, saving)]
    assert before[0].keys() - before[1].keys() == {"dispatch of x across hosts", "dispatch of x within a host"}
    shared = stages(CONFIG.replace(shared_n=768), 8192, layout, "two_hop")
    assert 1.9 < shared.backward["shared expert"] / shared.forward["shared expert"] < 2.4


@pytest.mark.parametrize(("mode", "tile"), [("apportion", 128), ("pad", None), ("off", None)])
def test_rounding_tile(mode: Any, tile: int | None) -> None:
    config = CONFIG.replace(rounding=CONFIG.rounding.__class__(mode=mode))
    assert rounding_tile(config, 8192, 8) == tile
    assert rounding_tile(config, 64, 8) is None
