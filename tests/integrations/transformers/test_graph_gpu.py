"""A step of a model of transformers in a CUDA graph: replays with other tokens and weights equal eager steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig
from tests.helpers.hugging_face import batches, model_of, quiet
from tests.helpers.launch import RankPool
from tests.helpers.waiting import assert_nothing_waits
from tests.helpers.whole_steps import DIVIDED, STATIC, causal_mask, gradients, model_with, step

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

Gpus = Callable[[int], RankPool]
LENGTH, REPLAYS, WARM_UP = 64, 5, 3
TOLERANCE = 1 / 64  # of the largest value: attention's backward adds in no fixed order, in bfloat16
SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.05,
}
ROUNDED = RoundingConfig(t=16, G=32, capacity_factor=1.5)
ROUNDINGS = pytest.mark.parametrize("rounding", [None, ROUNDED], ids=["every pair", "rounded"])


class Captured:
    """A graph of the step of a model, and the places of its token ids, loss and gradients.

    The steps before the capture make buffers, compile kernels and show rounding the router's weights. They and the
    eager steps after it run on the stream of the capture, as the gradients' accumulation does.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.mask = model, ids.clone(), causal_mask(ids, torch.bfloat16)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self.eager(ids)
        self.stream.synchronize()
        model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # Not "global": threads of NCCL may ask the driver meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            loss = step(model, self.ids, self.mask)
        self.places = {"loss": loss, **gradients(model)}

    def eager(self, ids: Tensor) -> dict[str, Tensor]:
        """A step by transformers' and our code. Its gradients are the model's."""
        self.ids.copy_(ids)
        self.model.zero_grad(set_to_none=True)
        loss = step(self.model, self.ids, self.mask)
        return {"loss": loss, **gradients(self.model)}

    def replay(self, ids: Tensor) -> dict[str, Tensor]:
        self.ids.copy_(ids)
        self.graph.replay()
        return {name: place.clone() for name, place in self.places.items()}


def saved_model(path: Path) -> Path:
    model_of("qwen3_moe", dtype=torch.bfloat16, **SHAPE).save_pretrained(path)  # type: ignore[operator]
    return path


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Says of each result by how much it is off, if it is."""
    found = [f"{name} is missing" for name in wanted.keys() ^ got.keys()]
    for name in wanted.keys() & got.keys():
        error, largest = (got[name] - wanted[name]).abs().max().item(), wanted[name].abs().max().item()
        if not error <= TOLERANCE * largest:
            found.append(f"{name}: {error:.3g} of {largest:.3g}, {error / max(largest, 1e-30):.1%}")
    return found


def replayed(rank: int, path: Path, how: str | None, rounding: RoundingConfig | None) -> tuple[list[str], list[float]]:
    """What differs between replays and eager steps, while tokens and weights change; and the losses of replays."""
    problems, losses = [], []
    # transformers takes the device of this number, and RankPool gives a GPU a rank.
    with quiet(), patch.dict(os.environ, LOCAL_RANK=str(rank)):
        model = model_with(path, "cuda", how, STATIC, rounding)
        # All ranks of a TP group have the same tokens.
        own = [ids.cuda() for ids in batches(0 if how == "tp" else rank, REPLAYS + 1, sequences=4, length=LENGTH)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        captured = Captured(model, own[0])
        with torch.cuda.stream(captured.stream):
            for number, ids in enumerate(own[1:]):
                replay, eager = captured.replay(ids), captured.eager(ids)
                problems += [f"replay {number}: {text}" for text in differences(replay, eager)]
                losses.append(replay["loss"].item())
                optimizer.step()  # in place, by the eager step's gradients
        torch.cuda.synchronize()
        del captured, model, optimizer
    return problems, losses


def check(problems: list[str], losses: list[float]) -> None:
    assert problems == []
    assert len(set(losses)) == len(losses), f"replays do not see their tokens: {losses}"


@ROUNDINGS
def test_a_step_of_one_gpu(rounding: RoundingConfig | None, tmp_path: Path) -> None:
    check(*replayed(0, saved_model(tmp_path), None, rounding))


@ROUNDINGS
@pytest.mark.parallel_registry
@pytest.mark.parametrize("how", DIVIDED)
def test_a_step_over_two_gpus(how: str, rounding: RoundingConfig | None, gpus: Gpus, tmp_path: Path) -> None:
    """ "experts": no FSDP. "fsdp", "tp": NCCL's collectives are in the graph, too."""
    for problems, losses in gpus(2).run(replayed, saved_model(tmp_path), how, rounding, timeout=600):
        check(problems, losses)


def waiting(rank: int, path: Path, rounding: RoundingConfig | None) -> None:
    with quiet(), patch.dict(os.environ, LOCAL_RANK=str(rank)):
        model = model_with(path, "cuda", "experts", STATIC, rounding)
        ids = batches(rank, 1, sequences=4, length=LENGTH)[0].cuda()
        mask = causal_mask(ids, torch.bfloat16)
        assert_nothing_waits(lambda: step(model, ids, mask))


@ROUNDINGS
@pytest.mark.parallel_registry
def test_an_eager_step_never_waits(rounding: RoundingConfig | None, gpus: Gpus, tmp_path: Path) -> None:
    gpus(2).run(waiting, saved_model(tmp_path), rounding, timeout=600)
