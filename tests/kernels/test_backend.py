"""Which implementation is chosen on this machine, and that it says so."""

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch

from sonic_ep.kernels import backend
from sonic_ep.kernels.backend import _implementation, operations_for, router_linear, router_operations, runs_triton
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named

FOLDER = Path(__file__).parents[2] / "kernels"


def test_the_cpu_takes_the_reference() -> None:
    assert operations_for(torch.zeros(2, 8), torch.zeros(1, 8, 8), activation_named("swiglu")) is reference


@pytest.mark.parametrize(("folder", "name"), [("dispatch.recv_index", "pair_lists"), ("route.rounding", "apply_rule")])
def test_an_operation_runs_in_triton_on_a_gpu_and_its_twin_elsewhere(folder: str, name: str) -> None:
    has_triton = find_spec("triton") is not None
    assert runs_triton(cast(torch.Tensor, SimpleNamespace(is_cuda=True))) is has_triton
    assert not runs_triton(torch.empty(0))
    for in_triton in (False, True)[: 1 + has_triton]:
        module = "triton" if in_triton else "reference"
        assert _implementation(folder, name, in_triton).__module__ == f"sonic_ep.kernels.{folder}.{module}"


OPERATIONS = [
    name
    for name, value in vars(backend).items()
    if name[0] != "_" and hasattr(value, "__wrapped__") and not hasattr(value, "cache_info")
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_two_implementations_of_its_signature(name: str) -> None:
    signature = inspect.signature(getattr(backend, name))
    asked: list[str] = []
    stock = _implementation

    def implementation(folder: str, name: str, in_triton: bool) -> object:
        asked.append(folder)
        return lambda *_, **__: None

    tensors = [torch.zeros(1)] * sum(each.kind == each.POSITIONAL_OR_KEYWORD for each in signature.parameters.values())
    with patch.object(backend, "_implementation", implementation):
        getattr(backend, name)(*tensors)
    (folder,) = asked
    for in_triton in (False, True)[: 1 + (find_spec("triton") is not None)]:
        assert [*inspect.signature(stock(folder, name, in_triton)).parameters] == [*signature.parameters]


def test_operations_are_all_known() -> None:
    folders = {path.parent for path in FOLDER.rglob("reference.py")}
    assert len(OPERATIONS) >= 11
    assert {path.name for path in folders} >= {"select", "rounding", "status", "plan", "split_sizes", "scalars"}


def test_the_router_has_no_kernels_on_the_cpu() -> None:
    assert router_operations(torch.device("cpu"), torch.float32, 2) is None
    assert router_linear(torch.zeros(2, 16, dtype=torch.bfloat16)) is None
