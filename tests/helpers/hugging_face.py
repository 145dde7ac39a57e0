"""Tiny, randomly initialised Hugging Face MoE models, and how a DeepSpeed engine trains one through AutoEP.

Imports transformers inside: it takes seconds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.process_groups import passing_groups

VOCABULARY, LENGTH = 64, 12
EXPERTS, TOP_K, WIDTH = 8, 3, 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
# By preset: classes of transformers, and what their configs have beside the common keys.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "head_dim": 16, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": WIDTH,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_key_value_heads": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
PRESETS = tuple(_MODELS)


def model_of(preset: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """A causal language model with equal weights on every rank."""
    import transformers

    name, own = _MODELS[preset]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):  # zero at first, and then it does nothing
            buffer.copy_(torch.linspace(0.0, 0.3, EXPERTS))
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """A context for models over several ranks, without progress bars, warnings, and groups that remain."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with passing_groups(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor and transformers warn about each other
        yield


def batches(rank: int, steps: int, sequences: int = 2, *, start: int = 0, length: int = LENGTH) -> list[Tensor]:
    """(sequences, length) token ids of this rank for each step from `start` on: a model can learn to count."""
    made = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        first = torch.randint(VOCABULARY, (sequences, 1), generator=generator)
        made.append((first + torch.arange(length)) % VOCABULARY)
    return made


def loss_of(run: Any, ids: Tensor) -> Tensor:
    ids = ids.to(run.device)
    return run(input_ids=ids, labels=ids, use_cache=False).loss


def expert_parallel(ep_size: int, preset: str, **fields: Any) -> dict[str, Any]:
    """The config section."""
    return {"expert_parallel": {"enabled": True, "autoep_size": ep_size, "preset_model": preset, **fields}}


def adam_of(parameters: Any) -> torch.optim.Optimizer:
    """For deepspeed.initialize(optimizer=...). Its epsilon keeps rounding errors of tiny gradients from growing until a
    token goes to another expert."""
    from deepspeed.moe.utils import configure_moe_param_groups

    return torch.optim.Adam(configure_moe_param_groups(parameters), lr=3e-3, eps=1e-3)
