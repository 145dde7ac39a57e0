"""Hugging Face folders and our layers: weights of an MoE block go from safetensors files into a layer, and back.

Both ways copy, so weights keep their bits. Each name of a folder stands for a part of one of our parameters:

    per expert    {gate_proj, up_proj, down_proj} or Mixtral's {w1, w3, w2}: rows of gate, of up, and w2
    packed        gate_up_proj and down_proj of all experts, (E, 2I, H) and (E, H, I), all rows of gate before all of
                  up: written with save_original_format=False
    packed        of gpt-oss: (E, H, 2I) and (E, I, H), gate and up alternating as in ours, and biases

Source of the names: what save_pretrained of transformers writes.

Legend: E experts, e local experts, H hidden size, I expert width.
"""

import functools
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.extras import require_extra
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.layer import MoE

require_extra("transformers", "safetensors")

from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZED = re.compile(r".*(_blocks|_scales|scale_inv|\.qweight|\.scales)")
# By model_type in config.json, because shapes alone do not say how packed rows of gate and up are ordered: tensors of
# Llama 4 have the shapes of gpt-oss and another order.
_ALTERNATING = ("gpt_oss",)
_GATE_BEFORE_UP = ("deepseek_v3", "mixtral", "olmoe", "qwen3_moe", "qwen3_next")
_WEIGHT_FILE = re.compile(r"(pytorch_model|consolidated)[.-].*|.*\.(safetensors|gguf)")
_DAMAGED = "{} has a damaged file ({}); use another copy"
_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 3  # names in a message


class _Part(NamedTuple):
    """The place of a folder's tensor in a layer.

    view: of the parameter, with the values of the folder's tensor in their order; of another expert if `rank` is
    another rank. shape: of the folder's tensor. rank: the only rank that holds it; None for what all ranks hold.
    packed: the folder's tensor has E experts in dim 0, and the view has e.
    """

    view: Tensor
    shape: tuple[int, ...]
    rank: int | None = None
    packed: bool = False


def load_layer(folder: str | Path, block: str, layer: MoE) -> None:
    """Reads the weights of an MoE block into a layer. Each rank reads the experts that it holds.

    folder: what save_pretrained wrote. block: name of the module, as "model.layers.3.mlp". Counts for
    `update_expert_bias` start anew, because they belong to another bias.

    Raises ValueError, on every rank, if the folder lacks weights of the layer or has others under this name; for
    another shape; for a dtype that the layer's does not hold exactly; for integers and quantized weights; for packed
    weights of an unknown model_type; for a layer on the meta device or sharded by FSDP; for a damaged file; and for an
    index that names files elsewhere. OSError, on every rank, for a file that cannot be read. The layer may then hold
    some of the weights.
    """
    problem = unreadable = None
    try:
        files = _files(Path(folder))
        _read(Path(folder), files, layer, _parts(layer, block, Path(folder), files))
    except ValueError as error:
        problem = str(error)
    except SafetensorError as error:
        problem = _DAMAGED.format(folder, error)
    except OSError as error:
        unreadable = f"{folder}: {error}"
    layer.group.raise_together(unreadable, error=OSError, stage="checkpoint")  # of one rank, maybe
    layer.group.raise_together(problem, stage="checkpoint")
    layer.router.load_state_dict({}, strict=False)  # as after each load_state_dict, the router resets its counts


def save_folder(
    folder: str | Path, source: str | Path, layers: Mapping[str, MoE], *, max_shard_size: int | None = None
) -> None:
    """Writes a folder like `source`, file by file, with the weights of these layers in place of its own.

    folder: a new one. source: a folder with a model of the same config. Its other weights and files are copied, but not
    its subfolders and weights in other formats. layers: by name of the block, as "model.layers.3.mlp"; all of one
    EP group, of which the first rank writes. max_shard_size: bytes of tensors in a file; a larger tensor has a file of
    its own. Default: the files of `source`.

    A weight is written in the dtype that `source` has for it, or, where that does not hold its values exactly, in the
    dtype of the layer. No more than one file is held in memory. A collective of the EP group; with several of them,
    call it on one.

    Raises ValueError, on every rank, as `load_layer` does, for a folder that exists, without layers, and for another
    `source` on another rank. OSError, on every rank, for a file that cannot be written.
    """
    if not layers:
        raise ValueError("layers is empty: give the layers to write, by name of their block")
    source, folder, group = Path(source), Path(folder), next(iter(layers.values())).group
    problem, files, parts, shards = None, {}, {}, {}
    try:
        files = _files(source)
        if group.rank == 0 and folder.exists():
            raise ValueError(f"{folder} exists; give the name of a new folder")
        parts = _parts_of_all(layers, source, files)
        shards = _shards(source, files, {name: part for name, (_, part) in parts.items()}, max_shard_size)
    except (OSError, ValueError) as error:
        problem = f"{source}: {error}"
    except SafetensorError as error:
        problem = _DAMAGED.format(source, error)
    digest = zlib.crc32(repr((shards, [*parts])).encode())
    group.raise_together(problem, stage="checkpoint", checksum_of_names=digest)
    _on_first_rank(group, folder, lambda: _copy_other_files(source, folder))
    for file, names in shards.items():
        ours = {name: _whole(*parts[name]) for name in names if name in parts}
        of_source, path = {name: files[name] for name in names}, folder / file
        _on_first_rank(group, path, functools.partial(_write, source, of_source, path, ours))
    _on_first_rank(group, folder / _INDEX, lambda: _write_index(source, folder, shards))


