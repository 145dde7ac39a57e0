"""torchtitan without a GPU: tiny models of its registry, and its own Trainer on ranks over gloo.

Import it before torchtitan, which asks once, when it is imported, which devices there are.
"""

import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.poison import compiler_forgets


@contextmanager
def _without_datasets() -> Iterator[None]:
    """Within it `datasets` can be imported: torchtitan's Trainer does so, for data sets; dev has none."""
    if find_spec("datasets") is not None:
        yield
        return
    package, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    for module, name in ((package, "Dataset"), (package, "load_dataset"), (distributed, "split_dataset_by_node")):
        setattr(module, name, None)
    stand_ins = {module.__name__: module for module in (package, distributed)}
    sys.modules.update(stand_ins)
    yield
    for name in stand_ins:
        del sys.modules[name]


with ExitStack() as _importing:
    _importing.enter_context(_without_datasets())
    if not torch.cuda.is_available():
        _importing.enter_context(patch("torch._utils._get_available_device_type", lambda: "cpu"))
    # torchtitan replaces it for torch.compile, in all of the process.
    _importing.enter_context(patch.object(FakeTensorMode, "__init__", FakeTensorMode.__init__))
    from torchtitan import trainer as trainer_module
    from torchtitan.components import metrics
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.distributed import utils as distributed_utils
    from torchtitan.models import deepseek_v3, gpt_oss, qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.moe import MoE
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

_divide = FSDPModule.set_gradient_divide_factor
VOCABULARY, LENGTH, BATCH, DIM = 64, 16, 2, 32
EXPERTS = "sonic_ep.integrations.torchtitan.moe.routed_experts"
ROUNDED = "sonic_ep.integrations.torchtitan.moe.rounded_moe"


def qwen3_moe() -> ModelSpec:
    """Softmax scores, renormalised; no shared experts."""
    spec = qwen3.model_registry("debugmodel_moe", attn_backend="varlen")
    layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True,
        n_layers=2,
        dim=DIM,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=8,
        top_k=2,
        attn_backend="varlen",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e4),
    )
    return _tiny(spec, layers)


def deepseek_v3_moe() -> ModelSpec:
    """Sigmoid scores, group limits, a scale, shared experts; the first layer is dense."""
    spec = deepseek_v3.model_registry("debugmodel", attn_backend="varlen", moe_comm_backend="standard")
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=3,
        n_dense_layers=1,
        dim=DIM,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=0.7,
        dense_hidden_dim=48,
        moe_hidden_dim=16,
        num_experts=8,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=2.5,
        router_route_norm=True,
        attn_backend="varlen",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=deepseek_v3.ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e4),
    )
    return _tiny(spec, layers)


def gpt_oss_moe() -> ModelSpec:
    """Softmax scores, renormalised; biases of router and experts. On CPUs its attention has no sinks."""
    spec = gpt_oss.model_registry("debugmodel", attn_backend="varlen", moe_comm_backend="standard")
    layers: Any = gpt_oss._build_gptoss_layers(
        dim=DIM,
        n_layers=2,
        hidden_dim=16,
        num_experts=8,
        top_k=2,
        load_balance_coeff=1e-3,
        moe_comm_backend="standard",
        rope=gpt_oss.CosSinRoPE.Config(dim=64, max_seq_len=LENGTH, theta=1e4),
    )
    return _tiny(spec, layers)


def moe_config(model: str) -> MoE.Config:
    """The config of one MoE of a model above."""
    return cast(Any, MODELS[model]().model).layers[-1].moe


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "qwen3": qwen3_moe,
    "deepseek_v3": deepseek_v3_moe,
    "gpt_oss": gpt_oss_moe,
}


def _tiny(spec: ModelSpec, layers: list[Any]) -> ModelSpec:
    """Makes a debug model of the registry smaller, with attention that runs on CPUs."""
    config: Any = spec.model
    config.vocab_size, config.dim, config.layers = VOCABULARY, DIM, layers
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = VOCABULARY, DIM
    config.lm_head.in_features, config.lm_head.out_features = DIM, VOCABULARY
    config.norm.normalized_shape = DIM
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


