"""Every MoE family of the installed transformers, and a tiny model of each, randomly initialised.

A family is a folder of transformers/models whose config has experts. `FAMILIES` names them without importing any.
"""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 12
_MAX_PARAMETERS = 10_000_000  # a field that the tables below do not know has its published size: do not allocate that
_EXPERT_FIELD = re.compile(
    r"^    (num_experts|num_local_experts|n_routed_experts|moe_num_experts|ffn_config)\b", re.MULTILINE
)
_EXPERTS = re.compile(r"^class \w+(Experts|MoE)\b", re.MULTILINE)
_DECORATOR = re.compile(r"^@use_experts_implementation", re.MULTILINE)

# Fields of configs by name. A config gets those that it has.
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 3),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "enable_moe_block": True,
    "mlp_only_layers": [],
    # attention by latents, by an index, linear attention, state spaces
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "mamba_expand": 2,
    "num_kv_shared_layers": 0,
}


def _rope(*mrope_section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(mrope_section)}


_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
# What a family needs beside them.
_OWN: dict[str, dict[str, Any]] = {
    "beam": _SPARSE,
    "deepseek_ocr2": _SPARSE,
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": _rope(3, 3, 2), **_SPARSE},
    "glm4v_moe": {"rope_parameters": _rope(2, 1, 1)},
    "glm5_next": {"index_topk": 16, "qk_rope_head_dim": 0, "qk_head_dim": 8, **_SPARSE},
    "hy_v4_vl": {"rope_parameters": _rope(2, 1, 1)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def _models_folder() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"


def _modeling_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("modeling_*.py")) if not re.search(r"_(tf|flax)_", path.name)]


def _families() -> dict[str, list[str]]:
    found = {}
    for folder in sorted((_models_folder() or Path("nowhere")).glob("*/")):
        files = _modeling_files(folder)
        configs = "".join(path.read_text(encoding="utf-8") for path in folder.glob("configuration_*.py"))
        texts = [path.read_text(encoding="utf-8") for path in files]
        if any(map(_DECORATOR.search, texts)) or (_EXPERT_FIELD.search(configs) and any(map(_EXPERTS.search, texts))):
            found[folder.name] = [path.stem for path in files]
    return found


FAMILIES = _families()


def modules_of(family: str) -> list[ModuleType]:
    return [importlib.import_module(f"transformers.models.{family}.{stem}") for stem in FAMILIES[family]]


def asks_registry(family: str) -> bool:
    """Whether any experts of the family have the decorator by which they ask the registry."""
    folder = _models_folder()
    assert folder is not None
    return any(_DECORATOR.search(path.read_text(encoding="utf-8")) for path in _modeling_files(folder / family))


def tiny_model(family: str, is_wanted: Any, **fields: Any) -> nn.Module:
    """The first causal language model, text model or other model of the family that has a module `is_wanted`.

    fields: of the config, where it has them.
    """
    tried = []
    for cls in _candidates(family):
        try:
            config = _tiny_config(cls.config_class, family, fields)
            with torch.device("meta"):
                shape_only: nn.Module = cls(config)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            tried.append(f"{cls.__name__}: {str(error)[:200]}")
            continue
        parameters = sum(each.numel() for each in shape_only.parameters())
        if not any(map(is_wanted, shape_only.modules())):
            tried.append(f"{cls.__name__}: no experts")
        elif parameters > _MAX_PARAMETERS:
            tried.append(f"{cls.__name__}: {parameters} parameters")
        else:
            torch.manual_seed(0)
            return cls(config)
    raise AssertionError(f"no tiny model of {family}: {tried}")


def _candidates(family: str) -> list[Any]:
    from transformers import PreTrainedModel

    classes = [
        cls
        for module in modules_of(family)
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    ]
    classes = [cls for cls in classes if inspect.isclass(cls.config_class) and "PreTrained" not in cls.__name__]
    by_kind = [[c for c in classes if c.__name__.endswith(end)] for end in ("ForCausalLM", "TextModel", "Model")]
    return list(dict.fromkeys(cls for kind in by_kind for cls in kind))


def _tiny_config(cls: Any, family: str, fields: dict[str, Any]) -> Any:
    names = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    own = _OWN.get(family, {})
    config = cls(**{name: value for name, value in {**_TINY, **own, **fields}.items() if name in names})
    config._attn_implementation = "eager"
    return config


def token_ids() -> Tensor:
    """(2, LENGTH), none of them special."""
    return 3 + (5 * torch.arange(2 * LENGTH).view(2, LENGTH)) % 60


def outputs_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits or last hidden states, and the gradients of every parameter that has one."""
    model.zero_grad()
    out = model(input_ids=token_ids(), use_cache=False)[0]
    (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return out.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
