"""Pretraining of a language model with MoE layers that take turns: tokens a second of a GPU, in whole training steps.

    torchrun --nproc-per-node 2 benchmarks/pretrain.py --shape sonic_7b --layers 12 --tokens 24576 --out pretrain.json
    torchrun --nproc-per-node 2 benchmarks/pretrain.py --shape qwen3_30b_a3b --layers 7 --tokens 8192 --ep-size 2 \
        --micro-batches 4
    python benchmarks/pretrain.py --device cpu --shape tiny --layers 2 --tokens 64 --length 32 --only off torch

A decoder-only model of `--layers` layers (default: all) under FSDP2, fp32 weights and fused AdamW, bf16 compute, flash
attention in a compiled block, and quack's fused linear cross-entropy (pretrain_model.py). With --ep-size above 1 the
MoE layers are expert-parallel and their experts are sharded over the ranks that hold the same ones. Tokens are drawn
from Zipf's distribution; learning them needs no text, and routing is as in a model in training.

All contestants train the same weights, one after the other, in turns of --seconds. Medians over --rounds, and the
slowest of all ranks:

    step                 milliseconds of --micro-batches times forward and backward, and optimizer, back to back
    host                 of its calls until they return, with what they wait for
    tokens_per_second    of one GPU
    mfu                  pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib             the most that torch allocated in a turn
    first_loss, loss     cross-entropy before any step, and after a turn, in nats
    traced_in_turn       programs that are new in the steps that count; a turn with one is repeated, at most twice
    programs             the number that a layer of ours has, the most of all; 0: its code runs, and the log says why
"""

import argparse
import dataclasses
import logging
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from layer_contestants import BF16_ROUTER, config_of, sonic_moe_layer, torch_layer, torch_layer_across_ranks
from pretrain_model import DENSE, ExchangeableMoE, Layer, Model, groups_by_mesh
from runs import group_of_ranks, leave
from sonic_ep import EPGroup, MoE, MoEConfig, load_config
from sonic_ep.experts import Experts
from sonic_ep.fsdp import shard_experts
from step_race import Race, StepModel, parsed_options, step_parser
from tuned_choices import restore, save_choices

OURS_ON_ONE_RANK = ("off", "nearest", f"off, {BF16_ROUTER}", f"nearest, {BF16_ROUTER}")
OURS_ACROSS_RANKS = (
    "off, symmetric",
    "apportion, symmetric",
    "apportion, symmetric, static",
    "off, all_to_all",
)
BATCHES = 8
BALANCE_COEF = 0.01
SIZES = ("micro_batches", "ep_size", "reshard", "checkpoint")


def contestants(options: argparse.Namespace) -> tuple[str, ...]:
    ours = OURS_ON_ONE_RANK if options.ep_size == 1 else OURS_ACROSS_RANKS
    names = [*ours, *others(options)]
    return tuple(name for name in names if options.device == "cuda" or "symmetric" not in name)


def others(options: argparse.Namespace) -> dict[str, Layer]:
    """Returns the layers that are not ours."""
    if options.ep_size > 1:
        return {"torch": partial(torch_layer_across_ranks, size=options.ep_size)}
    has_sonic_moe = options.device == "cuda" and find_spec("sonicmoe") is not None
    return {"torch": torch_layer} | ({"sonic_moe": sonic_moe_layer} if has_sonic_moe else {})


def moe_config(options: argparse.Namespace) -> MoEConfig:
    config = load_config(options.shape)
    router = dataclasses.replace(config.router, balance="batch", balance_coef=BALANCE_COEF)
    return config.replace(activation="swiglu", bias=False, shared_n=0, router=router)


