"""Stock Megatron-Core 0.19.2 on a machine without a GPU, over gloo: what stands in its way, put aside for a while.

    with megatron_on_cpu():
        ...  # build, train, save: Megatron believes that it has one CUDA device, which is the CPU

Nothing of this is for sonic_ep: its code keeps the real torch, so that a CUDA call of ours on a CPU tensor still fails.
On a machine with a GPU the context does nothing. What Megatron also wants is in `CPU_CONFIG`, for TransformerConfig.
"""

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import dummy
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.helpers.poison import compiler_forgets

# Fusions of these names are CUDA kernels, and weights made by Megatron's own default would be made on the GPU.
CPU_CONFIG = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "randn", "tensor", "zeros", "zeros_like")
CPU = torch.device("cpu")


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Within it Megatron-Core runs on the CPU; on a machine with a GPU it is spared torch's news. This process only."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # What torch 2.13 has renewed: names of collectives, and the sharded tensors that checkpoints are made of.
        warnings.filterwarnings("ignore", "`torch.distributed|Please use DTensor", FutureWarning)
        # Megatron has each rank read its own part of a checkpoint, which torch takes for a mistake.
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavail|The argument order of load", UserWarning
        )
        if torch.cuda.is_available():
            # Of what torch.compile makes of Megatron's small functions, and of the shared experts' own stream.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor|The AccumulateGrad node", UserWarning)
            yield
            return
        if sys.version_info < (3, 12):
            module = _index_of_samples()
            stack.enter_context(patch.dict(sys.modules, {module.__name__: module}))
        stack.enter_context(compiler_forgets())
        for dst, name, value in _shims():
            stack.enter_context(patch.object(dst, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # its jit_fuser is torch.compile
        stack.enter_context(_quiet_generator())
        yield


def _index_of_samples() -> ModuleType:
    """What GPTDataset wants of Megatron-Core's compiled module, which the wheel has for Python 3.12 alone."""
    import numpy

    def build_sample_idx(
        sizes: Any, documents: Any, length: int, epochs: int, tokens: int, drop_last: bool = True, extra: bool = True
    ) -> Any:
        """(document, offset) where each sample of `length` tokens begins, and the last one ends."""
        samples = epochs * tokens - extra
        ends = numpy.cumsum(sizes[documents], dtype=numpy.int64)
        starts = numpy.arange((samples if drop_last else samples + length - 1) // length + 1) * length
        starts = numpy.minimum(starts, ends[-1] - 1)
        document = numpy.searchsorted(ends, starts, side="right")
        return numpy.stack([document, starts - (ends - sizes[documents])[document]], axis=1).astype(documents.dtype)

    module = ModuleType("megatron.core.datasets.helpers_cpp")
    module.build_sample_idx_int32 = module.build_sample_idx_int64 = build_sample_idx  # type: ignore[attr-defined]
    return module


def _shims() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what stands there instead)."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for name in FACTORIES:
        yield torch, name, _on_cpu(getattr(torch, name))
    yield torch.Tensor, "cuda", _for_megatron(lambda self, *_, **__: self, torch.Tensor.cuda)
    yield torch.Tensor, "record_stream", _for_megatron(lambda *_: None, torch.Tensor.record_stream)
    yield torch.Tensor, "type", _typed_as_cuda(torch.Tensor.type)

    # One stream that is always ready, and one generator: the CPU's.
    stand_ins: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "stream": lambda *_: nullcontext(),
        "Stream": lambda *_, **__: _STREAM,
        "Event": lambda *_, **__: _Event(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
    }
    for name, stand_in in stand_ins.items():
        yield torch.cuda, name, _for_megatron(stand_in, getattr(torch.cuda, name))
    yield random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)

    # The all-to-all dispatcher wants its split sizes as numpy, and gets them so only from a GPU tensor.
    yield moe_utils, "maybe_move_tensor_to_cpu", _moved
    yield _module("megatron.core.transformer.moe.token_dispatcher"), "maybe_move_tensor_to_cpu", _moved

    # With expert tensor parallelism ranks exchange parts of different sizes, which gloo does not take.
    for name, stand_in in (("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter)):
        yield torch.distributed, name, _for_megatron(stand_in, getattr(torch.distributed, name))

    # Checkpoints are written by processes, which a rank of tests.helpers.launch may not start: by threads, then.
    yield _module("megatron.core.dist_checkpointing.strategies.filesystem_async").mp, "get_context", lambda _: dummy

    # torch's norms do the right thing with sequence parallelism, once their weights carry the mark.
    yield WrappedTorchNorm, "__new__", _norm

    # Checkpoints are written for an Adam whose step is a property of the group.
    yield optimizer, "Adam", GroupStepAdam
    yield optimizer, "USING_PYTORCH_OPTIMIZER", False
    yield distrib_optimizer, "Adam", GroupStepAdam
    yield distrib_optimizer, "HAVE_APEX_OR_TE", True
    yield distrib_optimizer, "USING_APEX_OPTIMIZER", True


def _module(name: str) -> Any:
    return __import__(name, fromlist=["_"])


def _megatron_calls() -> bool:
    """Whether the function that called the shim belongs to anything but sonic_ep."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != "sonic_ep"


def _for_megatron(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_topk(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _megatron_calls() else original)(*args, **kwargs)

    return compute_topk


def _on_cpu(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda") and _megatron_calls():
            kwargs["device"] = CPU
        return allocate(*args, **kwargs)

    return allocate_on_cpu


def _typed_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type() without arguments says torch.cuda.FloatTensor: the name by which Megatron knows fp32."""

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if not args and not kwargs and _megatron_calls():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_of


class _Event:
    """An event of a machine on which everything has already happened."""

    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: object) -> _Event:
        return _Event()


_STREAM = _Stream()


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(outputs: list[Tensor], value: Tensor, group: Any = None, **_: object) -> None:
    ranks = torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)
    for rank, output in zip(ranks, outputs, strict=True):
        if rank == torch.distributed.get_rank():
            output.copy_(value)
        torch.distributed.broadcast(output, rank, group=group)


def _reduce_scatter(output: Tensor, parts: list[Tensor], group: Any = None, **_: object) -> None:
    summed = torch.cat(parts)
    torch.distributed.all_reduce(summed, group=group)
    output.copy_(summed.split([len(part) for part in parts])[torch.distributed.get_rank(group)])


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> nn.Module:
    norm = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


@contextmanager
def _quiet_generator() -> Iterator[None]:
    """Megatron warns whenever its "GPU" generator moves the CPU's, which here is the same one."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW as Apex's FusedAdam keeps it: `step` belongs to the group, the state holds the two moments alone."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode or capturable:
            raise ValueError("GroupStepAdam decays weights as AdamW alone, and is in no graph")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(parameter.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(mean, scale, value=-lr / (1 - beta1**step))
