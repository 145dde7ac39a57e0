"""Train a small MoE model under DeepSpeed twice, side by side: with DeepSpeed's own MoE and with sonic_ep's.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/deepspeed_moe.py
    deepspeed --num_gpus 4 examples/deepspeed_moe.py            the same; on a host without GPUs 4 CPU processes
    ... examples/deepspeed_moe.py --zero 2 --ep-size 2 --steps 100 --text book.txt
    ... examples/deepspeed_moe.py --rounding                    ours with token rounding: its losses differ
    ... examples/deepspeed_moe.py --model qwen3-moe --zero 3    a model of Hugging Face, through AutoEP

The model is the byte language model of train.py with deepspeed.moe.layer.MoE in its blocks, residual where train.py has
a shared expert. One line differs between the two, the class of that layer. Both start from the same weights and see the
same batches, so without rounding their losses agree to rounding errors.

--model qwen3-moe is a tiny Qwen3-MoE with random weights instead, whose experts DeepSpeed's AutoEP divides among the
processes; with `AutoEP.install()` before deepspeed.initialize it does so with our layer. It needs transformers as well.

On a host with GPUs it runs on those over NCCL in bf16, else on the CPU over gloo in fp32, where no compiler is needed.
Needs the extras deepspeed and train.
"""

import argparse
import importlib
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import VOCABULARY, Corpus, load_corpus
from language_model import LanguageModel, ModelConfig, next_byte_loss
from parallel import check_torchrun, choose_device, positive, read_launch
from sonic_ep import EPGroup, MoEConfig, RoundingConfig, load_config
from sonic_ep.extras import require_extra

