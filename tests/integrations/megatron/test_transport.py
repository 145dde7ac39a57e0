"""How rows travel is an option of the layer; static buffers give the same results as exact ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig, TransportConfig
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

Ranks = Callable[[int], RankPool]
S, B = 12, 2
ROUNDING = RoundingConfig(t=8, G=16, capacity_factor=1.25)
STATIC = TransportConfig(kind="symmetric", buffers="static")


def layer_of(transport: TransportConfig, rounding: RoundingConfig | None = None) -> Any:

    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config

    torch.manual_seed(3)
    # A loss that goes backward outside of Megatron's schedules leaves a scale behind that these do not take.
    config = gpt_config(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
    options = SonicEPOptions(rounding=rounding, transport=transport)
    layer: Any = get_sonic_ep_moe_spec(config.num_moe_experts, options=options)(config=config)
    layer.set_layer_number(1)
    return layer


def hidden_states(rank: int, length: int = S) -> Tensor:
    return torch.randn(length, B, 32, generator=torch.Generator().manual_seed(rank))


def asked_for(rank: int) -> str:
    from tests.helpers.megatron_training import parallel_state

    with parallel_state(expert=2):
        all_to_all = TransportConfig(kind="all_to_all", timeout=5)
        layer = layer_of(all_to_all)
        layer(hidden_states(rank))
        assert layer.experts.transport.config == all_to_all
        with pytest.raises(ValueError, match="cannot be had") as caught:
            layer_of(TransportConfig(kind="symmetric"))(hidden_states(rank))
        return str(caught.value)


def test_the_transport_is_the_one_asked_for(ranks: Ranks) -> None:
    for message in ranks(2).run(asked_for):
        assert "kind='symmetric' with exact buffers cannot be had: the rows are on a cpu device" in message


def step(layer: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output, _ = layer(x)
    output.square().sum().backward()
    assert x.grad is not None
    grads = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    return [output.detach(), x.grad, *grads]


def static_and_exact(rank: int, folder: str) -> tuple[list[list[Tensor]], str, int | None]:
    from tests.helpers.megatron_training import note_routings, parallel_state
    from tests.helpers.static_buffers import static_buffers

    routings: list[Any] = []
    with parallel_state(expert=2):
        exact, static = layer_of(TransportConfig(), ROUNDING), layer_of(STATIC, ROUNDING)
        note_routings(static, routings)
        results = [step(exact, hidden_states(rank))]
        with static_buffers(static.experts.transport, folder):
            results.append(step(static, hidden_states(rank)))
            longer = hidden_states(rank, S + rank)
            with pytest.raises(ValueError, match="static") as caught:
                static(longer)
            static.eval()
            exact.eval()
            results += [[exact(longer)[0].detach()], [static(longer)[0].detach()]]
    return results, str(caught.value), routings[0].max_received


def test_static_buffers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for (*steps, exact, static), message, most in ranks(2).run(static_and_exact, str(tmp_path), timeout=600):
        for got, wanted in zip(steps[1], steps[0], strict=True):
            assert_near(got, wanted, share=1e-5)
        torch.testing.assert_close(static, exact)
        assert "rank 1: T=26 tokens, but transport.buffers='static' keeps to the first step's 24" in message
        assert most == S * B * 2 * 5 // 4
