"""What kernels cannot read, said before they are launched. CUDA tensors are stand-ins here: no GPU is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sonic_ep import EPGroup, MoE, MoEConfig
from sonic_ep.checks import problem_with_memory, problem_with_rows
from tests.helpers.errors import message_of
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]


def stand_in(index: int = 0, offset: int = 0) -> Any:
    return SimpleNamespace(
        device=torch.device("cuda", index),
        is_cuda=True,
        shape=(4, 8),
        itemsize=2,
        dim=lambda: 2,
        is_contiguous=lambda: True,
        storage_offset=lambda: offset,
    )


def test_rows_on_another_device_than_the_current_one() -> None:
    with patch.object(torch.cuda, "current_device", lambda: 0):
        assert problem_with_rows(stand_in(0), 4) is None
        raised = problem_with_rows(stand_in(1), 4)
    assert raised is not None
    assert raised.startswith("x is on cuda:1, but the current device, on which kernels are launched, is cuda:0; ")
    assert raised.endswith("call torch.cuda.set_device(1), or the layer under torch.cuda.device(1)")


@pytest.mark.parametrize("offset", [1, 4, 12])
def test_weights_that_start_in_the_middle_of_16_bytes(offset: int) -> None:
    raised = problem_with_memory("w1", stand_in(offset=offset))
    assert raised == (
        f"w1 starts at byte {2 * offset} of its storage, which is no multiple of 16; set it to w1.clone()"
    )
    assert problem_with_memory("w1", stand_in(offset=8 * offset)) is None


def as_dtensor(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def inference_tensor(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def feed_a_dtensor(rank: int) -> str:
    layer, x = MoE(MoEConfig(d=8, n=4, E=8, K=2), EPGroup(), seed=0), torch.randn(10, 8)
    return message_of(lambda: layer(as_dtensor(x) if rank == 1 else x))


def test_a_dtensor_on_one_rank(ranks: Ranks) -> None:
    wanted = "rank 1: x is a DTensor; give this rank's own part, x.to_local(), or x.full_tensor()"
    assert ranks(2).run(feed_a_dtensor) == [wanted] * 2


def with_an_inference_tensor(rank: int) -> list[str]:
    """Where nothing is saved for a backward, it is welcome."""
    layer, x = MoE(MoEConfig(d=8, n=4, E=8, K=2), EPGroup(), seed=0), torch.randn(10, 8)
    x = inference_tensor(x) if rank == 1 else x
    messages = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            messages.append(message_of(lambda: layer.eval()(x)))
    return [*messages, message_of(lambda: layer.requires_grad_(False)(x))]


def test_an_inference_tensor_where_nothing_is_saved(ranks: Ranks) -> None:
    assert ranks(2).run(with_an_inference_tensor) == [["no error"] * 3] * 2
