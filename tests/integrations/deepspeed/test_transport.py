"""How rows travel is an option of the MoE layer; static buffers give the same results as exact ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig, TransportConfig
from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
T, K = 24, 2
STATIC = TransportConfig(kind="symmetric", buffers="static")


def layer_of(rank: int, transport: TransportConfig) -> Any:
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    options = SonicEPOptions(rounding=RoundingConfig(t=8, G=16, capacity_factor=1.25), transport=transport)
    model = Model(True, ep_size=2, k=K, options=options)
    scatter_experts(model, rank % 2)
    layer = model.layers[0]
    layer.set_deepspeed_parallelism()
    return layer


def tokens(rank: int, number: int = T) -> Tensor:
    return torch.randn(number, 16, generator=torch.Generator().manual_seed(rank))


def asked_for(rank: int) -> tuple[bool, str]:
    from sonic_ep.transports import transport_for
    from tests.helpers.deepspeed_cpu import deepspeed_world

    all_to_all = TransportConfig(kind="all_to_all", timeout=500)
    with deepspeed_world():
        layer = layer_of(rank, all_to_all)
        layer(tokens(rank))
        group = layer.deepspeed_moe.group
        (held,) = group.held.values()
        with pytest.raises(ValueError, match="cannot be had") as caught:
            layer_of(rank, TransportConfig(kind="symmetric"))(tokens(rank))
        return held is transport_for(group, all_to_all), str(caught.value)


def test_the_transport_is_the_one_asked_for(ranks: Ranks) -> None:
    for is_asked_for, message in ranks(2).run(asked_for):
        assert is_asked_for
        assert "kind='symmetric' with exact buffers cannot be had: the rows are on a cpu device" in message


def step(layer: Any, x: Tensor) -> dict[str, Tensor]:
    from tests.helpers.deepspeed_moe import gradients

    x = x.clone().requires_grad_()
    y, l_aux, _ = layer(x)
    (y.square().sum() + l_aux).backward()
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients(layer)}


def static_and_exact(rank: int, folder: str) -> tuple[list[dict[str, Tensor]], list[Tensor], str, int | None]:
    from sonic_ep.transports import transport_for
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import noted_routings
    from tests.helpers.static_buffers import static_buffers

    with deepspeed_world():
        exact, static = (layer_of(rank, way) for way in (TransportConfig(), STATIC))
        routings = noted_routings(static.deepspeed_moe.experts)
        steps, more = [step(exact, tokens(rank))], tokens(rank, T + rank)
        transport: Any = transport_for(static.deepspeed_moe.group, STATIC)
        with static_buffers(transport, folder):
            steps.append(step(static, tokens(rank)))
            with pytest.raises(ValueError, match="buffers='static'") as caught:
                static(more)
            evaluated = [layer.eval()(more)[0].detach() for layer in (exact, static)]
    return steps, evaluated, str(caught.value), routings[0].max_received


def test_static_buffers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for steps, evaluated, message, most in ranks(2).run(static_and_exact, str(tmp_path)):
        torch.testing.assert_close(steps[1], steps[0])
        torch.testing.assert_close(evaluated[1], evaluated[0])
        assert "rank 1: T=25 tokens, but transport.buffers='static' keeps to the first step's 24" in message
        assert most == T * K * 5 // 4
