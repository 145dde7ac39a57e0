"""Hugging Face folders: a layer computes what the block of the model does, and weights come back bit for bit."""

import dataclasses
import json
import warnings
import weakref
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sonic_ep import EPGroup, MoE, RoundingConfig, checkpoint, load_config
from sonic_ep.integrations import hugging_face
from sonic_ep.integrations.hugging_face import load_layer, save_folder
from tests.helpers.hugging_face import model_of
from tests.helpers.launch import RankPool
from tests.helpers.transformers_families import FAMILIES, tiny_model

Ranks = Callable[[int], RankPool]
# By family: the block's name, and the shape of configs/ of which the layer is a small version.
LAYERS = {
    "mixtral": ("model.layers.1.block_sparse_moe", "mixtral_8x7b"),
    "qwen3_moe": ("model.layers.1.mlp", "qwen3_30b_a3b"),
    "olmoe": ("model.layers.1.mlp", "olmoe"),
    "qwen3_next": ("model.layers.1.mlp", "qwen3_next_80b_a3b"),
    "gpt_oss": ("model.layers.1.mlp", "gpt_oss_20b"),
    "deepseek_v3": ("model.layers.1.mlp", "deepseek_v3"),
    "kimi_k2": ("model.layers.1.mlp", "kimi_k2"),  # the code is DeepSeek-V3's, without groups of experts
}
BLOCK = "model.layers.1.mlp"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield


def a_model(family: str) -> Any:
    from sonic_ep.integrations.transformers.experts import uses_registry

    if family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        return model_of(family)
    if family == "kimi_k2":
        return model_of("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=2.827)
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    model: Any = tiny_model(family, uses_registry).float()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if name.endswith("bias"):  # zero at first
                values.normal_()
    return model


def saved(family: str, folder: Path, **options: Any) -> Any:
    model = a_model(family)
    model.save_pretrained(folder, **options)
    return model


def block_of(model: nn.Module) -> Any:
    """The MoE block of the second layer."""
    return model.get_submodule("model.layers.1.mlp")


def layer_for(
    family: str, model: Any, group: EPGroup | None = None, seed: int = 0, dtype: torch.dtype | None = None
) -> MoE:
    experts, published = block_of(model).experts, load_config(LAYERS[family][1])
    router = published.router
    if router.num_groups > 1:
        router = dataclasses.replace(router, num_groups=4, groups_per_token=2)
    config = published.replace(
        d=model.config.hidden_size,
        n=experts.down_proj.shape[1 if family == "gpt_oss" else 2],
        E=experts.down_proj.shape[0],
        K=model.config.num_experts_per_tok,
        shared_n=published.shared_n and 16,
        router=router,
        rounding=RoundingConfig(mode="off"),
    )
    return MoE(config, group, seed=seed, dtype=dtype)


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
    start, changed = tensors_of(tmp_path / "start"), tensors_of(tmp_path / "other")
    assert_equal_bits(tmp_path / "start", tmp_path / "end")
    differ = {name for name in start if not torch.equal(start[name], changed[name])}
    assert differ
    assert all(name.startswith(block) for name in differ)
    again = type(model).from_pretrained(tmp_path / "end")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_packed_experts(family: str, tmp_path: Path) -> None:
    # Of E tensors in one, as transformers has them in memory.
    model = a_model(family)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "packed", save_original_format=False)
    layers = [layer_for(family, model, seed=seed) for seed in (1, 2)]
    load_layer(tmp_path / "single", LAYERS[family][0], layers[0])
    load_layer(tmp_path / "packed", BLOCK, layers[1])
    single, packed = (layer.state_dict() for layer in layers)
    assert all(torch.equal(single[name], packed[name]) for name in single)
    save_folder(tmp_path / "end", tmp_path / "packed", {BLOCK: layers[0]})
    assert_equal_bits(tmp_path / "packed", tmp_path / "end")


