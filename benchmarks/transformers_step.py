"""Training steps of a model of Hugging Face transformers: our expert parallelism and its own, in turns.

    torchrun --nproc-per-node 2 benchmarks/transformers_step.py --out transformers_step_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/transformers_step.py --device cpu --shape tiny --tokens 64 --length 32
    torchrun --nproc-per-node 1 benchmarks/transformers_step.py --lora 16 --out transformers_lora_step.json
    torchrun --nproc-per-node 2 benchmarks/transformers_step.py --shape gpt_oss_20b --length 1024

The model has random weights and `--layers` layers of a published shape. DistributedConfig shards it by FSDP2 over all
ranks and divides the experts among them. Each rank has its own sequences of random tokens. gpt-oss's weights are
transposed, its gate and up rows alternate, and its experts have biases. Its attention has sinks, for which transformers
has only eager attention without a compiler or a hub: memory grows with the square of --length.

Contestants train the same weights, one after the other, in turns of --seconds, which begin once no step traces a
program:

    all_to_all, grouped_mm     transformers' own: every (token, expert) pair travels; its fastest experts without a hub
    sonic_ep                   ours
    sonic_ep, static           ours, with buffers for every pair at any rank: on several GPUs
    sonic_ep, apportion        ours, with counts rounded by `round_tokens`

With --lora R each rank trains adapters of rank R, of experts and attention, on a whole model of its own: PEFT cannot
add to experts that are divided among ranks. With --experts-only attention has none. Contestants, without the layer's
lines:

    PEFT, grouped_mm           PEFT makes W + B A, transformers' experts compute with it
    sonic_ep, fuse_lora        ours

Medians over --rounds, and the largest of all ranks, in milliseconds unless said otherwise:

    step, host        forward, backward and fused AdamW, back to back; the calls of it until they return
    layer, layer_host forward and backward of one MoE block with its router, without FSDP, back to back; its calls
    layer_tflops      18 T K d n / layer, in TFLOP/s of a rank: what tokens need, without the router
    saved_mib         what one MoE block saves in its forward for its backward, without its input and its weights
    peak_gib          the most that torch allocated in a turn of steps
    traced_in_steps, traced_in_layers
                      programs that are new in the turns that count; a turn with one is repeated, at most twice
    first_loss        of the first rank, before any step: contestants without rounding agree but for bf16
"""

import argparse
import copy
import gc
import json
import logging
import statistics
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from host_time import Clock, machine
from hugging_face_models import QWEN3, SHAPES, model_config, own_sequences
from pretrain_model import groups_by_mesh
from step_options import parsed_options, start_rank, step_parser, train_until_traced, turn_without_tracing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (  # pyright: ignore[reportMissingImports]  # in 5.23
    AllToAllEP,
    EPImplementation,
    EPImplementationInterface,
)

from sonic_ep import EPGroup, RoundingConfig, TransportConfig
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.transformers import fuse_lora, register, round_tokens
from sonic_ep.integrations.transformers.expert_parallel import implementation_with
from sonic_ep.integrations.transformers.experts import TOKEN_ROUNDING, num_programs, registered_experts

STOCK, OURS, ROUNDED = "all_to_all, grouped_mm", "sonic_ep", "sonic_ep, apportion"
STATIC = "sonic_ep, static"
PEFT_LORA, OUR_LORA = "PEFT, grouped_mm", "sonic_ep, fuse_lora"
WARM_UP, UNTIMED = 8, 2
LEARNING_RATE = 1e-5  # small, so that routing stays as at the start: contestants train one after the other


class InTurns(EPImplementation):
    """Transformers' all-to-all and ours on the same module of experts. `chosen` says which of them runs."""

    chosen = STOCK

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.stock = AllToAllEP(experts, ep_mesh, tp_mesh)
        self.ours = implementation_with(SonicEPOptions())(experts, ep_mesh, tp_mesh)
        every_pair = RoundingConfig(mode="off", capacity_factor=ep_mesh.size())
        static = SonicEPOptions(rounding=every_pair, transport=TransportConfig(buffers="static"))
        self.static = implementation_with(static)(experts, ep_mesh, tp_mesh)

    def __call__(self, *args: Tensor) -> Tensor:
        return {STOCK: self.stock, STATIC: self.static}.get(InTurns.chosen, self.ours)(*args)


