"""Hugging Face folders: a layer computes what the block of the model does, and weights come back bit for bit."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.integrations import hugging_face
from sonic_ep.integrations.hugging_face import load_layer, save_folder
from tests.helpers.hugging_face import model_of
from tests.helpers.launch import RankPool
from tests.helpers.transformers_families import FAMILIES, tiny_model

Ranks = Callable[[int], RankPool]
# By family: the block's name, and the fields of our config beside its sizes.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("model.layers.1.block_sparse_moe", {}),
    "qwen3_moe": ("model.layers.1.mlp", {}),
    "olmoe": ("model.layers.1.mlp", {"router": RouterConfig(renormalize=False)}),
    "qwen3_next": ("model.layers.1.mlp", {"shared_n": 16, "shared_gate": True}),
    "gpt_oss": (
        "model.layers.1.mlp",
        {"router": RouterConfig(linear_bias=True), "bias": True, "activation": "swiglu_oai"},
    ),
    "deepseek_v3": (
        "model.layers.1.mlp",
        {
            "shared_n": 16,
            "router": RouterConfig(score="sigmoid", scale=2.5, expert_bias=True, num_groups=4, groups_per_token=2),
        },
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield


def a_model(family: str) -> Any:
    from sonic_ep.integrations.transformers.experts import uses_registry

    if family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        return model_of(family)
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    model: Any = tiny_model(family, uses_registry).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first
                parameter.normal_()
    return model


def saved(family: str, folder: Path, **options: Any) -> Any:
    model = a_model(family)
    model.save_pretrained(folder, **options)
    return model


def block_of(model: nn.Module) -> Any:
    """The MoE block of the second layer."""
    return model.get_submodule("model.layers.1.mlp")


def layer_for(family: str, model: Any, group: EPGroup | None = None, seed: int = 0) -> MoE:
    experts, fields = block_of(model).experts, LAYERS[family][1]
    E, d = experts.down_proj.shape[0], model.config.hidden_size
    n = experts.down_proj.shape[1 if family == "gpt_oss" else 2]
    config = MoEConfig(d=d, n=n, E=E, K=model.config.num_experts_per_tok, rounding=RoundingConfig(mode="off"), **fields)
    return MoE(config, group, seed=seed)


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_computes_what_the_block_does(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    layer = layer_for(family, model)
    load_layer(tmp_path, LAYERS[family][0], layer)
    x = torch.randn(2, 9, model.config.hidden_size)
    with torch.no_grad():
        theirs = block_of(model)(x)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        torch.testing.assert_close(layer(x).y, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", LAYERS)
def test_a_folder_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "start", max_shard_size="40KB")
    block = LAYERS[family][0]
    layer = layer_for(family, model)
    load_layer(tmp_path / "start", block, layer)
    other = layer_for(family, model, seed=5)
    save_folder(tmp_path / "other", tmp_path / "start", {block: other})
    save_folder(tmp_path / "end", tmp_path / "other", {block: layer})
    names = sorted(path.name for path in (tmp_path / "start").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "end").iterdir())
    start, changed, end = (tensors_of(tmp_path / name) for name in ("start", "other", "end"))
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
    differ = {name for name in start if not torch.equal(start[name], changed[name])}
    assert differ
    assert all(name.startswith(block) for name in differ)
    again = type(model).from_pretrained(tmp_path / "end")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_one_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("qwen3_moe", tmp_path / "start", max_shard_size="40KB")
    layer = layer_for("qwen3_moe", model)
    load_layer(tmp_path / "start", "model.layers.1.mlp", layer)
    files = json.loads((tmp_path / "start" / "model.safetensors.index.json").read_text())["weight_map"]
    written: list[set[str]] = []

    def noted(values: dict[str, Tensor], path: str, metadata: Any) -> None:
        written.append({files[name] for name in values})
        save_file(values, path, metadata)

    monkeypatch.setattr(hugging_face, "save_file", noted)
    save_folder(tmp_path / "end", tmp_path / "start", {"model.layers.1.mlp": layer})
    assert len(written) > 3
    assert all(len(each) == 1 for each in written)


def across_ranks(rank: int, family: str, path: Path) -> tuple[Tensor, Tensor]:
    block, model = LAYERS[family][0], a_model(family)
    layer = layer_for(family, model, EPGroup())
    load_layer(path / "start", block, layer)
    save_folder(path / "end", path / "start", {block: layer})
    x = torch.randn(2, 9, model.config.hidden_size)
    with torch.no_grad():
        theirs = block_of(type(model).from_pretrained(path / "start"))(x)
        return layer(x).y, theirs[0] if isinstance(theirs, tuple) else theirs


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_ranks(family: str, ranks: Ranks, tmp_path: Path) -> None:
    saved(family, tmp_path / "start")
    for ours, theirs in ranks(2).run(across_ranks, family, tmp_path):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    start, end = tensors_of(tmp_path / "start"), tensors_of(tmp_path / "end")
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)


def test_errors(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path / "start")
    block, layer = "model.layers.1.mlp", layer_for("qwen3_moe", model)
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        load_layer(tmp_path, block, layer)
    with pytest.raises(ValueError, match=r"lacks experts.0.down_proj.weight, .* and 22 more of model.layers.7.mlp"):
        load_layer(tmp_path / "start", "model.layers.7.mlp", layer)
    shared = MoE(layer.config.replace(shared_n=16))
    with pytest.raises(ValueError, match="lacks shared_experts.down_proj.weight"):
        load_layer(tmp_path / "start", block, shared)
    fewer = MoE(layer.config.replace(E=4))
    with pytest.raises(ValueError, match="has experts.4.down_proj.weight, .* which the layer lacks"):
        load_layer(tmp_path / "start", block, fewer)
    narrow = MoE(layer.config.replace(n=8))
    with pytest.raises(ValueError, match=r"has shape \(32, 16\), the layer wants \(32, 8\)"):
        load_layer(tmp_path / "start", block, narrow)
    with pytest.raises(ValueError, match=r"is torch.float32, which torch.bfloat16 of the layer does not hold exactly"):
        load_layer(tmp_path / "start", block, MoE(layer.config, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="start exists"):
        save_folder(tmp_path / "start", tmp_path / "start", {block: layer})
    with pytest.raises(ValueError, match="layers is empty"):
        save_folder(tmp_path / "end", tmp_path / "start", {})
    tensors = load_file(tmp_path / "start" / "model.safetensors")
    tensors[f"{block}.experts.gate_up_proj_blocks"] = torch.zeros(2, dtype=torch.uint8)
    (tmp_path / "blocks").mkdir()
    save_file(tensors, str(tmp_path / "blocks" / "model.safetensors"))
    with pytest.raises(ValueError, match="quantized weights"):
        load_layer(tmp_path / "blocks", block, layer)


def test_a_damaged_file(tmp_path: Path) -> None:
    layer = layer_for("qwen3_moe", saved("qwen3_moe", tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="damaged file"):
        load_layer(tmp_path, "model.layers.1.mlp", layer)
    with pytest.raises(ValueError, match=str(tmp_path)):
        save_folder(tmp_path / "end", tmp_path, {"model.layers.1.mlp": layer})


def test_counts_for_the_bias_start_anew(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path)
    layer = layer_for("deepseek_v3", model).train()
    layer(torch.randn(20, model.config.hidden_size))
    assert layer.router._counts_since_update_E.any()
    load_layer(tmp_path, LAYERS["deepseek_v3"][0], layer)
    assert not layer.router._counts_since_update_E.any()


def sharded(rank: int, path: Path) -> None:
    layer = layer_for("qwen3_moe", a_model("qwen3_moe"), EPGroup())
    mesh = init_device_mesh("cpu", (2,))
    layer.experts.w1 = nn.Parameter(distribute_tensor(layer.experts.w1.detach(), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match="before fully_shard"):
        load_layer(path, "model.layers.1.mlp", layer)


def test_sharded_experts_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    ranks(2).run(sharded, tmp_path)


def damaged_on_one_rank(rank: int, path: Path) -> None:
    model = a_model("qwen3_moe")
    layer = layer_for("qwen3_moe", model, EPGroup())
    folder = path / ("start" if rank == 0 else "elsewhere")
    with pytest.raises(ValueError, match="rank 1.*neither model.safetensors nor"):
        load_layer(folder, "model.layers.1.mlp", layer)


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "start")
    ranks(2).run(damaged_on_one_rank, tmp_path)