class RandomTokens(BaseDataLoader):
    """Two batches in turns, so that there is something to learn. They depend on the data parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._seed, self._shape, self._next = 10_000 * config.seed + 1000 * dp_rank, (local_batch_size, seq_len), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            draw = torch.Generator().manual_seed(self._seed + self._next % 2)
            B, L = self._shape
            tokens = torch.randint(VOCABULARY, (B, L + 1), generator=draw)
            self._next += 1
            yield {"input": tokens[:, :-1], "positions": torch.arange(L).expand(B, L)}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def config_of(
    model: str,
    folder: str,
    *,
    overrides: Sequence[Any] = (),
    steps: int = 20,
    precision: Any = "float64",
    recompute: Any = None,
    checkpoints: int | None = None,
    compiler: str | None = None,
    seed: int = 0,
    **parallelism: Any,
) -> Trainer.Config:
    """Returns the config of a Trainer that runs on CPUs. parallelism: fields of ParallelismConfig.

    checkpoints: after how many steps one is saved. seed: of the tokens.

    torchtitan's default backend, spmd_types, shards by FSDP with a newer torch than 2.13 alone.
    """
    return Trainer.Config(
        model_spec=MODELS[model](),
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(seed=seed),
        loss=CrossEntropyLoss.Config(),
        optimizer=_adamw(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            steps=steps,
            dtype=precision,
            mixed_precision_param=precision,
            mixed_precision_reduce=precision,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallelism}),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=checkpoints is not None, interval=checkpoints or steps),
        activation_checkpoint=recompute,
        compile=CompileConfig(enable=compiler is not None, components=["model"], backend=compiler or "inductor"),
        override=OverrideConfig(imports=[*overrides]),
        debug=DebugConfig(seed=0),
    )


def _adamw() -> OptimizersContainer.Config:
    config = default_adamw(lr=3e-3)
    config.implementation = "for-loop"
    return config


class _Memory(SimpleNamespace):
    """What torchtitan reports about a GPU's memory."""

    device_name, device_capacity_gib = "CPU", 0.0

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None: ...


def fsdp_over_gloo() -> AbstractContextManager[Any]:
    """gloo has no sum with a factor. Within this FSDP sums, and divides itself."""

    def divide_by(module: FSDPModule, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        _divide(module, factor)

    return patch.object(FSDPModule, "set_gradient_divide_factor", divide_by)


@contextmanager
def trainer(config: Trainer.Config, rank: int) -> Iterator[Any]:
    """A Trainer of the ranks that torch.distributed has been initialised with. Its losses are in `losses`."""
    autograd_threads = torch.autograd.is_multithreading_enabled()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(patch.dict(os.environ, {"LOCAL_RANK": str(rank), "RANK": str(rank)}))
        stack.enter_context(patch.object(metrics, "build_device_memory_monitor", _Memory))
        stack.enter_context(patch.object(distributed_utils, "set_pg_timeouts", lambda **_: None))  # for NCCL
        stack.enter_context(
            patch.object(trainer_module, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=int))
        )
        stack.enter_context(patch.dict(TORCH_DTYPE_MAP, {"float64": torch.float64}))
        stack.enter_context(fsdp_over_gloo())
        # Its own init_distributed does so: threads of autograd know no mesh.
        torch.autograd.set_multithreading_enabled(False)
        stack.callback(torch.autograd.set_multithreading_enabled, autograd_threads)
        made: Any = Trainer(config)
        for part in made.model_parts:
            draw_weights(part)
        made.losses = []
        log = made.metrics_processor.log

        def noting(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            made.losses.append(loss)
            log(step, loss, *args, **kwargs)

        made.metrics_processor.log = noting
        yield made
        made.close()


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draws each parameter by its name. torchtitan's own initialisation of shards draws the same on every rank here."""
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        whole = 1 + 0.1 * whole if whole.dim() == 1 else whole * whole.shape[-1] ** -0.5
        whole = whole.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


@contextmanager
def experts_in_own_dtype() -> Iterator[None]:
    """torchtitan's own grouped experts compute in bf16, whatever the dtype. Within this they do in that of x."""

    def grouped_mm(rows_RK: Tensor, weights_eKN: Tensor, *, offs: Tensor) -> Tensor:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        return torch.cat([rows_RK[a:b] @ w for a, b, w in zip(starts, ends, weights_eKN, strict=True)])

    with compiler_forgets(), patch.object(Tensor, "bfloat16", lambda self: self):
        with patch.object(torch, "_grouped_mm", grouped_mm):
            yield