def test_packed_experts_of_an_unknown_family_are_refused(tmp_path: Path) -> None:
    model = a_model("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama4"}))
    with pytest.raises(ValueError, match=r"model_type='llama4'; their order is known for gpt_oss, .*: save the model"):
        load_layer(tmp_path, BLOCK, layer_for("mixtral", model))


def assert_equal_bits(start: Path, end: Path) -> None:
    theirs, ours = tensors_of(start), tensors_of(end)
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_folder_in_bf16_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = a_model("qwen3_moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "start")
    layer = layer_for("qwen3_moe", model, dtype=dtype)  # the router's weight is fp32
    load_layer(tmp_path / "start", BLOCK, layer)
    save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer})
    assert_equal_bits(tmp_path / "start", tmp_path / "end")


def test_what_the_dtype_of_the_folder_does_not_hold_is_written_in_that_of_the_layer(tmp_path: Path) -> None:
    model = a_model("qwen3_moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "start", max_shard_size="20KB")
    layer = layer_for("qwen3_moe", model, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.add_(1e-4)
    save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer})
    start, end = tensors_of(tmp_path / "start"), tensors_of(tmp_path / "end")
    name = f"{BLOCK}.gate.weight"
    assert {other for other in start if start[other].dtype != end[other].dtype} == {name}
    assert torch.equal(end[name], layer.router.weight.detach())
    index = json.loads((tmp_path / "end" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in end.values())


@pytest.mark.parametrize("limit", [20_000, 60_000, 10**9])
def test_files_of_a_given_size(limit: int, tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path / "start", max_shard_size="40KB")
    layer = layer_for("deepseek_v3", model)
    load_layer(tmp_path / "start", BLOCK, layer)
    (tmp_path / "start" / "pytorch_model.bin").write_text("other weights")
    save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer}, max_shard_size=limit)
    assert_equal_bits(tmp_path / "start", tmp_path / "end")
    files = {path.name: load_file(path) for path in (tmp_path / "end").glob("*.safetensors")}
    assert all(len(file) == 1 or sum(v.nbytes for v in file.values()) <= limit for file in files.values())
    assert (len(files) == 1) == (limit == 10**9)
    index = tmp_path / "end" / "model.safetensors.index.json"
    if len(files) > 1:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file for file, values in files.items() for name in values}
    else:
        assert [*files] == ["model.safetensors"]
        assert not index.exists()
    assert not (tmp_path / "end" / "pytorch_model.bin").exists()
    again = type(model).from_pretrained(tmp_path / "end")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("limit", [None, 30_000])
def test_one_file_is_in_memory_at_a_time(limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("qwen3_moe", tmp_path / "start", max_shard_size="30KB")
    num_open, written = [0], []
    gathered: list[weakref.ref[Tensor]] = []
    gather = hugging_face._whole

    class Counted:
        """A file that cannot be opened while another one is open."""

        def __init__(self, path: str, framework: str) -> None:
            self.file = safe_open(path, framework)

        def __enter__(self) -> Any:
            num_open[0] += 1
            assert num_open[0] == 1
            return self.file.__enter__()

        def __exit__(self, *error: Any) -> None:
            num_open[0] -= 1
            self.file.__exit__(*error)

    def recorded(*part: Any) -> Tensor:
        value = gather(*part)
        gathered.append(weakref.ref(value))
        return value

    def noted(values: dict[str, Tensor], path: str, metadata: Any) -> None:
        assert sum(value.nbytes for each in gathered if (value := each()) is not None) <= 30_000
        written.append(sum(value.nbytes for value in values.values()))
        save_file(values, path, metadata)

    monkeypatch.setattr(hugging_face, "_whole", recorded)
    monkeypatch.setattr(hugging_face, "safe_open", Counted)
    monkeypatch.setattr(hugging_face, "save_file", noted)
    layer = layer_for("qwen3_moe", model)
    load_layer(tmp_path / "start", BLOCK, layer)
    save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer}, max_shard_size=limit)
    assert len(written) > 3
    assert len(gathered) == 25  # the router, and three for each of 8 experts
    assert max(written) <= 30_000
    assert sum(written) == sum(value.nbytes for value in tensors_of(tmp_path / "start").values())
    assert_equal_bits(tmp_path / "start", tmp_path / "end")


