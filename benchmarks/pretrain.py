"""Pretraining of a language model with MoE layers that take turns: tokens a second of a GPU, in whole training steps.

    torchrun --nproc-per-node 2 benchmarks/pretrain.py --shape sonic_7b --layers 12 --tokens 24576 --out pretrain.json
    torchrun --nproc-per-node 2 benchmarks/pretrain.py --shape qwen3_30b_a3b --layers 7 --tokens 8192 --ep-size 2 \
        --micro-batches 4
    python benchmarks/pretrain.py --device cpu --shape tiny --layers 2 --tokens 64 --length 32 --only off torch

A decoder-only model of `--layers` layers (default: all) under FSDP2, fp32 weights and fused AdamW, bf16 compute, flash
attention in a compiled block, and quack's fused linear cross-entropy (pretrain_model.py). With --ep-size above 1 the
MoE layers are expert-parallel and their experts are sharded over the ranks that hold the same ones. Tokens are drawn
from Zipf's distribution; learning them needs no text, and routing is that of a model in training.

All contestants train the same weights, one after the other, in turns of --seconds. Medians over --rounds, and the
slowest of all ranks:

    step                 milliseconds of --micro-batches times forward and backward, and optimizer, back to back
    host                 of its calls until they return, with what they wait for
    tokens_per_second    of one GPU
    mfu                  pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib             the most that torch allocated in a turn
    tokens_per_day       of 64 GPUs at this rate, an extrapolation
    loss                 cross-entropy after a step more, in nats
    traced_in_turn       programs that are new in the steps that count; a turn with one is repeated, at most twice
    programs             the number that a layer of ours has, the most of all; 0: its code runs, and the log says why
"""

import argparse
import dataclasses
import gc
import json
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_time import Clock, machine
from layer_contestants import BF16_ROUTER, CAPACITY, sonic_moe_layer, torch_layer, torch_layer_across_ranks
from pretrain_model import DENSE, ExchangeableMoE, Layer, Model, flops_per_token, groups_by_mesh
from step_options import parsed_options, start_rank, step_parser, train_until_traced, turn_without_tracing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from tuned_choices import restore, save_choices

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, load_config
from sonic_ep.experts import Experts
from sonic_ep.fsdp import shard_experts

OURS_ON_ONE_RANK = ("off", "nearest", f"off, {BF16_ROUTER}", f"nearest, {BF16_ROUTER}")
OURS_ACROSS_RANKS = (
    "off, symmetric",
    "apportion, symmetric",
    "apportion, symmetric, static",
    "off, all_to_all",
)
BATCHES, GPUS = 8, 64
WARM_UP = 6  # steps before all turns
BALANCE_COEF = 0.01
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0}  # dense bf16


def config_of(name: str, config: MoEConfig) -> MoEConfig:
    """The config of one of our contestants: mode, transport, buffers and router, as in layer_contestants.py."""
    mode, *words = name.split(", ")
    static, linear_dtype = "static" in words, "input" if BF16_ROUTER in words else "float32"
    kind = next((word for word in words if word not in ("static", BF16_ROUTER)), "auto")
    return config.replace(
        router=dataclasses.replace(config.router, linear_dtype=linear_dtype),
        rounding=RoundingConfig(mode=mode, capacity_factor=CAPACITY if static else None),  # type: ignore[arg-type]
        transport=TransportConfig(kind=kind, buffers="static" if static else "exact"),  # type: ignore[arg-type]
    )


