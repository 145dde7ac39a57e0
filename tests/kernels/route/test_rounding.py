"""The decision's kernel decides bit for bit what routers/rounding.py does, in every mode, with and without capacity."""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonic_ep.config import RoundingConfig
from sonic_ep.kernels.backend import _implementation, runs_triton
from sonic_ep.kernels.route.rounding import reference
from sonic_ep.routers.rounding import CHUNK_MULTIPLES, round_counts, rule_of
from sonic_ep.routing import GroupCounts
from tests.helpers.poison import poisoned_empty
from tests.helpers.triton_device import triton_device
from tests.helpers.waiting import assert_nothing_waits
from tests.routers.rounding_cases import MODES, Case, assert_same, cases

DEVICE = triton_device()
KERNEL: Any = import_module("sonic_ep.kernels.route.rounding.triton")


def check(chosen: Any, tokens: Any, rounding: RoundingConfig, seed: int = 0) -> None:
    chosen_SE, tokens_S = torch.as_tensor(chosen), torch.as_tensor(tokens)
    rule = rule_of(rounding, *chosen_SE.shape)
    reports = torch.cat([tokens_S[:, None], chosen_SE], 1).to(DEVICE)  # columns of what was gathered
    with poisoned_empty():
        got = KERNEL.apply_rule(reports[:, 1:], reports[:, 0], torch.tensor(seed, device=DEVICE), rule)
    rows_SE, pairs_SE, cut_S, t = (values.cpu() for values in got)
    counts = GroupCounts(chosen_SE, rows_SE, pairs_SE, tokens_S, cut_S, t)
    assert_same(counts, round_counts(chosen_SE, tokens_S, rounding, seed=seed))
    assert {values.dtype for values in got} == {torch.int64}


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    case=cases(max_ranks=5),
    mode=st.sampled_from(MODES),
    factor=st.sampled_from([None, 1.0, 1.3]),
    seed=st.integers(0, 2**31 - 1),
    auto=st.booleans(),
)
def test_any_counts(case: Case, mode: Any, factor: float | None, seed: int, auto: bool) -> None:
    rounding = RoundingConfig(mode=mode, t="auto" if auto else case.t, G=case.G, capacity_factor=factor)
    check(case.chosen, case.tokens, rounding, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("ep_size", "E"), [(1, 128), (8, 128), (3, 96)])
def test_layers(ep_size: int, E: int, mode: Any) -> None:
    generator = torch.Generator().manual_seed(E)
    chosen_SE = (torch.rand(ep_size, E, generator=generator) * torch.rand(E, generator=generator) ** 3 * 4000).long()
    for factor in (None, 1.2):
        check(chosen_SE, [4000] * ep_size, RoundingConfig(mode=mode, capacity_factor=factor), seed=11)


def test_every_t_of_auto_and_padding() -> None:
    seen = set()
    for tokens in (40, 290, 400, 700, 1280):
        chosen_SE = torch.randint(tokens, (4, 16), generator=torch.Generator().manual_seed(tokens))
        check(chosen_SE, [tokens] * 4, RoundingConfig())
        seen.add(int(round_counts(chosen_SE, torch.full((4,), tokens), RoundingConfig()).t))
    assert seen == set(CHUNK_MULTIPLES)


@pytest.mark.parametrize(
    ("chosen", "t", "rows", "pairs"),
    [
        ((20, 29), 16, [32, 32], [20, 29]),
        ((20, 30), 16, [32, 32], [32, 32]),  # apportioned
        ((50, 49), 16, [48, 48], [48, 48]),
        ((51, 49), 32, [64, 32], [64, 32]),
    ],
)
@pytest.mark.parametrize("apply", [reference.apply_rule, KERNEL.apply_rule], ids=["reference", "kernel"])
def test_at_50_pairs_padding_ends_and_at_100_t_grows(
    apply: Any, chosen: tuple[int, int], t: int, rows: list[int], pairs: list[int]
) -> None:
    rule = reference.RoundingRule("apportion", G=32, t=16, thresholds=((100, 32),), pads_below=50, capacity=None)
    chosen_SE = torch.tensor([[each, 0] for each in chosen], device=DEVICE)
    tokens_S, seed = torch.tensor([1000, 1000], device=DEVICE), torch.tensor(0, device=DEVICE)
    rows_SE, pairs_SE, _, got_t = apply(chosen_SE, tokens_S, seed, rule)
    assert int(got_t) == t
    assert rows_SE[:, 0].tolist() == rows
    assert pairs_SE[:, 0].tolist() == pairs


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("ep_size", "E"), [(1, 4096), (64, 4096), (128, 512), (8, 512)])
def test_large_groups(ep_size: int, E: int) -> None:
    for mode in MODES:
        chosen_SE = torch.randint(0, 3000, (ep_size, E)) * (torch.rand(ep_size, E) < 0.7)
        for factor in (None, 1.0):
            check(chosen_SE, [3000] * ep_size, RoundingConfig(mode=mode, capacity_factor=factor), seed=5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_router_decides_by_kernel_and_nothing_waits() -> None:
    assert (
        _implementation("route.rounding", "apply_rule", runs_triton(torch.empty(0, device="cuda"))) is KERNEL.apply_rule
    )
    chosen_SE, tokens_S = torch.randint(0, 3000, (8, 128), device="cuda"), torch.full((8,), 3000, device="cuda")
    assert_nothing_waits(lambda: round_counts(chosen_SE, tokens_S, RoundingConfig(capacity_factor=1.5)))
