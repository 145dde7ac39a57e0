"""Training steps of DeepSpeed with Qwen3-30B-A3B's layers: its MoE layer, its AutoEP layer and ours for both, in turns.

    torchrun --nproc-per-node 2 benchmarks/deepspeed_layer.py --out deepspeed_step_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/deepspeed_layer.py --device cpu --shape tiny --tokens 64 --length 32

A Qwen3MoeForCausalLM of transformers with `--layers` layers, in DeepSpeed's engine: EP over all ranks, ZeRO 1, bf16,
torch's fused AdamW, and the same initial weights for all. AutoEP replaces the model's MoE blocks itself; the MoE layer
takes their place, and its l_aux joins the loss. The learning rate is small, so that routing stays as at the start
and contestants compute on alike routings. Contestants:

    MoE                         stock, with drop_tokens=False: only then it computes every token
    sonic_ep MoE                ours in its place
    sonic_ep MoE, apportion     ours, with token rounding
    AutoEP                      stock, as it is by default
    AutoEP, fused               stock, with its fused combine, one GEMM for gate and up, and its asynchronous read of
                                sizes
    sonic_ep AutoEP             ours, by AutoEP.install()
    sonic_ep AutoEP, apportion  ours, with token rounding

A round builds one model after the other, each in the memory of the last, and each takes its turn of --seconds. Medians
over --rounds, and the largest of all ranks, in milliseconds unless said otherwise:

    step, host            forward, backward and engine.step of --micro-batches, back to back; its calls until they
                          return
    tokens_per_second     of one GPU
    mfu                   pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib              the most that torch allocated in a turn of steps
    layer, layer_host     forward and backward of the first MoE layer on random rows, with its router, back to back; its
                          calls until they return
    layer_tflops          18 T K d n / layer, in TFLOP/s of a rank: what tokens need, without the router
    layer_device          the same, launched while the device is busy: forward and backward, each from when all devices
                          are free until this one is done. Stock layers read sizes on the host, so that launches behind
                          the read cannot be hidden; here they take the sizes of the call before, and AutoEP then
                          does not exchange its counts
    saved_mib             what one MoE layer holds between forward and backward, without input and output
    programs              the number of the first MoE layer of ours; 0: its code runs, and the log says why
    traced_in_turn        programs that are new in the steps that count; a turn with one is repeated, at most twice
    first_loss            of the first rank before any step, without l_aux: contestants without rounding agree but for
                          bf16
    turns                 the number of turns

With --code ours run their code. A contestant that fails is in `errors`, and the others go on.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from hugging_face_models import model_config, own_sequences
from pretrain_model import DENSE
from runs import group_of_ranks
from sonic_ep import RoundingConfig, load_config
from sonic_ep.kernels.common.replaced import replaced
from step_race import LayerAlone, Race, StepModel, parsed_options, release_memory, step_parser

SHAPES = ("qwen3_30b_a3b", "tiny")
AUX_WEIGHT = 0.001
LEARNING_RATE = 1e-5
ROUNDING = RoundingConfig(mode="apportion")
PACKAGES = ("deepspeed", "transformers")
SIZES = ("micro_batches", "code")


class Kind(NamedTuple):
    """section: fields of `expert_parallel`, None for the MoE layer. ours, rounding, programs: of the layers."""

    section: dict[str, Any] | None
    ours: bool = False
    rounding: RoundingConfig | None = None
    programs: bool = True

    def num_programs(self, block: Any) -> int | None:
        """Returns the number of a MoE block, None if it is not ours."""
        layer = block.moe.deepspeed_moe if isinstance(block, Block) else block
        return layer._experts.num_programs if self.ours else None


FUSED: dict[str, Any] = {"combine_impl": "fused_weighted_sum", "gate_up_impl": "fused", "async_split_plan": True}
CONTESTANTS = {
    "MoE": Kind(None),
    "sonic_ep MoE": Kind(None, ours=True),
    "sonic_ep MoE, apportion": Kind(None, ours=True, rounding=ROUNDING),
    "AutoEP": Kind({}),
    "AutoEP, fused": Kind(FUSED),
    "sonic_ep AutoEP": Kind({}, ours=True),
    "sonic_ep AutoEP, apportion": Kind({}, ours=True, rounding=ROUNDING),
}


class GatedMLP(nn.Module):
    """The template of an expert."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, n, bias=False)
        self.up_proj = nn.Linear(d, n, bias=False)
        self.down_proj = nn.Linear(n, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer like DeepSpeed's MoE as a MoE block of transformers, with that block's weights."""

    def __init__(self, kind: Kind, config: Any, block: Any) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE as StockMoE

        from sonic_ep.integrations.deepspeed import MoE, SonicEPOptions

        options = SonicEPOptions(rounding=kind.rounding, record_launches=kind.programs)
        make: Any = partial(MoE, options=options) if kind.ours else StockMoE
        weight, ranks = block.gate.weight, dist.get_world_size()
        with weight.device:
            self.moe: Any = make(
                config.hidden_size,
                GatedMLP(config.hidden_size, config.moe_intermediate_size),
                num_experts=config.num_experts,
                ep_size=ranks,
                k=config.num_experts_per_tok,
                drop_tokens=False,
                top2_2nd_expert_sampling=False,
            )
        self.moe.to(weight.dtype).load_state_dict(entries_of(block, config.num_experts // ranks))
        self.l_aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.l_aux, _ = self.moe(x)
        return y


def entries_of(block: Any, num_local_experts: int) -> dict[str, Tensor]:
    """Returns the weights of a block of transformers, with this rank's experts, by the keys of DeepSpeed's MoE."""
    entries = {"deepspeed_moe.gate.wg.weight": block.gate.weight}
    for local in range(num_local_experts):
        number = dist.get_rank() * num_local_experts + local
        gate, up = block.experts.gate_up_proj[number].chunk(2)
        values = {"gate_proj": gate, "up_proj": up, "down_proj": block.experts.down_proj[number]}
        prefix = f"deepspeed_moe.experts.deepspeed_experts.{local}"
        entries |= {f"{prefix}.{name}.weight": value for name, value in values.items()}
    return entries


class Model(StepModel):
    """A contestant's model in its engine."""

    def __init__(self, family: tuple[str, ...], options: argparse.Namespace) -> None:
        self.kind, self.options = CONTESTANTS[family[0]]._replace(programs=not options.code), options
        config = model_config(options)
        self.ids = own_sequences(config, options)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        with torch.device(options.device):
            model: Any = Qwen3MoeForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
        if self.kind.section is None:
            for layer in model.model.layers:
                layer.mlp = Block(self.kind, config, layer.mlp)
            self.run = engine(model, options)
        else:
            section = {"enabled": True, "autoep_size": dist.get_world_size(), "preset_model": "qwen3_moe"}
            with autoep_of(self.kind):
                self.run = engine(model, options, expert_parallel=section | self.kind.section)
        self.blocks = [layer.mlp for layer in self.run.module.model.layers]

    def loss(self) -> float:
        with torch.no_grad():
            return float(self.run.module(input_ids=self.ids, labels=self.ids, use_cache=False).loss)

    def step(self) -> None:
        for _ in range(self.options.micro_batches):
            loss = self.run(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            if self.kind.section is None:
                loss = loss + AUX_WEIGHT * torch.stack([block.l_aux for block in self.blocks]).sum()
            self.run.backward(loss)
            self.run.step()  # the optimizer's, after the last of them

    def num_programs(self) -> int:
        return sum(self.kind.num_programs(block) or 0 for block in self.blocks)

    def more_figures(self) -> dict[str, float]:
        programs = self.kind.num_programs(self.blocks[0])
        return {} if programs is None else {"programs": programs}

    @contextmanager
    def layer_alone(self) -> Generator[LayerAlone]:
        block, parameters = self.blocks[0], [each for each in self.blocks[0].parameters() if each.requires_grad]
        generator = torch.Generator(self.options.device).manual_seed(dist.get_rank())
        size = (*self.ids.shape, self.run.module.config.hidden_size)
        x, dout = (
            torch.randn(size, device=self.options.device, generator=generator).to(parameters[0].dtype) for _ in range(2)
        )
        x.requires_grad_()
        yield LayerAlone(
            forward=lambda: block(x),
            backward=lambda out: torch.autograd.grad(out, [x, *parameters], dout, allow_unused=True),
            known_sizes=nullcontext if self.kind.ours else partial(known_sizes, block),
        )

    def free(self) -> None:
        """Gives memory back, whoever still refers to the model: autograd's nodes do."""
        run = self.run
        tensors = [*run.module.parameters(), *run.module.buffers(), *tensors_in(vars(run.optimizer))]
        tensors += tensors_in([run.optimizer.optimizer.state, run.optimizer.optimizer.param_groups])
        parts = [*run.module.parameters(), *run.module.modules(), run.optimizer, run]
        for tensor in tensors:
            tensor.grad = None
            tensor.untyped_storage().resize_(0)
        for part in [*parts, self]:
            vars(part).clear()
        release_memory()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


@contextmanager
def autoep_of(kind: Kind) -> Generator[None]:
    """A context in which AutoEP builds the layers of a contestant."""
    from sonic_ep.integrations.deepspeed import AutoEP, SonicEPOptions

    if kind.ours:
        AutoEP.install(SonicEPOptions(rounding=kind.rounding, record_launches=kind.programs))
    try:
        yield
    finally:
        AutoEP.uninstall()


def engine(model: nn.Module, options: argparse.Namespace, **more: Any) -> Any:
    import deepspeed

    adam = {"lr": LEARNING_RATE, "torch_adam": True, "fused": True}
    settings = {
        "train_micro_batch_size_per_gpu": options.tokens // options.length,
        "gradient_accumulation_steps": options.micro_batches,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": options.device == "cuda"},
        "optimizer": {"type": "AdamW", "params": adam},
        "steps_per_print": 10**9,
        **more,
    }
    return deepspeed.initialize(model=model, config=settings)[0]


@contextmanager
def known_sizes(block: Any) -> Generator[None]:
    """A context in which a stock layer does not wait for sizes.

    It takes the sizes of the call before, so launches can be hidden as in ours. The input has to be the same.
    """
    from deepspeed.module_inject import auto_ep_layer

    known: list[Any] = []
    with ExitStack() as stack:
        if isinstance(block, Block):
            gate = block.moe.deepspeed_moe.gate
            gated = gate.forward

            def with_known_capacity(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
                l_aux, capacity, *rest = gated(*args, **kwargs)
                known[:] = known or [int(capacity)]
                return l_aux, known[0], *rest

            stack.enter_context(replaced(gate, forward=with_known_capacity))
        else:
            compute = auto_ep_layer.compute_split_plan

            def known_plan(*args: Any, **kwargs: Any) -> Any:
                known[:] = known or [compute(*args, **kwargs)]
                return known[0]

            stack.enter_context(replaced(auto_ep_layer, compute_split_plan=known_plan))
            stack.enter_context(replaced(block, async_split_plan=False))
        yield


@contextmanager
def deepspeed_of(device: str) -> Generator[None]:
    """DeepSpeed on the ranks of this run, on the CPU with what it needs there."""
    if device == "cpu":
        from tests.helpers.deepspeed_cpu import deepspeed_world

        with deepspeed_world():
            yield
        return
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, verbose=False)
    yield


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="qwen3_30b_a3b", shapes=SHAPES, tokens=8192, seconds=2.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="of --tokens each, before the optimizer's step")
    parser.add_argument("--code", action="store_true", help="ours by their code, without programs")
    return parsed_options(parser)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    group_of_ranks(options.device)
    families = [(name,) for name in CONTESTANTS]
    build: Callable[..., Model] = partial(Model, options=options)
    with deepspeed_of(options.device):
        Race(
            families,
            build,
            options,
            moe=load_config(options.shape),
            dense=DENSE[options.shape],
            sizes=SIZES,
            packages=PACKAGES,
            forwards=options.micro_batches,
        ).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