class Training:
    contestants: tuple[str, ...]

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        register()
        EPImplementationInterface.register("in_turns", InTurns)
        config = model_config(options)
        ranks = dist.get_world_size()
        family = SHAPES[options.shape][0]
        self.contestants = (STOCK, OURS, *self._on_gpus(options, ranks), ROUNDED)
        self.model: Any = family.model.from_pretrained(
            None,
            config=config,
            state_dict={},  # nothing is loaded: random weights
            dtype=torch.bfloat16,
            experts_implementation="grouped_mm",
            attn_implementation=family.attention,
            distributed_config=DistributedConfig.from_dict(
                {"fsdp_size": ranks, "ep_size": ranks, "ep_implementation": "in_turns"}
            ),
        )
        self.model.train()
        self.config = config
        self.experts = registered_experts(self.model, "there is nothing to measure")
        round_tokens(self.model, RoundingConfig(mode="apportion"))
        self.rounding = {name: getattr(module, TOKEN_ROUNDING) for name, module in self.experts.items()}
        groups = groups_by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
        self.ids = own_sequences(config, options)

    @staticmethod
    def _on_gpus(options: argparse.Namespace, ranks: int) -> tuple[str, ...]:
        """Static buffers are in memory that peers write to, and one rank has none."""
        return (STATIC,) if options.device == "cuda" and ranks > 1 else ()

    def choose(self, contestant: str) -> None:
        InTurns.chosen = contestant
        for name, module in self.experts.items():
            setattr(module, TOKEN_ROUNDING, self.rounding[name] if contestant == ROUNDED else None)

    def num_programs(self) -> int:
        return sum(num_programs(module) for module in self.experts.values())

    def loss_with(self, contestant: str) -> float:
        self.choose(contestant)
        with torch.no_grad():
            return float(self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss)

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class LoRATraining(Training):
    contestants = (PEFT_LORA, OUR_LORA)

    def __init__(self, options: argparse.Namespace) -> None:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # not among our extras

        register()
        self.config = model_config(options)
        family = SHAPES[options.shape][0]
        implementations = {"experts_implementation": "grouped_mm", "attn_implementation": family.attention}
        with torch.device(options.device):
            model: Any = family.model._from_config(self.config, dtype=torch.bfloat16, **implementations)
        adapters = LoraConfig(
            r=options.lora,
            target_modules=[] if options.experts_only else ["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,  # B of zero would have no work for A
        )
        self.experts = registered_experts(model, "there is nothing to measure")
        self.model = get_peft_model(model, adapters).train()
        fuse_lora(self.model)  # where sonic_ep computes the experts; else its wrappers are PEFT's own
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        self.ids = own_sequences(self.config, options)

    def choose(self, contestant: str) -> None:
        implementation = "sonic_ep" if contestant == OUR_LORA else "grouped_mm"
        self.model.get_base_model().set_experts_implementation(implementation)


class Block:
    """One MoE block with this rank's experts, without FSDP, which treats all contestants alike."""

    def __init__(self, config: Any, options: argparse.Namespace) -> None:
        ranks = dist.get_world_size()
        grid = init_device_mesh(options.device, (ranks, 1), mesh_dim_names=("ep", "tp"))
        local = copy.deepcopy(config)
        local.num_experts, local._experts_implementation = config.num_experts // ranks, "grouped_mm"
        family = SHAPES[options.shape][0]
        with torch.device(options.device):
            self.block: Any = family.block(config)
            experts: Any = family.experts(local)
        self.block.experts = experts
        experts._is_expert_parallel = True
        experts.forward = InTurns(experts, grid["ep"], grid["tp"])
        self.block.bfloat16().train()
        generator = torch.Generator(options.device).manual_seed(dist.get_rank())
        for parameter in self.block.parameters():
            parameter.data.normal_(std=0.02, generator=generator)
        for parameter in (self.block.gate if family is QWEN3 else self.block.router).parameters():
            dist.broadcast(parameter.data, 0)
        size = (1, options.tokens, config.hidden_size)
        self.x = torch.randn(size, device=options.device, generator=generator).bfloat16().requires_grad_()
        self.dout = torch.randn(size, device=options.device, generator=generator).bfloat16()
        round_tokens(self.block, RoundingConfig(mode="apportion"))
        self.rounding = getattr(experts, TOKEN_ROUNDING)

    def choose(self, contestant: str) -> None:
        InTurns.chosen = contestant
        setattr(self.block.experts, TOKEN_ROUNDING, self.rounding if contestant == ROUNDED else None)

    def _out(self) -> Tensor:
        out = self.block(self.x)
        return out[0] if isinstance(out, tuple) else out

    def step(self) -> None:
        torch.autograd.grad(self._out(), [self.x, *self.block.parameters()], self.dout)

    def num_programs(self) -> int:
        return num_programs(self.block.experts)

    def saved_bytes(self) -> int:
        """What is saved for backward and is neither a weight nor the block's input."""
        saved: dict[int, int] = {}

        def note(values: Tensor) -> Tensor:
            storage = values.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return values

        with torch.autograd.graph.saved_tensors_hooks(note, lambda values: values):
            out = self._out()
        own = {each.untyped_storage().data_ptr() for each in (self.x, *self.block.parameters())}
        total = sum(size for address, size in saved.items() if address not in own)
        torch.autograd.grad(out, [self.x], self.dout)
        return total


def race(training: Training, clock: Clock, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    names = [name for name in training.contestants if options.only is None or name in options.only]
    turns: dict[str, list[dict[str, float]]] = {name: [{} for _ in range(options.rounds)] for name in names}
    on_gpu = options.device == "cuda"
    first_losses = {name: training.loss_with(name) for name in names}
    parts: list[tuple[str, Any]] = [("step", training)]
    if not options.lora:
        parts.append(("layer", Block(training.config, options)))
    for part, what in parts:
        steps: dict[str, int] = {}
        for name in names:
            what.choose(name)
            estimate = clock.largest({"ms": clock.back_to_back(what.step, 2, untimed=WARM_UP)[0]})["ms"]
            steps[name] = max(2, round(1000 * options.seconds / estimate))
            if dist.get_rank() == 0:
                print(f"{name}: {estimate:.1f} ms a {part}", flush=True)
        gc.collect()
        for i in range(options.rounds):
            for name in names:
                what.choose(name)
                train_until_traced(what.step, what.num_programs, clock)
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                turn, host = turns[name][i], "host" if part == "step" else "layer_host"
                timed = turn_without_tracing(what.step, steps[name], what.num_programs, clock, untimed=UNTIMED)
                turn[part], turn[host], turn[f"traced_in_{part}s"] = timed
                if part == "layer":
                    turn["saved_mib"] = what.saved_bytes() / 2**20
                elif on_gpu:
                    turn["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    medians = {
        name: {key: statistics.median(turn[key] for turn in each) for key in each[0]} for name, each in turns.items()
    }
    results = {name: clock.largest(each) for name, each in medians.items()}
    c = training.config
    flops = 18 * options.tokens * c.num_experts_per_tok * c.hidden_size * getattr(c, SHAPES[options.shape][0].width)
    for name, each in results.items():
        each["first_loss"] = first_losses[name]
        if "layer" in each:
            each["layer_tflops"] = flops / each["layer"] / 1e9
        each["tokens_per_second"] = 1000 * options.tokens / each["step"]
    return results


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="qwen3_30b_a3b", shapes=SHAPES, tokens=8192, seconds=2.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="rank of adapters, instead of all weights")
    parser.add_argument("--experts-only", action="store_true", help="with --lora: no adapters of attention")
    return parsed_options(parser)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")  # DTensor and transformers warn of each other
    logging.basicConfig()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    start_rank(options.device)
    training = LoRATraining(options) if options.lora else Training(options)
    results = race(training, Clock(EPGroup(), options.device), options)
    if dist.get_rank() == 0:
        sizes = {key: getattr(options, key) for key in ("shape", "layers", "tokens", "length", "lora", "experts_only")}
        record = {"command": sys.argv, "machine": machine(options.device), "ranks": dist.get_world_size()}
        if options.out is not None:
            options.out.write_text(json.dumps({**record, **sizes, "contestants": results}, indent=1) + "\n")
        for name, each in results.items():
            print(f"{name:24}", " ".join(f"{key} {value:.4g}" for key, value in each.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
