"""Training steps of torchtitan's Qwen3-MoE: its own dispatch and experts and ours, in turns.

    torchrun --nproc-per-node 2 benchmarks/torchtitan_step.py --out torchtitan_step_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/torchtitan_step.py --compile --out torchtitan_step_compiled_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/torchtitan_step.py --checkpoint --out torchtitan_step_checkpoint_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/torchtitan_step.py --device cpu --shape tiny --tokens 64 --length 32

The model has random weights and `--layers` layers of a published shape. torchtitan's own parallelize function divides
the experts among all ranks and shards the rest by FSDP2, with fp32 weights that compute in bf16. --compile: it compiles
each block as one graph, and so is the loss; with an older torch a graph may break, and does at torchtitan's experts.
--checkpoint: backward recomputes each block, as torchtitan's own settings of Qwen3-30B-A3B have it (`FullAC`).
The loop is ours, not its Trainer's: nothing balances the experts or clips gradients. Attention is torch's. Each rank
has its own sequences of random tokens.

Contestants train the same weights, one after the other, in turns of --seconds, which begin once no step traces a
program:

    all_to_all, grouped_mm     torchtitan's own: every (token, expert) pair travels
    sonic_ep                   ours, by the override `routed_experts`
    sonic_ep, apportion        ours, with counts rounded, by `rounded_moe`

Medians over --rounds, and the largest of all ranks, in milliseconds unless said otherwise:

    step, host        forward, backward and fused AdamW, back to back; the calls of it until they return
    layer, layer_host forward and backward of one MoE with its router in bf16, without FSDP, back to back; its calls
    layer_tflops      18 T K d n / layer, in TFLOP/s of a rank: what tokens need, without the router
    saved_mib         what one MoE holds between forward and backward, without input and output
    mfu               pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib          the most that torch allocated in a turn of steps
    traced_in_turn    programs that are new in the steps that count; a turn with one is repeated, at most twice
    first_loss        of the first rank, before any step: contestants without rounding agree but for bf16
"""

import argparse
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from older_torch import autocast_of_whole_experts, compile_blocks, is_older, sharded  # before torchtitan
from pretrain_model import DENSE, groups_by_mesh
from runs import group_of_ranks, leave
from step_race import LayerAlone, Race, StepModel, parsed_options, step_parser

if not torch.cuda.is_available():
    import tests.helpers.torchtitan_cpu  # noqa: F401  # before torchtitan, which looks for devices when it is imported

from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.qwen3 import parallelize
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from sonic_ep import RoundingConfig, load_config
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.torchtitan.moe import rounded_moe
from sonic_ep.integrations.torchtitan.routed_experts import SonicEPRoutedExperts
from sonic_ep.integrations.torchtitan.router import ScoringRouter
from sonic_ep.kernels.common.replaced import replaced

STOCK, OURS, ROUNDED = "all_to_all, grouped_mm", "sonic_ep", "sonic_ep, apportion"
PLAIN, APPORTION = SonicEPOptions(), SonicEPOptions(rounding=RoundingConfig(mode="apportion"))
LEARNING_RATE = 1e-5  # small, so that routing stays as at the start: contestants train one after the other


# torch 2.11 finds no one graph of torchtitan's own dispatch.
stock_forward: Any = torch.compiler.disable(RoutedExperts.forward) if is_older else RoutedExperts.forward


class ExpertsInTurns(SonicEPRoutedExperts):
    """torchtitan's routed experts and ours, on the same weights. `chosen` says which of them run."""

    @dataclass(kw_only=True, slots=True)
    class Config(SonicEPRoutedExperts.Config):
        pass

    chosen = STOCK  # of an instance: torch.compile does not see that a class changes

    def forward(  # torchtitan's sharding reads the names of the arguments
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        args = x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
        with autocast_of_whole_experts(x_BLD.device.type):
            return stock_forward(self, *args) if self.chosen == STOCK else SonicEPRoutedExperts.forward(self, *args)

    @property
    def num_programs(self) -> int:
        return self._experts.num_programs


class RouterInTurns(ScoringRouter):
    """torchtitan's router, which gives the scores of all experts as well where they are rounded."""

    chosen = STOCK

    @dataclass(kw_only=True, slots=True)
    class Config(ScoringRouter.Config):
        pass

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.chosen == ROUNDED:
            return super().forward(x_BLD, expert_bias_E)
        return TokenChoiceTopKRouter.forward(self, x_BLD, expert_bias_E)


def model_config(options: argparse.Namespace) -> Any:
    """Returns the config of torchtitan's Qwen3-MoE in a published shape, with MoEs that take turns."""
    moe, dense = load_config(options.shape), DENSE[options.shape]
    config: Any = qwen3.model_registry("debugmodel_moe", attn_backend="varlen").model
    config.dim = config.norm.normalized_shape = config.tok_embeddings.embedding_dim = config.lm_head.in_features = moe.d
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = dense.vocabulary
    layers: Any = qwen3._build_qwen3_moe_layers(
        n_layers=options.layers,
        dim=moe.d,
        n_heads=dense.heads,
        n_kv_heads=dense.kv_heads,
        head_dim=dense.head_dim,
        moe_hidden_dim=moe.n,
        num_experts=moe.E,
        top_k=moe.K,
        attn_backend="varlen",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=dense.head_dim, max_seq_len=options.length, theta=1e6),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe = rounded_moe(layer.moe, rounding={"mode": "apportion"})
        layer.moe.router = derive(layer.moe.router, RouterInTurns.Config)
        layer.moe.routed_experts = derive(layer.moe.routed_experts, ExpertsInTurns.Config)
    config.layers = layers
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=dist.get_world_size() > 1)
    return config