class Trainer:
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        self.options, self.layers = options, layers
        self.device = torch.device("cpu")
        if options.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        ep_size, world = options.ep_size, dist.get_world_size()
        grid = init_device_mesh(options.device, (world // ep_size, ep_size), mesh_dim_names=("expert_data", "ep"))
        self.group = EPGroup(grid["ep"].get_group()) if ep_size > 1 else EPGroup.alone()
        self.dense, config = DENSE[options.shape], load_config(options.shape)
        router = dataclasses.replace(config.router, balance="batch", balance_coef=BALANCE_COEF)
        self.config = config.replace(activation="swiglu", bias=False, shared_n=0, router=router)
        self.model = self._model(grid)
        groups = groups_by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        B, L = options.tokens // options.length, options.length
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        share = 1 / torch.arange(1, self.dense.vocabulary + 1, device=self.device)
        self.batches = [
            torch.multinomial(share, B * (L + 1), replacement=True, generator=generator).view(B, L + 1)
            for _ in range(BATCHES)
        ]
        self.steps_done = 0

    def contestants(self) -> list[str]:
        ours = OURS_ON_ONE_RANK if self.group.size == 1 else OURS_ACROSS_RANKS
        names = [*ours, *self._others()]
        if self.device.type == "cpu":
            names = [name for name in names if "symmetric" not in name]
        return [name for name in names if self.options.only is None or name in self.options.only]

    def _others(self) -> dict[str, Layer]:
        if self.group.size > 1:
            return {"torch": partial(torch_layer_across_ranks, size=self.group.size)}
        others: dict[str, Layer] = {"torch": torch_layer}
        if self.device.type == "cuda" and find_spec("sonicmoe") is not None:
            others["sonic_moe"] = sonic_moe_layer
        return others

    def _model(self, grid: Any) -> Model:
        others, d = self._others(), self.config.d
        configs = {name: config_of(name, self.config) for name in self.contestants() if name not in others}
        configs = configs or {"off": self.config}  # somebody has to hold the weights
        with torch.device("meta"):
            blocks = [ExchangeableMoE(configs, others, self.group) for _ in range(self.layers)]
            model = Model(d, self.dense, blocks, checkpointing=self.options.checkpoint)
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

    def step(self) -> Tensor:
        """Returns the cross-entropy of the last micro-batch."""
        n, loss = self.options.micro_batches, torch.zeros(())
        for i in range(n):
            if n > 1:  # gradients are summed where they are until the last; weights stay gathered
                self.model.set_requires_gradient_sync(i == n - 1)  # type: ignore[operator]
                self.model.set_reshard_after_backward(i == n - 1)  # type: ignore[operator]
            loss, aux_loss = self.model(self.batches[(n * self.steps_done + i) % BATCHES])
            ((loss + aux_loss) / n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return loss.detach()

    def turn(self, contestant: str, steps: int, clock: Clock) -> dict[str, float]:
        self.model.choose(contestant)

        def num_programs() -> int:
            return sum(self.num_programs(contestant))

        train_until_traced(self.step, num_programs, clock)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms, host, traced_in_turn = turn_without_tracing(self.step, steps, num_programs, clock)
        return {
            "step": ms,
            "host": host,
            "traced_in_turn": traced_in_turn,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0,
            "loss": float(self.step()),
        }

    def num_programs(self, contestant: str) -> list[int]:
        """Those of each layer of ours; empty for others."""
        moes = [block.moe for block in self.model.blocks]
        layers = [
            moe.layers[contestant] for moe in moes if isinstance(moe, ExchangeableMoE) and contestant in moe.layers
        ]
        return [layer.num_programs for layer in layers if isinstance(layer, MoE)]

    def most_programs(self, contestant: str) -> dict[str, float]:
        """The most of a layer."""
        return {"programs": max(numbers)} if (numbers := self.num_programs(contestant)) else {}

    def figures(self, times: dict[str, float]) -> dict[str, float]:
        rate = 1000 * self.options.micro_batches * self.options.tokens / times["step"]
        flops = flops_per_token(self.config, self.dense, self.layers, self.options.length) * rate
        figures = {**times, "tokens_per_second": rate, "tokens_per_day": rate * GPUS * 86_400}
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        for card, peak in PEAK_TFLOPS.items():
            if card in name:
                figures["mfu"] = flops / peak / 1e12
        return figures


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


def race(trainer: Trainer, clock: Clock) -> Iterator[dict[str, dict[str, float]]]:
    """Every contestant compiles and traces what it needs, then all take turns. Yields the figures after each round."""
    options = trainer.options
    steps: dict[str, int] = {}
    for name in trainer.contestants():
        trainer.model.choose(name)
        start = time.perf_counter()
        for _ in range(WARM_UP):
            trainer.step()
        estimate = clock.largest({"ms": trainer.turn(name, 2, clock)["step"]})["ms"]
        steps[name] = max(2, round(1000 * options.seconds / estimate))
        if dist.get_rank() == 0:
            print(f"{name}: warm after {time.perf_counter() - start:.0f} s, {estimate:.1f} ms a step", flush=True)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(options.rounds):
        for name in steps:
            turns[name].append(trainer.turn(name, steps[name], clock))
        medians = {
            name: {key: statistics.median(turn[key] for turn in each) for key in each[0]}
            for name, each in turns.items()
        }
        yield {
            name: {**trainer.figures(clock.largest(times)), **trainer.most_programs(name)}
            for name, times in medians.items()
        }


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="sonic_7b", shapes=DENSE, tokens=24_576, seconds=3.0)
    parser.add_argument("--layers", nargs="+", type=int, help="one model each; default: the whole one")
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
    options.layers = options.layers or [DENSE[options.shape].layers]
    return options


def main() -> None:
    options = parsed()
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    if options.tuning is not None:
        restore(options.tuning)
    if "LOCAL_RANK" in os.environ:
        start_rank(options.device)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if options.short_tuning:
        from short_tuning import tune_in_short

        tune_in_short()
    results: dict[str, Any] = {"command": sys.argv, "machine": machine(options.device), "ranks": dist.get_world_size()}
    results |= {
        "dense": DENSE[options.shape]._asdict(),
        "tokens": options.tokens,
        "micro_batches": options.micro_batches,
        "cases": {},
        "errors": {},
    }
    clock = Clock(EPGroup(), options.device)
    for layers in options.layers:
        try:
            for figures in race(Trainer(options, layers), clock):
                results["cases"][layers] = figures
                write(results, options.out)
        except torch.OutOfMemoryError:  # the next model may be smaller
            results["errors"][layers] = traceback.format_exc()
            write(results, options.out)
        gc.collect()
        if dist.get_rank() == 0:
            print(results["errors"].get(layers, ""))
            for name, record in results["cases"].get(layers, {}).items():
                print(f"{layers} layers {name:30}", " ".join(f"{key} {value:.4g}" for key, value in record.items()))
    if options.tuning is not None and dist.get_rank() == 0:
        save_choices(options.tuning)
    dist.destroy_process_group()


def write(results: dict[str, Any], out: Path | None) -> None:
    if dist.get_rank() == 0 and out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
