"""Counts of tokens are exact in a bf16 model. Megatron-Core 0.19.2 rounds its own to bf16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

MICROBATCHES, TOKENS, K = 300, 64, 2


def counted(rank: int, ours: bool) -> dict[str, Any]:
    """What a router of a bf16 model counts over many microbatches, and what it should have."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import SEQUENCE, VOCABULARY, gpt_config, parallel_state

    with parallel_state():
        config = gpt_config(
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="global_aux_loss",
            moe_aux_loss_coeff=0.01,
        )
        spec: Any = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
        spec = use_sonic_ep(spec) if ours else spec
        model = Float16Module(config, GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope"))
        router: Any = next(each for each in model.modules() if hasattr(each, "local_tokens_per_expert"))
        router.set_layer_number(1)
        chosen_E = torch.zeros(8, dtype=torch.int64)
        for _ in range(MICROBATCHES):
            _, routed = router(torch.randn(TOKENS, 1, config.hidden_size).bfloat16())
            chosen_E += routed.sum(0)
        model.bfloat16()  # again, now that there is something to round
        found = {
            "local": router.local_tokens_per_expert.tolist() == chosen_E.tolist(),
            "global": int(router.global_tokens_per_expert.sum()) == MICROBATCHES * TOKENS * K,
            "steps": int(router.ga_steps) == MICROBATCHES,
        }
        assert int(chosen_E.sum()) == MICROBATCHES * TOKENS * K
        return found


def test_counts_of_many_microbatches_are_exact_in_bf16(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(counted, True) == [dict.fromkeys(("local", "global", "steps"), True)]


def test_megatrons_own_are_not(ranks: Callable[[int], RankPool]) -> None:
    """If this fails, Megatron has mended its counts, and `_count_in_integers` may go."""
    assert ranks(1).run(counted, False) == [dict.fromkeys(("local", "global", "steps"), False)]
