"""A step of a model of transformers with static buffers: what a CUDA graph of it needs, without a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sonic_ep import RoundingConfig, TransportConfig
from tests.helpers.host_reads import as_if_captured, noted_step
from tests.helpers.hugging_face import batches, model_of, quiet
from tests.helpers.launch import RankPool
from tests.helpers.whole_steps import DIVIDED, STATIC, causal_mask, gradients, model_with, step

pytest.importorskip("transformers")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

Ranks = Callable[[int], RankPool]
LENGTH = 6
ROUNDED = RoundingConfig(t=4, G=8, capacity_factor=1.25)


def saved_model(path: Path) -> Path:
    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(path)  # type: ignore[operator]
    return path


def steps_of(rank: int, path: Path, folder: str, how: str | None, rounding: RoundingConfig | None) -> dict[str, Any]:
    """Losses and gradients of exact and of static buffers, and what the static steps read and launched."""
    from tests.helpers.static_buffers import static_buffers_in

    found: dict[str, Any] = {"exact": [], "static": [], "reads, exact": [], "reads, static": [], "launches": []}
    of_gpus = patch("sonic_ep.routers.route.allows_spare_capacity", lambda _: True)  # of lists that rounding makes
    own = batches(0 if how == "tp" else rank, 5, length=LENGTH)
    mask = causal_mask(own[0], torch.float32)
    with quiet():
        for name, transport in (("exact", TransportConfig()), ("static", STATIC)):
            static = name == "static"
            model = model_with(path, "cpu", how, transport, rounding)
            with static_buffers_in(folder) if static and how is not None else nullcontext(), of_gpus:
                for ids in own[:2]:
                    step(model, ids, mask)
                for ids in own[2:]:
                    model.zero_grad()
                    with as_if_captured() if static else nullcontext(), noted_step() as noted:
                        loss = step(model, ids, mask)
                    found[name].append({"loss": loss, **gradients(model)})
                    found[f"reads, {name}"] += noted.reads
                    if static:
                        found["launches"].append(noted.launches)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["reads, static"] == []
    first, *others = found["launches"]
    for launches in others:
        differing = [pair for pair in zip(first, launches, strict=False) if pair[0] != pair[1]]
        assert differing == []
        assert len(first) == len(launches)
    torch.testing.assert_close(found["static"], found["exact"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounding", [None, ROUNDED], ids=["every pair", "rounded"])
@pytest.mark.parametrize("how", DIVIDED)
@pytest.mark.parallel_registry
def test_a_step_over_two_ranks(how: str, rounding: RoundingConfig | None, ranks: Ranks, tmp_path: Path) -> None:
    path = saved_model(tmp_path / "model")
    for found in ranks(2).run(steps_of, path, str(tmp_path), how, rounding, timeout=600):
        check(found)
        assert len(found["reads, exact"]) >= 2 * len(found["exact"])  # of sizes, in each of two layers


def test_a_step_of_one_rank(tmp_path: Path) -> None:
    check(steps_of(0, saved_model(tmp_path), "", None, None))