def loss_of(logits_BLV: Tensor, ids_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), ids_BL[:, 1:].flatten())


class Training(StepModel):
    def __init__(self, _: tuple[str, ...], options: argparse.Namespace) -> None:
        config, ranks = model_config(options), dist.get_world_size()
        parallelism = ParallelismConfig(expert_parallel_degree=ranks, spmd_backend="partial_dtensor")
        dims = ParallelDims.from_config(parallelism, ranks)
        with torch.device("meta"):
            model = config.build()
        older = replaced(parallelize, apply_fsdp_to_decoder=sharded, apply_compile=compile_blocks)
        with older if is_older else nullcontext():
            self.model: Any = qwen3.parallelize_qwen3(
                model,
                parallel_dims=dims,
                training=TrainingConfig(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
                parallelism=parallelism,
                compile_config=CompileConfig(enable=options.compile, components=["model"]),
                ac_config=FullAC.Config() if options.checkpoint else None,
                dump_folder="",
            )
        self.model.to_empty(device=options.device)
        with torch.no_grad():
            self.model.init_states()
        self.model.train()
        self.experts = [module for module in self.model.modules() if isinstance(module, ExpertsInTurns)]
        self.optimizer = torch.optim.AdamW(groups_by_mesh(self.model.parameters()), lr=LEARNING_RATE, fused=True)
        generator = torch.Generator(options.device).manual_seed(dist.get_rank())
        size = (options.tokens // options.length, options.length)
        self.ids = torch.randint(config.vocab_size, size, device=options.device, generator=generator)
        self.loss_of = torch.compile(loss_of) if options.compile else loss_of
        self.moe = MoEAlone(config.layers[0].moe, dims, options)

    def choose(self, name: str) -> None:
        for module in (*self.model.modules(), *self.moe.moe.modules()):
            if isinstance(module, ExpertsInTurns | RouterInTurns):
                module.chosen = name
            if isinstance(module, ExpertsInTurns):
                module.options = APPORTION if name == ROUNDED else PLAIN

    def num_programs(self) -> int:
        return sum(experts.num_programs for experts in self.experts)

    def _loss(self) -> Tensor:
        return self.loss_of(self.model(self.ids), self.ids)

    def loss(self) -> float:
        with torch.no_grad():
            return float(self._loss())

    def step(self) -> None:
        self._loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def layer_alone(self) -> Generator[LayerAlone | None]:
        yield LayerAlone(self.moe.out, self.moe.backward)


class MoEAlone:
    """One MoE with this rank's experts, without FSDP, which treats all contestants alike."""

    def __init__(self, config: Any, dims: ParallelDims, options: argparse.Namespace) -> None:
        with torch.device("meta"):
            self.moe = config.build()
        if dims.ep > 1:
            self.moe.parallelize(dims)
        self.moe.to_empty(device=options.device)
        generator = torch.Generator(options.device).manual_seed(0)
        with torch.no_grad():
            self.moe.init_states()
            self.moe.router.gate.weight.normal_(std=0.02, generator=generator)  # equal on all ranks
        self.moe.bfloat16().train()
        size = (options.tokens // options.length, options.length, load_config(options.shape).d)
        generator.manual_seed(1 + dist.get_rank())
        self.x = torch.randn(size, device=options.device, generator=generator).bfloat16().requires_grad_()
        self.dout = torch.randn(size, device=options.device, generator=generator).bfloat16()

    def out(self) -> Tensor:
        return self.moe(self.x)

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, [self.x, *self.moe.parameters()], self.dout)


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="qwen3_30b_a3b", shapes=("qwen3_30b_a3b", "tiny"), tokens=8192, seconds=2.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    return parsed_options(parser)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")  # DTensor and torchtitan warn of CPUs
    logging.disable(logging.WARNING)
    group_of_ranks(options.device)
    set_spmd_backend("partial_dtensor")
    on_cpu: Any = nullcontext()
    if options.device == "cpu":
        from tests.helpers.torchtitan_cpu import fsdp_over_gloo

        on_cpu = fsdp_over_gloo()
    with on_cpu:
        Race(
            [(STOCK, OURS, ROUNDED)],
            partial(Training, options=options),
            options,
            moe=load_config(options.shape),
            dense=DENSE[options.shape],
            sizes=("compile", "checkpoint"),
            packages=("torchtitan",),
        ).run()
    leave()


if __name__ == "__main__":
    main()
