"""Megatron's `batch_invariant_mode`: a token's bits in every batch, on CPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from megatron.core.transformer.enums import AttnBackend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
T = 40  # tokens of a rank
MODE: dict[str, Any] = {
    "batch_invariant_mode": True,
    "attention_backend": AttnBackend.flash,  # Megatron wants both
    "flash_attention_version": 3,
}


def built(changes: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import gpt_config

    fixed = {"init_method_std": 0.2, "num_moe_experts": 8, "moe_router_topk": 4, "moe_router_dtype": "fp32"}
    config = gpt_config(**fixed, moe_router_load_balancing_type="none", **changes)
    spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    torch.manual_seed(5)
    layer = use_sonic_ep(spec)(config=config)
    layer.set_layer_number(1)
    # Megatron's batch-invariant GEMMs are of GPUs, so its logits would differ here (there: test_gpu.py).
    layer.router.gating = lambda x: (x[..., None, :] * layer.router.weight).sum(-1)
    return layer


def differing_tokens(rank: int, changes: dict[str, Any], splits: int) -> int:
    """Returns the tokens whose output or gradient of x differs between one batch and random splits of it."""
    from tests.helpers.megatron_training import parallel_state

    def step(rows: torch.Tensor) -> torch.Tensor:
        x = rows[:, None].clone().requires_grad_()
        y = layer(x)[0]
        y.square().sum().backward()
        assert x.grad is not None
        return torch.cat([y.detach(), x.grad], -1)[:, 0]

    with parallel_state(expert=torch.distributed.get_world_size()):
        layer, differ = built(changes), 0
        x = torch.randn(T, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
        whole, generator = step(x), torch.Generator().manual_seed(100 + rank)
        for _ in range(splits):
            order = torch.randperm(T, generator=generator)
            cut = int(torch.randint(1, T, (), generator=generator))  # Megatron's router fails without a token
            for mine in (order[:cut], order[cut:]):
                differ += int((step(x[mine]) != whole[mine]).any(1).sum())
    return differ


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_bit_differs_in_the_mode(ranks: Ranks, num_ranks: int) -> None:
    assert ranks(num_ranks).run(differing_tokens, MODE, 30, timeout=300) == [0] * num_ranks


def test_bits_differ_outside_of_it(ranks: Ranks) -> None:
    assert ranks(1).run(differing_tokens, {}, 30, timeout=300)[0] > 0


def test_the_mode_reaches_experts_and_transport(ranks: Ranks) -> None:
    assert ranks(2).run(parts_in_the_mode, timeout=300) == [(True, True)] * 2


def parts_in_the_mode(rank: int) -> tuple[bool, ...]:
    from tests.helpers.megatron_training import parallel_state

    with parallel_state(expert=2):
        layer = built(MODE)
        return layer.options.batch_invariant, layer.experts.transport.batch_invariant