def _on_first_rank(group: EPGroup, path: Path, write: Callable[[], None]) -> None:
    """Writes on the first rank. Raises OSError, on every rank, if it cannot."""
    problem = None
    try:
        if group.rank == 0:
            write()
    except (OSError, SafetensorError) as error:
        problem = f"{path}: {error}"
    group.raise_together(problem, error=OSError, stage="checkpoint")


def _parts_of_all(layers: Mapping[str, MoE], source: Path, files: Mapping[str, str]) -> dict[str, tuple[MoE, _Part]]:
    """Returns what tensors of the source are in these layers. Raises ValueError unless they fit."""
    parts, group = {}, next(iter(layers.values())).group
    for block, layer in layers.items():
        if layer.group.process_group is not group.process_group:
            raise ValueError(f"{block} has another EP group than {next(iter(layers))}; give layers of one group")
        parts |= {name: (layer, part) for name, part in _parts(layer, block, source, files).items()}
    for file in sorted({files[name] for name in parts}):
        with _tensors_in(source / file) as tensors:
            for name in (name for name in parts if files[name] == file):
                _check_kind(name, file, tensors.get_slice(name), parts[name][1])
    return parts


def _files(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor."""
    if (folder / _INDEX).exists():
        index = _object_in(folder / _INDEX)
        files, metadata = index.get("weight_map"), index.get("metadata", {})
        if not isinstance(files, dict) or not isinstance(metadata, dict):
            raise ValueError(
                f"{folder / _INDEX} lacks a weight_map, or has other metadata than objects; use another copy"
            )
        strange = {repr(file) for file in files.values() if not _is_tensor_file(file)}
        if strange:
            wanted = f"wanted names of .safetensors files in {folder}"
            raise ValueError(f"{_INDEX} names {_listed(sorted(strange))}, {wanted}; use another copy")
        return files
    if not (folder / _SINGLE).exists():
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}; give a folder that save_pretrained wrote")
    with _tensors_in(folder / _SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), _SINGLE)


def _is_tensor_file(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name) is not None


def _object_in(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); use another copy") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {str(found):.60}, wanted an object; use another copy")
    return found


def _tensors_in(path: Path) -> safe_open:
    return safe_open(str(path), framework="pt")


def _parts(layer: MoE, block: str, folder: Path, files: Mapping[str, str]) -> dict[str, _Part]:
    """Returns what each tensor of a block in the folder is in the layer."""
    for name, weight in layer.named_parameters():
        if weight.is_meta:
            raise ValueError(f"{name} of the layer for {block} is on meta; use layer.to_empty(device=...) first")
        if hasattr(weight, "placements"):
            raise ValueError(
                f"{name} of the layer for {block} is sharded by FSDP; load before fully_shard, and save a layer "
                "without it, into which sonic_ep.checkpoint has loaded the weights"
            )
    names = {name.removeprefix(f"{block}.") for name in files if name.startswith(f"{block}.")}
    quantized = sorted(filter(_QUANTIZED.fullmatch, names))
    if quantized:
        raise ValueError(
            f"{block} has quantized weights ({_listed(quantized)}); load the model in transformers with "
            "dequantize=True, and save it"
        )
    packed = "experts.gate_up_proj" in names
    experts = _packed_parts(layer, _alternates(folder, block)) if packed else dict(_single_parts(layer, names))
    parts = {**_dense_parts(layer), **experts}
    given = {_common(name): name for name in names}
    if lacking := sorted(parts.keys() - given.keys()):
        raise ValueError(
            f"the folder lacks {_listed(lacking)} of {block}, which the layer has; give the layer a config without "
            "them, or the name of another block"
        )
    if others := sorted(given.keys() - parts.keys()):
        raise ValueError(
            f"{block} has {_listed([given[name] for name in others])}, which the layer lacks; give the layer a config "
            "with them (E, bias, shared_n, shared_gate, router.expert_bias, router.linear_bias)"
        )
    return {f"{block}.{name}": parts[common] for common, name in sorted(given.items())}


def _alternates(folder: Path, block: str) -> bool:
    """Returns True if rows of gate and up alternate in a packed gate_up_proj of the folder, which then is transposed.

    Raises ValueError if that is unknown.
    """
    config = folder / "config.json"
    model_type = _object_in(config).get("model_type") if config.exists() else None
    if model_type in _ALTERNATING + _GATE_BEFORE_UP:
        return model_type in _ALTERNATING
    raise ValueError(
        f"{block} has packed experts, and config.json has model_type={model_type!r}; their order is known for "
        f"{', '.join(_ALTERNATING + _GATE_BEFORE_UP)}: save the model with one tensor per expert"
    )


def _common(name: str) -> str:
    """Returns the name that the layer's part has here, whatever the family calls the module."""
    for family, common in (("router.", "gate."), ("shared_expert.", "shared_experts.")):
        if name.startswith(family):
            return common + name.removeprefix(family)
    return name


def _dense_parts(layer: MoE) -> dict[str, _Part]:
    """Returns what every rank holds."""
    router, shared = layer.router, layer.shared
    views = {"gate.weight": router.weight, "gate.bias": router.bias}
    views["gate.e_score_correction_bias"] = router.expert_bias
    if shared is not None:
        n = layer.config.shared_n
        for kind in ("weight", "bias"):
            up = getattr(shared.up, kind)
            views[f"shared_experts.down_proj.{kind}"] = getattr(shared.down, kind)
            views[f"shared_experts.up_proj.{kind}"] = up if up is None else up[-n:]
            views[f"shared_experts.gate_proj.{kind}"] = up[:n] if up is not None and shared.gated else None
        views["shared_expert_gate.weight"] = None if shared.gate is None else shared.gate.weight
    return {name: _Part(view.detach(), tuple(view.shape)) for name, view in views.items() if view is not None}


def _single_parts(layer: MoE, names: set[str]) -> Iterator[tuple[str, _Part]]:
    """Yields the parts of a folder with tensors of single experts."""
    experts, gated = layer.experts, _is_gated(layer)
    mixtral = any(name.endswith(".w1.weight") for name in names)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    views = {}
    for kind, first, second in (("weight", experts.w1, experts.w2), ("bias", experts.b1, experts.b2)):
        if first is None or second is None:
            continue
        views |= {f"{up}.{kind}": first[:, 1::2] if gated else first, f"{down}.{kind}": second}
        if gated:
            views[f"{gate}.{kind}"] = first[:, ::2]
    for expert in range(layer.config.E):
        rank = expert // experts.num_local
        local = expert - experts.first if rank == layer.group.rank else 0
        for name, view in views.items():
            yield f"experts.{expert}.{name}", _Part(view[local].detach(), tuple(view.shape[1:]), rank)


def _packed_parts(layer: MoE, alternating: bool) -> dict[str, _Part]:
    """Returns the parts of a folder with tensors of all experts."""
    experts = layer.experts
    views = {"gate_up_proj": experts.w1, "down_proj": experts.w2}
    views |= {"gate_up_proj_bias": experts.b1, "down_proj_bias": experts.b2}
    parts = {}
    for name, weight in views.items():
        if weight is None:
            continue
        view = weight.detach()
        if alternating:
            view = view.transpose(1, -1)  # of a bias, which has two dimensions, it changes nothing
        shape = (layer.config.E, *view.shape[1:])
        if name.startswith("gate_up") and not alternating and _is_gated(layer):
            view = view.unflatten(1, (-1, 2)).transpose(1, 2)  # (e, 2, I, ...)
        parts[f"experts.{name}"] = _Part(view, shape, packed=True)
    return parts


def _is_gated(layer: MoE) -> bool:
    return activation_named(layer.config.activation).gated


def _shards(
    source: Path, files: Mapping[str, str], parts: Mapping[str, _Part], max_shard_size: int | None
) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file to write."""
    ordered = sorted(files, key=lambda name: (files[name], name))
    if max_shard_size is None:
        shards: dict[str, list[str]] = {}
        for name in ordered:
            shards.setdefault(files[name], []).append(name)
        return shards
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size}, wanted at least 1 byte; None keeps the files of the source")
    sizes = {}
    for file in set(files.values()):
        sizes |= _sizes_in(source / file, {name for name in files if files[name] == file})
    for name, part in parts.items():
        sizes[name] = max(sizes[name], math.prod(part.shape) * part.view.itemsize)  # the dtype is chosen later
    groups, total = [[]], 0
    for name in ordered:
        if groups[-1] and total + sizes[name] > max_shard_size:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += sizes[name]
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _sizes_in(path: Path, names: set[str]) -> dict[str, int]:
    """Returns the bytes of each tensor in a file, from its header."""
    with _tensors_in(path), path.open("rb") as file:  # the first checks the header
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    if missing := sorted(names - header.keys()):
        raise ValueError(f"{path.name} lacks {_listed(missing)}, which {_INDEX} names; use another copy")
    return {name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in names}


def _check_kind(name: str, file: str, tensor: Any, part: _Part) -> None:
    """Raises ValueError unless a tensor of a file has the part's shape, and values that are floating point."""
    if tensor.get_dtype() not in _DTYPES:
        raise ValueError(
            f"{name} in {file} is {tensor.get_dtype()}, wanted one of {', '.join(_DTYPES)}; if the model is quantized, "
            "load it in transformers with dequantize=True, and save it"
        )
    if (shape := tuple(tensor.get_shape())) != part.shape:
        raise ValueError(
            f"{name} in {file} has shape {shape}, the layer wants {part.shape}; give the layer "
            "a config with the model's d, n, E and shared_n"
        )


def _read(folder: Path, files: dict[str, str], layer: MoE, parts: dict[str, _Part]) -> None:
    own = {name: part for name, part in parts.items() if part.rank in (None, layer.group.rank)}
    for file in sorted({files[name] for name in own}):
        with _tensors_in(folder / file) as tensors:
            for name in sorted(name for name in own if files[name] == file):
                part, whole = own[name], tensors.get_slice(name)
                _check_kind(name, file, whole, part)
                first = layer.experts.first
                value = whole[first : first + layer.experts.num_local] if part.packed else whole[:]
                if torch.promote_types(value.dtype, part.view.dtype) != part.view.dtype:
                    raise ValueError(
                        f"{name} in {file} is {value.dtype}, which {part.view.dtype} of the layer does not hold "
                        f"exactly; use layer.to({value.dtype}) first"
                    )
                with torch.no_grad():
                    part.view.copy_(value.reshape(part.view.shape))


def _whole(layer: MoE, part: _Part) -> Tensor:
    """Returns what the folder has under a name, on every rank of the group, on the CPU. A collective."""
    group, value = layer.group, part.view.reshape(-1, *part.shape[1:]).contiguous()
    if group.size > 1 and part.packed:
        pieces = [torch.empty_like(value) for _ in range(group.size)]
        dist.all_gather(pieces, value, group=group.process_group)
        value = torch.cat(pieces)
    elif group.size > 1 and part.rank is not None:
        value = value.clone()
        dist.broadcast(value, group=group.process_group, group_src=part.rank)
    return value.cpu()


def _copy_other_files(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != _INDEX and not _WEIGHT_FILE.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)


def _write(source: Path, files: Mapping[str, str], path: Path, ours: dict[str, Tensor]) -> None:
    """Writes a file of tensors of the source, or of `ours`, which it empties."""
    values, metadata = {}, None
    for file in sorted(set(files.values())):
        with _tensors_in(source / file) as tensors:
            metadata = tensors.metadata() or metadata
            for name in (name for name in files if files[name] == file):
                if name in ours:
                    values[name] = _exactly_in(tensors.get_slice(name)[:0].dtype, ours.pop(name))
                else:
                    values[name] = tensors.get_tensor(name)
    save_file(values, str(path), metadata)


def _exactly_in(dtype: torch.dtype, value: Tensor) -> Tensor:
    cast = value.to(dtype)
    return cast if torch.equal(cast.to(value.dtype), value) else value


def _write_index(source: Path, folder: Path, shards: Mapping[str, list[str]]) -> None:
    if [*shards] == [_SINGLE]:
        return
    total = sum(sum(_sizes_in(folder / file, set(names)).values()) for file, names in shards.items())
    there = source / _INDEX
    index = _object_in(there) if there.exists() else {}
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    index["weight_map"] = dict(sorted((name, file) for file, names in shards.items() for name in names))
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