def across_ranks(rank: int, family: str, path: Path) -> tuple[Tensor, Tensor]:
    block, model = LAYERS[family][0], a_model(family)
    layer = layer_for(family, model, EPGroup())
    load_layer(path / "start", block, layer)
    save_folder(path / "end", path / "start", {block: layer}, max_shard_size=50_000)
    x = torch.randn(2, 9, model.config.hidden_size)
    with torch.no_grad():
        theirs = block_of(type(model).from_pretrained(path / "start"))(x)
        return layer(x).y, theirs[0] if isinstance(theirs, tuple) else theirs


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_ranks(family: str, ranks: Ranks, tmp_path: Path) -> None:
    saved(family, tmp_path / "start")
    for ours, theirs in ranks(2).run(across_ranks, family, tmp_path):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_equal_bits(tmp_path / "start", tmp_path / "end")


def checkpointed(rank: int, path: Path) -> None:
    layer = layer_for("deepseek_v3", a_model("deepseek_v3"), EPGroup())
    load_layer(path / "start", BLOCK, layer)
    checkpoint.save(path / "checkpoint", layer)


def test_through_a_checkpoint_of_another_ep_size(ranks: Ranks, tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path / "start")
    ranks(2).run(checkpointed, tmp_path)
    layer = layer_for("deepseek_v3", model)
    checkpoint.load(tmp_path / "checkpoint", layer)
    save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer})
    assert_equal_bits(tmp_path / "start", tmp_path / "end")


def test_errors(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path / "start")
    block, layer = BLOCK, layer_for("qwen3_moe", model)
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
    with pytest.raises(ValueError, match=r"start: .* has shape \(32, 16\), the layer wants \(32, 8\)"):
        save_folder(tmp_path / "end", tmp_path / "start", {block: narrow})
    with pytest.raises(ValueError, match=r"is torch.float32, which torch.bfloat16 of the layer does not hold exactly"):
        load_layer(tmp_path / "start", block, MoE(layer.config, dtype=torch.bfloat16))
    biased = MoE(layer.config.replace(bias=True))
    with pytest.raises(ValueError, match="lacks experts.0.down_proj.bias"):
        load_layer(tmp_path / "start", block, biased)
    with pytest.raises(ValueError, match="is on meta; use layer.to_empty"):
        load_layer(tmp_path / "start", block, MoE(layer.config, device="meta"))
    with pytest.raises(ValueError, match="max_shard_size=0, wanted at least 1 byte"):
        save_folder(tmp_path / "end", tmp_path / "start", {block: layer}, max_shard_size=0)
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
        load_layer(tmp_path, BLOCK, layer)
    with pytest.raises(ValueError, match=str(tmp_path)):
        save_folder(tmp_path / "end", tmp_path, {BLOCK: layer})


def test_counts_for_the_bias_start_anew(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path)
    layer = layer_for("deepseek_v3", model).train()
    layer(torch.randn(2, 10, model.config.hidden_size)).y.sum().backward()
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
        load_layer(folder, BLOCK, layer)


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "start")
    ranks(2).run(damaged_on_one_rank, tmp_path)


def test_an_index_that_names_too_much(tmp_path: Path) -> None:
    layer = layer_for("qwen3_moe", saved("qwen3_moe", tmp_path / "start", max_shard_size="40KB"))
    path = tmp_path / "start" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-.* lacks model.more.weight, which .* names; use another copy"):
        save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer}, max_shard_size=10**6)
    index["weight_map"]["model.more.weight"] = "../other.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names '\.\./other.safetensors', wanted names of .safetensors files in"):
        save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer})