class Trainer(StepModel):
    def __init__(self, family: tuple[str, ...], options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu")
        if options.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        ep_size, world = options.ep_size, dist.get_world_size()
        grid = init_device_mesh(options.device, (world // ep_size, ep_size), mesh_dim_names=("expert_data", "ep"))
        self.group = EPGroup(grid["ep"].get_group()) if ep_size > 1 else EPGroup.alone()
        self.dense, self.config = DENSE[options.shape], moe_config(options)
        self.model = self._model(family, grid)
        groups = groups_by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        B, L = options.tokens // options.length, options.length
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        share = 1 / torch.arange(1, self.dense.vocabulary + 1, device=self.device)
        self.batches = [
            torch.multinomial(share, B * (L + 1), replacement=True, generator=generator).view(B, L + 1)
            for _ in range(BATCHES)
        ]
        self.taken, self.chosen = 0, family[0]

    def _model(self, family: tuple[str, ...], grid: DeviceMesh) -> Model:
        options, not_ours = self.options, others(self.options)
        raced = [name for name in family if name not in not_ours and (options.only is None or name in options.only)]
        # Somebody has to hold the weights.
        configs = {name: config_of(name, self.config, self.group.size) for name in raced or ["off"]}
        with torch.device("meta"):
            blocks = [ExchangeableMoE(configs, not_ours, self.group) for _ in range(options.layers)]
            model = Model(self.config.d, self.dense, blocks, checkpointing=self.options.checkpoint)
        model.materialize(self.device, self.group.rank)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        sharding = {"mp_policy": policy, "reshard_after_forward": self.options.reshard}
        mesh = init_device_mesh(self.options.device, (dist.get_world_size(),))
        for block in model.blocks:
            if self.options.compile:
                block.attention.compile()  # type: ignore[union-attr,operator]
            if self.group.size == 1:
                torch_fully_shard(block, mesh=mesh, **sharding)
            else:
                _shard_with_experts(block, mesh, grid["expert_data"], sharding)
        torch_fully_shard(model.head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        torch_fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def choose(self, name: str) -> None:
        self.model.choose(name)
        self.chosen = name

    def _next_batch(self) -> Tensor:
        self.taken += 1
        return self.batches[self.taken % BATCHES]

    def loss(self) -> float:
        with torch.no_grad():
            return float(self.model(self._next_batch())[0])

    def step(self) -> None:
        n = self.options.micro_batches
        for i in range(n):
            if n > 1:  # gradients are summed where they are until the last; weights stay gathered
                self.model.set_requires_gradient_sync(i == n - 1)  # type: ignore[operator]
                self.model.set_reshard_after_backward(i == n - 1)  # type: ignore[operator]
            loss, aux_loss = self.model(self._next_batch())
            ((loss + aux_loss) / n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _programs(self) -> list[int]:
        """Those of each layer of ours; empty for others."""
        moes = [block.moe for block in self.model.blocks]
        layers = [
            moe.layers[self.chosen] for moe in moes if isinstance(moe, ExchangeableMoE) and self.chosen in moe.layers
        ]
        return [layer.num_programs for layer in layers if isinstance(layer, MoE)]

    def num_programs(self) -> int:
        return sum(self._programs())

    def more_figures(self) -> dict[str, float]:
        programs = self._programs()
        return {"loss": self.loss()} | ({"programs": max(programs)} if programs else {})


def _shard_with_experts(block: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, sharding: dict[str, Any]) -> None:
    """As sonic_ep.fsdp.fully_shard, for a block several layers of which have the same experts."""
    moe = block.moe
    assert isinstance(moe, ExchangeableMoE)
    experts = next(iter(moe.layers.values())).experts
    assert isinstance(experts, Experts)
    weights = set(experts.parameters())
    experts.sharded_over = [[]]  # the layers accept that FSDP manages it
    torch_fully_shard(block, mesh=mesh, ignored_params=weights, **sharding)
    shard_experts(moe, weights, mesh=mesh, expert_mesh=expert_mesh, **sharding)


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="sonic_7b", shapes=DENSE, tokens=24_576, seconds=3.0)
    parser.add_argument("--layers", type=int, help="default: as many as the whole model has")
    parser.add_argument("--micro-batches", type=int, default=1, help="before each step of the optimizer")
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument(
        "--no-reshard",
        dest="reshard",
        action="store_false",
        help="bf16 weights of all blocks stay in memory from their forward on, for all micro-batches of a step",
    )
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of whole blocks")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="attention runs eagerly")
    parser.add_argument("--short-tuning", action="store_true", help="tune sonic-moe's GEMMs in fewer launches")
    parser.add_argument("--tuning", type=Path, help="what sonic-moe's tuning found, read and added to")
    options = parsed_options(parser)
    options.layers = options.layers or DENSE[options.shape].layers
    return options


def main() -> None:
    options = parsed()
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    if options.tuning is not None:
        restore(options.tuning)
    if "LOCAL_RANK" in os.environ:
        group_of_ranks(options.device)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if options.short_tuning:
        from short_tuning import tune_in_short

        tune_in_short()
    build = partial(Trainer, options=options)
    moe, dense = moe_config(options), DENSE[options.shape]
    race = Race(
        [contestants(options)], build, options, moe=moe, dense=dense, sizes=SIZES, forwards=options.micro_batches
    )
    race.run()
    if options.tuning is not None and dist.get_rank() == 0:
        save_choices(options.tuning)
    leave()


if __name__ == "__main__":
    main()
