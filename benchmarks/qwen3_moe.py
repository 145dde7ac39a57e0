"""Models of Hugging Face transformers with random weights and a published shape, for benchmarks of training steps."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from pretrain_model import DENSE
from torch import Tensor
from transformers import Qwen3MoeConfig

from sonic_ep import load_config

SHAPES = ("qwen3_30b_a3b", "tiny")


def model_config(options: argparse.Namespace) -> Qwen3MoeConfig:
    moe, dense = load_config(options.shape), DENSE[options.shape]
    return Qwen3MoeConfig(
        vocab_size=dense.vocabulary,
        hidden_size=moe.d,
        num_attention_heads=dense.heads,
        num_key_value_heads=dense.kv_heads,
        head_dim=dense.head_dim,  # pyright: ignore[reportCallIssue]  # in 5.23
        num_experts=moe.E,
        num_experts_per_tok=moe.K,
        moe_intermediate_size=moe.n,
        num_hidden_layers=options.layers,
        norm_topk_prob=moe.router.renormalize,
        max_position_embeddings=options.length,
        output_router_logits=False,
    )


def own_sequences(config: Any, options: argparse.Namespace) -> Tensor:
    """Returns this rank's ids of random tokens, (sequences, --length)."""
    generator = torch.Generator(options.device).manual_seed(dist.get_rank())
    size = (options.tokens // options.length, options.length)
    return torch.randint(config.vocab_size, size, device=options.device, generator=generator)
