"""Models of Hugging Face transformers with random weights and a published shape, for benchmarks of training steps."""

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

from pretrain_model import DENSE, Dense
from sonic_ep import load_config


class Family(NamedTuple):
    """Classes of transformers, what the width of an expert is called in the config, and which attention it has."""

    config: Any
    model: Any
    block: Any
    experts: Any
    width: str
    attention: str


QWEN3 = Family(
    Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock, Qwen3MoeExperts, "moe_intermediate_size", "sdpa"
)
GPT_OSS = Family(GptOssConfig, GptOssForCausalLM, GptOssMLP, GptOssExperts, "intermediate_size", "eager")
# The family of a shape, the sizes of its MoE layers in configs/, and the sizes of all else. gpt_oss_20b: config.json of
# openai/gpt-oss-20b.
SHAPES = {
    "qwen3_30b_a3b": (QWEN3, "qwen3_30b_a3b", DENSE["qwen3_30b_a3b"]),
    "gpt_oss_20b": (GPT_OSS, "gpt_oss_20b", Dense(layers=24, heads=64, kv_heads=8, head_dim=64, vocabulary=201_088)),
    "tiny": (QWEN3, "tiny", DENSE["tiny"]),
    "tiny_gpt_oss": (GPT_OSS, "tiny", DENSE["tiny"]),
}


def model_config(options: argparse.Namespace) -> Any:
    family, name, dense = SHAPES[options.shape]
    moe = load_config(name)
    special = {"norm_topk_prob": moe.router.renormalize} if family is QWEN3 else {}
    return family.config(
        vocab_size=dense.vocabulary,
        hidden_size=moe.d,
        num_attention_heads=dense.heads,
        num_key_value_heads=dense.kv_heads,
        head_dim=dense.head_dim,
        num_experts=moe.E,
        num_experts_per_tok=moe.K,
        num_hidden_layers=options.layers,
        max_position_embeddings=options.length,
        output_router_logits=False,
        **{family.width: moe.n},
        **special,
    )


def own_sequences(config: Any, options: argparse.Namespace) -> Tensor:
    """Returns this rank's ids of random tokens, (sequences, --length)."""
    generator = torch.Generator(options.device).manual_seed(dist.get_rank())
    size = (options.tokens // options.length, options.length)
    return torch.randint(config.vocab_size, size, device=options.device, generator=generator)
