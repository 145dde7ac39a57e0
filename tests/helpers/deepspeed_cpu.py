"""DeepSpeed 0.19.8 inside a rank of tests.helpers.launch: gloo, no compiler, nothing left behind.

    def worker(rank):
        with deepspeed_world():
            run = engine(model, zero=1)
            return train(run, batches, loss_of)                   # [Step(loss, grad_norm), ...], equal on all ranks

Left alone, DeepSpeed compiles its shared-memory collectives with ninja when it starts on a CPU, and FusedAdam when a
config asks for Adam. Nothing here is for sonic_ep. On a GPU rank (nccl) the same calls train on its GPU.
"""

import importlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.process_groups import passing_groups


class Step(NamedTuple):
    """loss: the ranks' mean before the update. grad_norm: before clipping, over every weight once."""

    loss: float
    grad_norm: float


@contextmanager
def deepspeed_world() -> Iterator[None]:
    """Within it DeepSpeed works on the default process group. At the end it forgets its groups, so that the next test
    may divide the ranks in another way."""
    rank = str(dist.get_rank())
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    if not torch.cuda.is_available():
        world["DS_ACCELERATOR"] = "cpu"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore")  # names that torch 2.13 has renewed, and more
        stack.enter_context(patch.dict(os.environ, {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}))
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        # `import deepspeed.comm.torch as backend` would bind torch itself: the module hides its own name.
        backend = importlib.import_module("deepspeed.comm.torch")
        groups = importlib.import_module("deepspeed.utils.groups")
        stack.enter_context(patch.object(backend, "build_shm_op", lambda: None))
        stack.enter_context(passing_groups())
        stack.callback(setattr, functional, "linear", functional.linear)  # ZeRO 3 puts its own there for good
        logger = importlib.import_module("deepspeed.utils").logger
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        importlib.import_module("deepspeed").init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        try:
            yield
        finally:
            groups._release_process_group_references(None)
            comm.cdb = None
            _split_gate_up(_ENGINES)


_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()  # of this world


def _split_gate_up(engines: weakref.WeakSet[Any]) -> None:
    """A model that has been trained refers to itself through autograd's nodes, where Python's collector does not look,
    and an engine to the groups."""
    for each in engines:
        for part in [*each.module.parameters(), *each.module.modules(), each.optimizer, each]:
            vars(part).clear()
    engines.clear()


def engine(
    model: nn.Module,
    *,
    zero: int,
    lr: float = 3e-3,
    clip: float = 1.0,
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
    **config: Any,
) -> Any:
    """A DeepSpeed engine of `model` at a ZeRO stage: Adam of torch unless `optimizer` says otherwise, one micro-batch a
    step. config: further keys, which win."""
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero},
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if optimizer is None:
        # Without torch_adam, FusedAdam would be compiled.
        settings["optimizer"] = {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}
    built, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**settings, **config})
    _ENGINES.add(built)
    return built


def train(run: Any, batches: Iterable[Any], loss_of: Callable[[Any, Any], Tensor]) -> list[Step]:
    """A step for each batch of this rank; loss_of(engine, batch) is this rank's loss. With gradient accumulation only
    what updates is told, with the loss of its last micro-batch."""
    steps = []
    for batch in batches:
        loss = loss_of(run, batch)
        run.backward(loss)
        updates = run.is_gradient_accumulation_boundary()
        reduced = _reduced_norm(run.module) if updates and run.zero_optimization_stage() == 0 else None
        run.step()
        if not updates:
            continue
        mean = loss.detach().double()
        dist.all_reduce(mean)
        raised = run.get_global_grad_norm()
        norm = reduced if raised is None else raised
        assert norm is not None
        steps.append(Step(float(mean) / dist.get_world_size(), float(norm)))
    return steps


def _reduced_norm(model: nn.Module) -> Tensor:
    """The norm of gradients that are whole and reduced, which without ZeRO no engine tells in fp32."""
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    square = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for parameter in model.parameters():
        assert parameter.grad is not None
        part = parameter.grad.double().square().sum()
        copies = dist.get_world_size()
        if is_moe_param(parameter):
            name = parameter.group_name  # type: ignore[attr-defined]
            copies = groups._get_expert_data_parallel_world_size(name)
        square += part / copies
    dist.all_reduce(square)
    return square.sqrt()