NO_INDEX = {
    "[]": r"holds \[\], wanted an object",
    "null": "holds None, wanted an object",
    "[" * 100_000: r"is no JSON \(maximum recursion",
    "{}": "lacks a weight_map",
    '{"weight_map": []}': "lacks a weight_map",
    '{"weight_map": null}': "lacks a weight_map",
    '{"weight_map": {}, "metadata": null}': "or has other metadata than objects",
    '{"weight_map": {"a": 3}}': "names 3, wanted names",
    '{"weight_map": {"a": null}}': "names None, wanted names",
    '{"weight_map": {"a": ".."}}': r"names '\.\.', wanted names",
    '{"weight_map": {"a": ""}}': "names '', wanted names",
    '{"weight_map": {"a": "config.json"}}': "names 'config.json', wanted names",
    '{"weight_map": {"a": "/x.safetensors"}}': "names '/x.safetensors', wanted names",
}


def without_an_index(rank: int, path: Path, text: str, message: str) -> None:
    """Of the last rank's folder alone."""
    layer = layer_for("qwen3_moe", a_model("qwen3_moe"), group := EPGroup())
    folder = path / ("harmed" if rank == group.size - 1 else "start")
    with pytest.raises(ValueError, match=f"{message}.*; use another copy"):
        load_layer(folder, BLOCK, layer)
    with pytest.raises(ValueError, match=f"{message}.*; use another copy"):
        save_folder(path / "end", folder, {BLOCK: layer})


@pytest.mark.parametrize("text", NO_INDEX)
def test_an_index_that_is_none(ranks: Ranks, text: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "start")
    saved("qwen3_moe", tmp_path / "harmed")
    (tmp_path / "harmed" / "model.safetensors.index.json").write_text(text)
    ranks(2).run(without_an_index, tmp_path, text, NO_INDEX[text])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_no_floating_point_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    layer = layer_for("qwen3_moe", saved("qwen3_moe", tmp_path / "start"))
    path = tmp_path / "start" / "model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path, {"format": "pt"})
    message = r"in model.safetensors is [A-Z0-9_]+, wanted one of F64, F32, F16, BF16; if the model is quantized"
    with pytest.raises(ValueError, match=message):
        load_layer(tmp_path / "start", BLOCK, layer)
    with pytest.raises(ValueError, match=message):
        save_folder(tmp_path / "end", tmp_path / "start", {BLOCK: layer})


def test_packed_experts_need_a_config_that_is_an_object(tmp_path: Path) -> None:
    model = a_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds \[\], wanted an object; use another copy"):
        load_layer(tmp_path, BLOCK, layer_for("qwen3_moe", model))


def from_a_file_that_one_rank_reads(rank: int, path: Path) -> None:
    layer = layer_for("qwen3_moe", a_model("qwen3_moe"), EPGroup())
    with pytest.raises(OSError, match=r"^rank 1: .*start"):
        load_layer(path / "start", BLOCK, layer)


def test_a_file_that_one_rank_cannot_read(ranks: Ranks, tmp_path: Path) -> None:
    """With experts of the second rank alone."""
    saved("qwen3_moe", tmp_path / "start")
    values = load_file(tmp_path / "start" / "model.safetensors")
    of_first = {name: value for name, value in values.items() if ".experts.7." not in name}
    save_file(of_first, tmp_path / "start" / "model.safetensors", {"format": "pt"})
    files = {name: "model.safetensors" if name in of_first else "lost.safetensors" for name in values}
    (tmp_path / "start" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    ranks(2).run(from_a_file_that_one_rank_reads, tmp_path)


def from_different_folders(rank: int, path: Path) -> None:
    layer = layer_for("qwen3_moe", a_model("qwen3_moe"), EPGroup())
    with pytest.raises(ValueError, match="disagree about checksum_of_names"):
        save_folder(path / "end", path / str(rank), {BLOCK: layer})


def test_ranks_with_different_folders(ranks: Ranks, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "0", max_shard_size="40KB")
    saved("qwen3_moe", tmp_path / "1", max_shard_size="60KB")
    ranks(2).run(from_different_folders, tmp_path)
