"""Qwen3-30B-A3B's MoE layer under DeepSpeed: its MoE layer, its AutoEP layer and ours for both, in one run.

    torchrun --nproc-per-node 8 benchmarks/deepspeed_layer.py --out results.json

EP = all ranks, ZeRO 1, bf16, AdamW of torch. A model is LAYERS blocks x + moe(norm(x)). *Layer*: forward and
backward of the first block's MoE on random rows, and what it keeps between the two beside its output. *Step*: a whole
training step of the engine, and the most memory that it allocates. Contestants take turns; times are medians of the
slowest rank. DeepSpeed's MoE layer runs with drop_tokens=False, as it also computes every token then; `_rounded` is
our layer with token rounding. TFLOP/s count 18 operations per token, expert, d and n.
"""

import argparse
import json
import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from across_ranks import measure_layer, measure_step, summary
from torch import Tensor, nn

from sonic_ep import RoundingConfig, load_config

SHAPE, LAYERS, SEQ, BATCH = "qwen3_30b_a3b", 2, 2048, 4
AUX_WEIGHT = 0.001
ROUNDING = RoundingConfig(mode="apportion")


class Model(nn.Module):
    """Blocks named as in Hugging Face's models, where AutoEP looks for `model.layers.{i}.mlp`."""

    def __init__(self, make: Callable[[], nn.Module], config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList(Block(make()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        for block in self.model.layers:
            x, aux_loss = block(x)
            total = total + aux_loss
        return x.float().square().mean() + total


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(load_config(SHAPE).d), mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.mlp(self.norm(x))
        y, l_aux = (out[0], AUX_WEIGHT * out[1]) if isinstance(out, tuple) and len(out) == 3 else (first(out), 0.0)
        return x + y, torch.as_tensor(l_aux, device=x.device)


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


class GatedMLP(nn.Module):
    """The template of an expert."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, n, bias=False)
        self.up_proj = nn.Linear(d, n, bias=False)
        self.down_proj = nn.Linear(n, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def moe_model(kind: Callable[..., nn.Module], **more: Any) -> Any:
    """An engine around blocks of DeepSpeed's MoE layer, or of ours."""
    moe = load_config(SHAPE)

    def make() -> nn.Module:
        return kind(
            moe.d,
            GatedMLP(moe.d, moe.n),
            num_experts=moe.E,
            ep_size=dist.get_world_size(),
            k=moe.K,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
            **more,
        )

    return engine(Model(make), {})


def autoep_model() -> Any:
    """An engine around blocks of Hugging Face that AutoEP replaces, by its own layers or by ours."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    moe = load_config(SHAPE)
    shape: dict[str, Any] = {
        "hidden_size": moe.d,
        "moe_intermediate_size": moe.n,
        "num_experts": moe.E,
        "num_experts_per_tok": moe.K,
        "norm_topk_prob": True,
        "num_hidden_layers": LAYERS,
    }
    config = Qwen3MoeConfig(**shape)

    def make() -> nn.Module:
        block = Qwen3MoeSparseMoeBlock(config)
        for parameter in block.parameters():  # some of Hugging Face's are made empty
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, device="cuda"))
        return block

    section = {"enabled": True, "autoep_size": dist.get_world_size(), "preset_model": "qwen3_moe"}
    return engine(Model(make, config), {"expert_parallel": section})


def engine(model: nn.Module, more: dict[str, Any]) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
        **more,
    }
    return deepspeed.initialize(model=model, config=settings)[0]


def contestants() -> dict[str, Any]:
    from deepspeed.moe.layer import MoE as StockMoE

    from sonic_ep.integrations.deepspeed import AutoEP, MoE, SonicEPOptions

    tile_aligned = SonicEPOptions(rounding=ROUNDING)
    built = {
        "deepspeed_moe": moe_model(StockMoE),
        "sonic_ep_moe": moe_model(MoE),
        "sonic_ep_moe_rounded": moe_model(MoE, options=tile_aligned),
        "autoep": autoep_model(),
    }
    for name, options in (("sonic_ep_autoep", SonicEPOptions()), ("sonic_ep_autoep_rounded", tile_aligned)):
        AutoEP.install(options)
        built[name] = autoep_model()
    return built


def rows_of(layer: Any, x: Tensor) -> Tensor:
    return first(layer(x))


def training_step(run: Any, x: Tensor) -> None:
    run.backward(run(x))
    run.step()


def race(rounds: int) -> dict[str, dict[str, float]]:
    moe, models = load_config(SHAPE), contestants()
    torch.manual_seed(dist.get_rank())
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for number in range(rounds + 2):
        x = torch.randn(BATCH, SEQ, moe.d, device="cuda").bfloat16().requires_grad_()
        dout = torch.randn(BATCH, SEQ, moe.d, device="cuda").bfloat16()
        for name, run in models.items():
            mlp = run.module.model.layers[0].mlp
            sample = measure_layer(partial(rows_of, mlp), mlp.parameters(), x, dout)
            sample |= measure_step(partial(training_step, run, x.detach()))
            if number >= 2:  # the first rounds compile and allocate
                samples[name].append(sample)
    operations = 18 * BATCH * SEQ * moe.K * moe.d * moe.n
    figures = {name: summary(each) for name, each in samples.items()}
    for each in figures.values():
        each["layer_tflops"] = operations / (each["forward_ms"] + each["backward_ms"]) / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("nccl", verbose=False)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "ranks": dist.get_world_size(),
        "shape": {"config": SHAPE, "layers": LAYERS, "sequence": SEQ, "batch": BATCH},
        "contestants": race(options.rounds),
    }
    if dist.get_rank() == 0:
        for name, figures in results["contestants"].items():
            print(name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
