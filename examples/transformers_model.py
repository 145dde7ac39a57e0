"""The model that examples/finetune_transformers.py trains: loaded with our experts, sharded, adapted, saved."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corpus import VOCABULARY
from parallel import Mesh
from sonic_ep.config import RoundingConfig

# The default model: Qwen3-MoE, small enough for a CPU.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")


def build(path: str | Path, mesh: Mesh, rounding: RoundingConfig) -> Any:
    """The model of a folder on this rank's device, with our experts, rounded in training. A collective.

    Several processes shard it by FSDP2, and those of an EP group divide its experts.
    """
    from transformers import AutoModelForCausalLM

    from sonic_ep.integrations.transformers import check, register, round_tokens

    register()
    parallel: dict[str, Any] = {}
    if mesh.world.size > 1:
        from transformers.distributed import DistributedConfig

        # torch warns of each norm and each gathered weight that it reduces over two dimensions of a mesh in turn.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        parallel["distributed_config"] = DistributedConfig.from_dict(
            {"fsdp_size": mesh.world.size, "ep_size": mesh.ep.size, "ep_implementation": "sonic_ep"}
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation="sonic_ep",
        dtype=torch.float32,
        **parallel,
    )
    check(model)
    round_tokens(model, rounding)
    if mesh.world.size == 1:
        model.to(mesh.device)
    return model


def write_tiny_model(path: Path, mesh: Mesh, seed: int) -> Path:
    """Write a model with random weights, once a run. Every process then loads it as it would a trained one."""
    if mesh.is_main and not path.exists():
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY)).save_pretrained(path)
    mesh.wait()
    return path


def add_lora(model: Any, rank: int, seed: int) -> Any:
    """The model with adapters of experts and attention, which alone are trained. Every process holds all of them."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]  # not among our extras

    from sonic_ep.integrations.transformers import fuse_lora

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=ATTENTION,
        target_parameters=[name for name, _ in model.named_parameters() if name.endswith(EXPERTS)],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    fuse_lora(model)
    return model


@torch.no_grad()
def average_adapters(model: nn.Module, mesh: Mesh) -> None:
    """Turn the gradients of adapters into those of the mean loss over the global batch. A collective.

    A process has gradients for its own experts, from tokens of all. FSDP2 averages those of the weights that it shards.
    """
    adapters = [each for each in model.parameters() if each.requires_grad and not hasattr(each, "placements")]
    if mesh.world.size == 1 or not adapters:
        return
    given = [torch.zeros_like(each) if each.grad is None else each.grad for each in adapters]
    mean = mesh.mean(torch.cat([gradient.flatten() for gradient in given]))
    for adapter, part in zip(adapters, mean.split([each.numel() for each in adapters]), strict=True):
        adapter.grad = part.view_as(adapter)


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Mean loss in nats of the next byte, on a GPU in bfloat16 where autocast takes it."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        return model(input_ids=windows, labels=windows, use_cache=False).loss


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The trained parameters in lists of one device mesh each: torch's kernels over lists take no two."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def save(model: Any, path: str | Path, run: Path, mesh: Mesh) -> None:
    """Write `model/`, which transformers loads without us, and of LoRA `adapter/` too, merged in the model.

    path: the folder from which `build` took the model. A collective. LoRA's model is of no use afterwards.
    """
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(run / "model")
    elif mesh.is_main:
        # Without the others, of which PEFT would gather all shards.
        adapters = {name: each for name, each in model.state_dict().items() if "lora_" in name}
        model.save_pretrained(run / "adapter", state_dict=adapters)
        merged = model if mesh.world.size == 1 else whole_model(path, run / "adapter")
        merged.merge_and_unload().save_pretrained(run / "model")
    mesh.wait()


def whole_model(path: str | Path, adapter: Path) -> Any:
    """The model of a folder with an adapter, in this process alone and on the CPU: PEFT merges no shards."""
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), adapter)
