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
    saved_mib         what one MoE block holds between forward and backward, without input and output
    mfu               pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib          the most that torch allocated in a turn of steps
    traced_in_turn    programs that are new in the steps that count; a turn with one is repeated, at most twice
    first_loss        of the first rank, before any step: contestants without rounding agree but for bf16
"""

import argparse
import copy
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (  # pyright: ignore[reportMissingImports]  # in 5.23
    AllToAllEP,
    EPImplementation,
    EPImplementationInterface,
)

from hugging_face_models import QWEN3, SHAPES, model_config, own_sequences
from pretrain_model import groups_by_mesh
from runs import group_of_ranks, leave
from sonic_ep import RoundingConfig, TransportConfig, load_config
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.transformers import fuse_lora, register, round_tokens
from sonic_ep.integrations.transformers.expert_parallel import implementation_with
from sonic_ep.integrations.transformers.experts import TOKEN_ROUNDING, num_programs, registered_experts
from step_race import LayerAlone, Race, StepModel, parsed_options, step_parser

STOCK, OURS, ROUNDED = "all_to_all, grouped_mm", "sonic_ep", "sonic_ep, apportion"
STATIC = "sonic_ep, static"
PEFT_LORA, OUR_LORA = "PEFT, grouped_mm", "sonic_ep, fuse_lora"
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


def contestants(options: argparse.Namespace) -> tuple[str, ...]:
    if options.lora:
        return PEFT_LORA, OUR_LORA
    # Static buffers are in memory that peers write to, and one rank has none.
    has_peers = options.device == "cuda" and dist.get_world_size() > 1
    return STOCK, OURS, *((STATIC,) if has_peers else ()), ROUNDED


class Training(StepModel):
    def __init__(self, _: tuple[str, ...], options: argparse.Namespace) -> None:
        self.options = options
        register()
        EPImplementationInterface.register("in_turns", InTurns)
        config = model_config(options)
        ranks = dist.get_world_size()
        family = SHAPES[options.shape][0]
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
        self.experts = registered_experts(self.model, "there is nothing to measure")
        round_tokens(self.model, RoundingConfig(mode="apportion"))
        self.rounding = {name: getattr(module, TOKEN_ROUNDING) for name, module in self.experts.items()}
        groups = groups_by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
        self.ids = own_sequences(config, options)
        self.block = Block(config, options)

    def choose(self, name: str) -> None:
        InTurns.chosen = name
        for key, module in self.experts.items():
            setattr(module, TOKEN_ROUNDING, self.rounding[key] if name == ROUNDED else None)

    def num_programs(self) -> int:
        return sum(num_programs(module) for module in self.experts.values())

    def loss(self) -> float:
        with torch.no_grad():
            return float(self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss)

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def layer_alone(self) -> Generator[LayerAlone | None]:
        yield self.block.alone(InTurns.chosen == ROUNDED)


class LoRATraining(Training):
    def __init__(self, _: tuple[str, ...], options: argparse.Namespace) -> None:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # not among our extras

        register()
        config = model_config(options)
        family = SHAPES[options.shape][0]
        implementations = {"experts_implementation": "grouped_mm", "attn_implementation": family.attention}
        with torch.device(options.device):
            model: Any = family.model._from_config(config, dtype=torch.bfloat16, **implementations)
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
        self.ids = own_sequences(config, options)

    def choose(self, name: str) -> None:
        implementation = "sonic_ep" if name == OUR_LORA else "grouped_mm"
        self.model.get_base_model().set_experts_implementation(implementation)

    @contextmanager
    def layer_alone(self) -> Generator[None]:
        yield None


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

    def alone(self, rounded: bool) -> LayerAlone:
        setattr(self.block.experts, TOKEN_ROUNDING, self.rounding if rounded else None)
        inputs = [self.x, *self.block.parameters()]
        return LayerAlone(self._out, lambda out: torch.autograd.grad(out, inputs, self.dout))

    def _out(self) -> Tensor:
        out = self.block(self.x)
        return out[0] if isinstance(out, tuple) else out


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
    group_of_ranks(options.device)
    _, config, dense = SHAPES[options.shape]
    Race(
        [contestants(options)],
        partial(LoRATraining if options.lora else Training, options=options),
        options,
        moe=load_config(config),
        dense=None if options.lora else dense,  # frozen weights have no gradients
        sizes=("lora", "experts_only"),
    ).run()
    leave()


if __name__ == "__main__":
    main()
