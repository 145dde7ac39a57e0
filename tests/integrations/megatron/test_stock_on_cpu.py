"""The helpers of this folder's tests: stock Megatron-Core trains on the CPU, equally for every division of the work."""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool
from tests.helpers.megatron_cpu import megatron_on_cpu

pytest.importorskip("megatron.core")
STEPS = 4
Curve = list[tuple[Any, ...]]
DIVISIONS: dict[str, dict[str, Any]] = {
    "EP4-distributed": {"expert": 4, "distributed_optimizer": True, "overlap": True},
    "TP2-EP2": {"tensor": 2, "expert": 2},
    "PP2-EP2": {"pipeline": 2, "expert": 2, "distributed_optimizer": True},
}


def train_stock(rank: int, groups: dict[str, int], distributed_optimizer: bool, overlap: bool) -> Curve:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    with parallel_state(**groups):
        spec = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
        run = Run(gpt_config(), spec, distributed_optimizer=distributed_optimizer, overlap=overlap)
        return [tuple(step) for step in run.train(STEPS)]


def train(ranks: Callable[[int], RankPool], division: dict[str, Any]) -> Curve:
    groups = {name: size for name, size in division.items() if name in ("tensor", "pipeline", "expert")}
    flags = [division.get(name, False) for name in ("distributed_optimizer", "overlap")]
    results = ranks(4).run(train_stock, groups, *flags)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def plain(ranks: Callable[[int], RankPool]) -> Curve:
    return train(ranks, {})


def test_it_learns(plain: Curve) -> None:
    assert plain[-1][0] < plain[0][0]


@pytest.mark.parametrize("division", DIVISIONS.values(), ids=list(DIVISIONS))
def test_every_division_of_the_work_gives_the_same_numbers(
    ranks: Callable[[int], RankPool], plain: Curve, division: dict[str, Any]
) -> None:
    for step, wanted in zip(train(ranks, division), plain, strict=True):
        assert step[:2] == pytest.approx(wanted[:2], abs=1e-5)
        assert step[2] == pytest.approx(wanted[2], abs=1e-5)


def threads_after_each(rank: int) -> list[int]:
    threads = []
    for _ in range(3):
        train_stock(rank, {"expert": 2}, distributed_optimizer=True, overlap=True)
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_parallel_state_leaves_no_threads_behind(ranks: Callable[[int], RankPool]) -> None:
    for first, *others in ranks(4).run(threads_after_each):
        assert others == [first, first]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is nothing to put aside")
def test_the_shims_do_not_help_sonic_ep() -> None:
    scope = {"__name__": "sonic_ep.somewhere", "torch": torch}
    with megatron_on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        for call in ("torch.zeros(1, device='cuda')", "torch.zeros(1).cuda()", "torch.cuda.current_stream()"):
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|driver"):
                exec(call, scope)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|driver"):
        torch.zeros(1, device="cuda")
