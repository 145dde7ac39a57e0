"""A TransformerConfig by Megatron's own argument parser, as its training scripts make one; without a GPU too.

`config_of_arguments` runs the parser, its checks and `core_transformer_config_from_args` of the wheel. `arguments_of`
writes fields of TransformerConfig as the arguments that a script would give.
"""

import argparse
import copy
import functools
import math
import sys
import typing
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typing_extensions

Fields = dict[str, Any]
# Functions of Transformer Engine that Megatron asks for before it accepts moe_permute_fusion.
_FUSED = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)

# What every script gives, of a model of two layers.
_ALWAYS = {
    "num-layers": 2,
    "num-attention-heads": 8,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "micro-batch-size": 1,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 64,
    "position-embedding-type": "rope",
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}
_FLAGS = ("bf16", "no-rope-fusion", "no-masked-softmax-fusion", "no-persist-layer-norm")
# Arguments of another name than the field.
_RENAMED = {"num_moe_experts": "num-experts", "fp8": "fp8-format", "fp4": "fp4-format"}
# Fields that an argument of another kind sets.
_DERIVED = {"activation_func", "gated_linear_unit", "add_bias_linear", "params_dtype", "bf16"}
# Fields without an argument: a script that wants them sets them in the config.
_WITHOUT = ("activation_func_fp8_input_store",)


def arguments_of(fields: Fields) -> list[str]:
    """Returns arguments by which Megatron's parser makes a config with these fields."""
    argv = [f"--{name}" for name in _FLAGS]
    argv += _by_function().get(fields.get("activation_func", F.gelu), [])
    argv += [] if fields.get("add_bias_linear") else ["--disable-bias-linear"]
    named = {name: value for name, value in fields.items() if name not in {*_DERIVED, *_WITHOUT}}
    if fields.get("cuda_graph_impl") == "full_iteration":
        named["no_check_for_nan_in_loss_and_grad"] = True
    if "mla_up_proj" in (fields.get("recompute_modules") or ()):
        named["multi_latent_attention"] = True
    if fields.get("overlap_moe_expert_parallel_comm") and fields.get("pipeline_model_parallel_size", 1) > 1:
        named["num_virtual_stages_per_pipeline_rank"] = 2
    for name, value in {**_ALWAYS, **named}.items():
        argv += _argument(_RENAMED.get(name, name).replace("_", "-"), value)
    return argv


def _argument(name: str, value: Any) -> list[str]:
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [f"--{name}"]
    values = value if isinstance(value, list | tuple) else [value]
    if name == "moe-layer-freq":
        values = [str(list(values)).replace(" ", "")]
    return [f"--{name}", *map(str, values)]


def config_of_fields(fields: Fields) -> Any:
    """Returns the TransformerConfig of a script that wants these fields. Raises as `config_of_arguments`.

    A field that no argument sets is set in the config, as such a script does it.
    """
    config = config_of_arguments(arguments_of(fields))
    without = [*_WITHOUT]
    if fields.get("activation_func", F.gelu) not in _by_function():
        without += ["activation_func", "gated_linear_unit"]
    for name in without:
        if name in fields:
            setattr(config, name, fields[name])
    return config


def _by_function() -> dict[Any, list[str]]:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {F.silu: ["--swiglu"], quick_gelu: ["--quick-geglu"], squared_relu: ["--squared-relu"], F.gelu: []}


def config_of_arguments(argv: list[str]) -> Any:
    """Returns the TransformerConfig. Raises what Megatron raises; ValueError for an argument that its parser lacks."""
    with _parser_on_cpu():
        from megatron.training.argument_utils import core_transformer_config_from_args
        from megatron.training.arguments import validate_args

        args = copy.deepcopy(_parser().parse_args(argv))  # defaults are objects of the parser, which is shared
        inner = math.lcm(
            args.tensor_model_parallel_size * args.context_parallel_size,
            args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size),
        )
        args.rank, args.world_size = 0, args.pipeline_model_parallel_size * inner
        args.num_layers = max(args.num_layers, 2 * args.pipeline_model_parallel_size)
        validate_args(args)
        config = core_transformer_config_from_args(args)
    if not torch.cuda.is_available():
        config.use_cpu_initialization = True
    return config


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Megatron reads its own source for it, which takes 0.4 s."""
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(_Parser(allow_abbrev=False))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(message)


@contextmanager
def _parser_on_cpu() -> Iterator[None]:
    """Within it Megatron believes to be on an H100 with Transformer Engine, and prints nothing."""
    with ExitStack() as stack:
        if sys.version_info < (3, 12):
            stack.enter_context(patch.object(typing, "override", typing_extensions.override, create=True))
        from megatron.core.transformer import transformer_config
        from megatron.core.transformer.moe import moe_utils
        from megatron.training import arguments

        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of Megatron's, about arguments that do not go well together
        stack.enter_context(patch.dict("os.environ", CUDA_DEVICE_MAX_CONNECTIONS="1", NVTE_CPU_OFFLOAD_V1="1"))
        stand_ins: list[tuple[Any, str, Any]] = [
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (arguments, "get_device_arch_version", lambda: 9),
            (transformer_config, "is_te_min_version", lambda *_, **__: True),
            (arguments, "is_te_min_version", lambda *_, **__: True),
            *((moe_utils, name, True) for name in _FUSED),
        ]
        for module, name, stand_in in stand_ins:
            stack.enter_context(patch.object(module, name, stand_in))
        yield
