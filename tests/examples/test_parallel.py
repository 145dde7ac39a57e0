"""Gradient synchronisation and clipping against the gradients of the whole batch, worked out by hand."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel import Launch, choose_device, form_groups, sync_gradients
from sonic_ep.optim import clip_grad_norm_
from tests.helpers.launch import RankPool

WORLD_SIZE = 4


def sync_and_clip(rank: int, ep_size: int, max_norm: float) -> SimpleNamespace:
    """Rank r's own loss has gradient r + 1 on the dense weight and 10 * e * (r + 1) on expert e."""
    mesh = form_groups(torch.device("cpu"), ep_size)
    model = nn.Module()
    model.dense = nn.Parameter(torch.zeros(2))
    model.low = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    model.unused = nn.Parameter(torch.zeros(1))
    local = WORLD_SIZE // ep_size
    expert_ids = torch.arange(WORLD_SIZE).view(ep_size, local)[mesh.ep.rank]
    model.experts = nn.Parameter(torch.zeros(local, 1))
    vars(model.experts).update(allreduce=False, ep_group_name=mesh.ep.name)  # as those of a layer have
    model.dense.grad = torch.full((2,), rank + 1.0)
    model.low.grad = torch.full((1,), rank + 1.0, dtype=torch.bfloat16)
    members = range(rank // ep_size * ep_size, rank // ep_size * ep_size + ep_size)
    model.experts.grad = 10.0 * expert_ids[:, None] * sum(member + 1 for member in members)
    sync_gradients(model, mesh)
    found = SimpleNamespace(
        dense=model.dense.grad.tolist(), low=model.low.grad.tolist(), unused=model.unused.grad.tolist()
    )
    found.experts = dict(zip(expert_ids.tolist(), model.experts.grad.flatten().tolist(), strict=True))
    found.norm = float(clip_grad_norm_(model.parameters(), max_norm))
    found.clipped = model.dense.grad.tolist()
    return found


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [1.0, 1000.0])
def test_sync_and_clip(ranks: Callable[[int], RankPool], ep_size: int, max_norm: float) -> None:
    mean = (1 + 2 + 3 + 4) / 4
    experts = {expert: 10 * expert * mean for expert in range(WORLD_SIZE)}
    norm = math.sqrt(3 * mean**2 + sum(gradient**2 for gradient in experts.values()))
    for found in ranks(WORLD_SIZE).run(sync_and_clip, ep_size, max_norm):
        assert found.dense == [mean, mean]
        assert found.low == [mean]
        assert found.unused == [0.0]
        assert found.experts == {expert: experts[expert] for expert in found.experts}
        assert found.norm == pytest.approx(norm, rel=1e-6)
        assert found.clipped == pytest.approx([mean * min(1, max_norm / norm)] * 2, rel=1e-5)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    four = Launch(rank=3, world_size=4, local_rank=3, local_world_size=4)
    assert choose_device("auto", four) == torch.device("cpu")
    with pytest.raises(ValueError, match="4 processes, 2 GPUs"):
        choose_device("cuda", four)
    two = Launch(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert choose_device("auto", two) == torch.device("cuda", 1)
    assert choose_device("cpu", two) == torch.device("cpu")
