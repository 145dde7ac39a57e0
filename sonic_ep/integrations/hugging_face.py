"""Hugging Face folders and our layers: weights of an MoE block go from safetensors files into a layer, and back.

Both ways copy, so weights keep their bits. Each name of a folder stands for a part of one of our parameters:

    per expert    {gate_proj, up_proj, down_proj} or Mixtral's {w1, w3, w2}: rows of gate, of up, and w2
    packed        gpt-oss: gate_up_proj, down_proj (transposed) and their biases, of all experts in one tensor

Source of the names: what save_pretrained of transformers writes.

Legend: E experts, e local experts.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.extras import require_extra
from sonic_ep.layer import MoE

require_extra("transformers", "safetensors")

from safetensors import SafetensorError, safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

_INDEX = "model.safetensors.index.json"
_QUANTIZED = re.compile(r".*(_blocks|_scales|scale_inv|\.qweight|\.scales)")
_SHOWN = 3  # names in a message


class _Part(NamedTuple):
    """What a tensor of a folder is in a layer.

    view: of the parameter, in the shape of the folder's tensor; of another expert if `rank` is another rank. rank:
    the only rank that holds it; None for what all ranks hold. packed: has E experts in dim 0, and the view has e.
    """

    view: Tensor
    rank: int | None = None
    packed: bool = False


def load_layer(folder: str | Path, block: str, layer: MoE) -> None:
    """Reads the weights of an MoE block into a layer. Each rank reads the experts that it holds.

    folder: what save_pretrained wrote. block: name of the module, as "model.layers.3.mlp". Counts for
    `update_expert_bias` start anew, because they belong to another bias.

    Raises ValueError, on every rank, if the folder lacks weights of the layer or has others under this name; for
    another shape; for a dtype that the layer's does not hold exactly; for quantized weights; for a damaged file; and
    for experts that FSDP shards. OSError, on every rank, for a file that cannot be read. The layer may then hold some
    of the weights.
    """
    problem, kind = None, ValueError
    try:
        files = _files(Path(folder))
        parts = _parts(layer, block, {name.removeprefix(f"{block}.") for name in files if name.startswith(f"{block}.")})
        _read(Path(folder), files, layer, {f"{block}.{name}": part for name, part in parts.items()})
    except ValueError as error:
        problem = str(error)
    except SafetensorError as error:
        problem = f"{folder} has a damaged file ({error}); use another copy"
    except OSError as error:
        problem, kind = f"{folder}: {error}", OSError
    layer.group.raise_together(problem, error=kind, stage="checkpoint")
    layer.router.load_state_dict({}, strict=False)  # as after each load_state_dict, the router resets its counts


def save_folder(folder: str | Path, source: str | Path, layers: Mapping[str, MoE]) -> None:
    """Writes a folder like `source`, file by file, with the weights of these layers in place of those of `source`.

    folder: a new one. source: a folder with a model of the same config, whose other weights and files are copied, but
    not its subfolders.
    layers: by name of the block, as "model.layers.3.mlp"; all of one EP group, of which the first rank writes. Weights
    are written in the dtype of the layer. A collective of that group; with several of them, call it on one. No more
    than one file is held in memory.

    Raises ValueError, on every rank, as `load_layer` does, for a folder that exists, and without layers. OSError, on
    every rank, for a file that cannot be written.
    """
    if not layers:
        raise ValueError("layers is empty: give the layers to write, by name of their block")
    group, parts = next(iter(layers.values())).group, {}
    problem, files = None, {}
    try:
        files = _files(Path(source))
        if group.rank == 0 and Path(folder).exists():
            raise ValueError(f"{folder} exists; give the name of a new folder")
        for block, layer in layers.items():
            names = {name.removeprefix(f"{block}.") for name in files if name.startswith(f"{block}.")}
            parts |= {f"{block}.{name}": (layer, part) for name, part in _parts(layer, block, names).items()}
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"{source}: {error}"
    group.raise_together(problem, stage="checkpoint")
    try:
        if group.rank == 0:
            _copy_other_files(Path(source), Path(folder))
    except OSError as error:
        problem = f"{folder}: {error}"
    group.raise_together(problem, error=OSError, stage="checkpoint")
    for file in sorted(set(files.values())):
        names = sorted(name for name, of in files.items() if of == file)
        ours = {name: _whole(*parts[name]) for name in names if name in parts}
        try:
            if group.rank == 0:
                _write(Path(source) / file, Path(folder) / file, names, ours)
        except (OSError, SafetensorError) as error:
            problem = f"{Path(folder) / file}: {error}"
        group.raise_together(problem, error=OSError, stage="checkpoint")


def _files(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor."""
    if (folder / _INDEX).exists():
        return json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    file = "model.safetensors"
    if not (folder / file).exists():
        raise ValueError(f"{folder} has neither {file} nor {_INDEX}; give a folder that save_pretrained wrote")
    with _tensors_in(folder / file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _tensors_in(path: Path) -> Any:
    return safe_open(str(path), framework="pt")


def _parts(layer: MoE, block: str, names: set[str]) -> dict[str, _Part]:
    """Returns what each of the names of a block in the folder is in the layer."""
    if any(hasattr(parameter, "placements") for parameter in layer.parameters()):
        raise ValueError(f"FSDP shards the weights of the layer for {block}; read them before fully_shard")
    quantized = sorted(filter(_QUANTIZED.fullmatch, names))
    if quantized:
        raise ValueError(
            f"{block} has quantized weights ({_listed(quantized)}); load the model in transformers with "
            "dequantize=True, and save it"
        )
    parts = {**_dense_parts(layer), **dict(_expert_parts(layer, names))}
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
    return {name: parts[common] for common, name in given.items()}


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
        up, n = shared.up.weight, layer.config.shared_n
        views["shared_experts.down_proj.weight"] = shared.down.weight
        views["shared_experts.up_proj.weight"] = up[n:] if shared.gated else up
        views["shared_experts.gate_proj.weight"] = up[:n] if shared.gated else None
        views["shared_expert_gate.weight"] = None if shared.gate is None else shared.gate.weight
    return {name: _Part(view.detach()) for name, view in views.items() if view is not None}


def _expert_parts(layer: MoE, names: set[str]) -> Iterator[tuple[str, _Part]]:
    experts, E = layer.experts, layer.config.E
    w1, w2 = experts.w1.detach(), experts.w2.detach()
    if "experts.gate_up_proj" in names:
        yield "experts.gate_up_proj", _Part(w1.transpose(1, 2), packed=True)
        yield "experts.down_proj", _Part(w2.transpose(1, 2), packed=True)
        for name, bias in (("gate_up_proj_bias", experts.b1), ("down_proj_bias", experts.b2)):
            if bias is not None:
                yield f"experts.{name}", _Part(bias.detach(), packed=True)
        return
    mixtral = any(name.endswith(".w1.weight") for name in names)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(E):
        rank = expert // experts.num_local
        local = expert - experts.first if rank == layer.group.rank else 0
        for name, view in ((gate, w1[local, ::2]), (up, w1[local, 1::2]), (down, w2[local])):
            yield f"experts.{expert}.{name}.weight", _Part(view, rank)


def _read(folder: Path, files: dict[str, str], layer: MoE, parts: dict[str, _Part]) -> None:
    own = {name: part for name, part in parts.items() if part.rank in (None, layer.group.rank)}
    for file in sorted({files[name] for name in own}):
        with _tensors_in(folder / file) as tensors:
            for name in sorted(name for name in own if files[name] == file):
                part, whole = own[name], tensors.get_slice(name)
                shape = tuple(whole.get_shape())
                wanted = ((layer.config.E,) if part.packed else part.view.shape[:1]) + part.view.shape[1:]
                if shape != tuple(wanted):
                    raise ValueError(f"{name} in {file} has shape {shape}, the layer wants {tuple(wanted)}")
                first = layer.experts.first
                value = whole[first : first + layer.experts.num_local] if part.packed else whole[:]
                if torch.promote_types(value.dtype, part.view.dtype) != part.view.dtype:
                    raise ValueError(
                        f"{name} in {file} is {value.dtype}, which {part.view.dtype} of the layer does not hold "
                        f"exactly; use layer.to({value.dtype}) first"
                    )
                with torch.no_grad():
                    part.view.copy_(value)


def _whole(layer: MoE, part: _Part) -> Tensor:
    """Returns what the folder has under a name, on every rank of the group, on the CPU. A collective."""
    group, value = layer.group, part.view.contiguous()
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
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)


def _write(source: Path, path: Path, names: list[str], ours: dict[str, Tensor]) -> None:
    with _tensors_in(source) as tensors:
        values = {name: ours[name] if name in ours else tensors.get_tensor(name) for name in names}
        save_file(values, str(path), tensors.metadata())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