AUX_WEIGHT = 0.01


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deepspeed_moe.py", description="DeepSpeed with its MoE layer and with sonic_ep's, side by side."
    )
    parser.add_argument("--model", default="bytes", choices=sorted(MODELS), help="what to train (default: bytes)")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch", type=positive, default=32, help="sequences a step over all processes (default: 32)")
    parser.add_argument("--seq", type=positive, default=128, help="bytes a sequence (default: 128)")
    parser.add_argument("--layers", type=positive, default=2, help="transformer layers (default: 2)")
    parser.add_argument("--config", default="tiny", help="sizes of the MoE layers, as of train.py (default: tiny)")
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3), help="ZeRO stage (default: 1)")
    parser.add_argument("--ep-size", type=positive, help="processes that divide the experts (default: all)")
    parser.add_argument("--rounding", action="store_true", help="token rounding in sonic_ep's layers")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--text", help="a file or folder to learn from (default: Python's standard library)")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for sizes that do not divide each other, and for a stage that DeepSpeed's MoE layer has not."""
    if options.zero == 3 and options.model == "bytes":
        raise ValueError("--zero 3 is for AutoEP: take --model qwen3-moe, or --zero 0, 1 or 2")
    ep_size, experts = options.ep_size or world_size, load_config(options.config).E
    if options.batch % world_size:
        raise ValueError(f"--batch {options.batch} is not a multiple of {world_size} processes; take {world_size}")
    if world_size % ep_size or experts % ep_size:
        raise ValueError(
            f"--ep-size {ep_size} divides not both {world_size} processes and the {experts} experts of "
            f"--config {options.config}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Start DeepSpeed, train both models, print their losses."""
    options, launch = parse(arguments), read_launch()
    try:
        check(options, launch.world_size)
        check_torchrun("examples/deepspeed_moe.py")
        require_extra("deepspeed", "deepspeed")
        if options.model == "qwen3-moe":
            importlib.import_module("transformers")
        device = choose_device("cuda" if torch.cuda.is_available() else "cpu", launch)
        corpus = load_corpus(options.text, seq=options.seq)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise SystemExit(f"deepspeed_moe.py: error: {error}") from None
    warnings.filterwarnings("ignore")  # DeepSpeed uses names that torch has renewed
    start_deepspeed(device)
    train(options, device, corpus)
    if device.type == "cpu":
        # gloo's threads take the GIL to let go of the last collective's tensors, and a process that ends before aborts.
        time.sleep(0.1)
    importlib.import_module("deepspeed.comm").destroy_process_group()  # torch's leaves DeepSpeed holding groups


def start_deepspeed(device: torch.device) -> None:
    """torch.distributed and DeepSpeed on it, without the shared-memory collectives that it would compile on a CPU."""
    import deepspeed

    importlib.import_module("deepspeed.utils").logger.setLevel(logging.ERROR)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # Not `import deepspeed.comm.torch as ...`: that binds torch itself.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)


def train(options: argparse.Namespace, device: torch.device, corpus: Corpus) -> None:
    """Train both models in turn, a step each, and print a line a step."""
    say = print if dist.get_rank() == 0 else lambda *_: None
    trainers = [Trainer(options, device, ours=ours) for ours in (False, True)]
    say(f"{dist.get_world_size()} processes on {device.type}, experts divided among {ep_size_of(options)}")
    say(f"text: {corpus.source}")
    say("step   loss: stock  sonic_ep   gradient norm: stock  sonic_ep   ms a step: stock  sonic_ep")
    for step in range(options.steps):
        windows = corpus.training_windows(step, seed=options.seed, batch=options.batch, seq=options.seq)
        own = windows.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        stock, ours = (trainer.step(own) for trainer in trainers)
        losses = f"{stock.loss:11.6f}  {ours.loss:8.6f}"
        norms = f"{stock.grad_norm:20.5f}  {ours.grad_norm:8.5f}"
        say(f"{step + 1:4d}   {losses}   {norms}   {stock.ms:16.1f}  {ours.ms:8.1f}")


def ep_size_of(options: argparse.Namespace) -> int:
    return options.ep_size or dist.get_world_size()


class GatedMLP(nn.Module):
    """The template of an expert, as Llama's: both layers read gate, up and down from it."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def arguments_of(config: MoEConfig, options: argparse.Namespace) -> dict[str, Any]:
    """What both layers are built with."""
    return {
        "hidden_size": config.d,
        "expert": GatedMLP(config.d, config.n),
        "num_experts": config.E,
        "ep_size": ep_size_of(options),
        "k": config.K,
        "use_residual": config.shared_n > 0,
        "drop_tokens": False,
        "top2_2nd_expert_sampling": False,
    }


def deepspeed_layer(config: MoEConfig, options: argparse.Namespace) -> nn.Module:
    from deepspeed.moe.layer import MoE

    return MoE(**arguments_of(config, options))


def sonic_ep_layer(config: MoEConfig, options: argparse.Namespace) -> nn.Module:
    from sonic_ep.integrations.deepspeed import MoE, SonicEPOptions

    rounding = RoundingConfig() if options.rounding else None
    return MoE(**arguments_of(config, options), options=SonicEPOptions(rounding=rounding))


@dataclass(frozen=True, slots=True)
class Output:
    """What a block of the language model expects of its MoE layer."""

    y: Tensor
    aux_loss: Tensor
    stats: None = None


class InBlock(nn.Module):
    """A DeepSpeed layer, its triple turned into what the block expects."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Output:
        y, l_aux, _ = self.layer(x)
        return Output(y, AUX_WEIGHT * l_aux)


def byte_model(options: argparse.Namespace, ours: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model of train.py, its MoE layers replaced; nothing to add to the config."""
    make = sonic_ep_layer if ours else deepspeed_layer
    torch.manual_seed(options.seed + dist.get_rank())  # each rank its own experts; DeepSpeed broadcasts the rest
    config = ModelConfig(moe=load_config(options.config), layers=options.layers, head_dim=32, shared_every=2)
    model = LanguageModel(config, seq=options.seq, group=EPGroup.alone(), seed=options.seed, device=torch.device("cpu"))
    for layer, block in enumerate(model.blocks):
        block.moe = InBlock(make(config.moe_of_layer(layer), options))
    return model, {}


def byte_loss(engine: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    output = engine(windows[:, :-1])
    return next_byte_loss(output, windows), output.aux_loss


def qwen3_moe(options: argparse.Namespace, ours: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A Qwen3-MoE over bytes with the sizes of --config, and the section that makes DeepSpeed divide its experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from sonic_ep.integrations.deepspeed import AutoEP, SonicEPOptions

    if ours:
        AutoEP.install(SonicEPOptions(rounding=RoundingConfig() if options.rounding else None))
    else:
        AutoEP.uninstall()
    sizes = load_config(options.config)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.d,
        "moe_intermediate_size": sizes.n,
        "num_experts": sizes.E,
        "num_experts_per_tok": sizes.K,
        "norm_topk_prob": True,
        "num_hidden_layers": options.layers,
        "num_attention_heads": sizes.d // 32,
        "num_key_value_heads": sizes.d // 32,
        "head_dim": 32,
        "max_position_embeddings": options.seq + 1,
        "output_router_logits": True,
        "router_aux_loss_coef": AUX_WEIGHT,
    }
    torch.manual_seed(options.seed)  # whole models, equal on all ranks; AutoEP takes each rank's experts from it
    section = {"enabled": True, "autoep_size": ep_size_of(options), "preset_model": "qwen3_moe"}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)), {"expert_parallel": section}


def hugging_face_loss(engine: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    output = engine(input_ids=windows, labels=windows, use_cache=False)
    aux_loss = AUX_WEIGHT * output.aux_loss
    return output.loss - aux_loss, aux_loss


# A model with what it adds to DeepSpeed's config, for stock or for us; its loss and its weighted auxiliary loss.
MODELS = {"bytes": (byte_model, byte_loss), "qwen3-moe": (qwen3_moe, hugging_face_loss)}


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: of all ranks. grad_norm: before clipping; nan where DeepSpeed does not tell. ms: milliseconds."""

    loss: float
    grad_norm: float
    ms: float


class Trainer:
    """One model in its engine."""

    def __init__(self, options: argparse.Namespace, device: torch.device, *, ours: bool) -> None:
        import deepspeed

        self.device = device
        config = {
            "train_micro_batch_size_per_gpu": options.batch // dist.get_world_size(),
            "zero_optimization": {"stage": options.zero},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": device.type == "cuda"},
            # torch's AdamW: DeepSpeed's would be compiled first.
            "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "torch_adam": True}},
            "steps_per_print": 10**9,
        }
        build, self.loss_of = MODELS[options.model]
        model, section = build(options, ours)
        self.engine, *_ = deepspeed.initialize(model=model, config={**config, **section})

    def step(self, windows: Tensor) -> StepResult:
        """One training step on this rank's windows."""
        start = time.perf_counter()
        loss, aux_loss = self.loss_of(self.engine, windows)
        self.engine.backward(loss + aux_loss)
        self.engine.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        norm = self.engine.get_global_grad_norm()
        seconds = time.perf_counter() - start
        return StepResult(
            float(mean) / dist.get_world_size(), float("nan") if norm is None else float(norm), 1000 * seconds
        )


if __name__ == "__main__":
    main()
