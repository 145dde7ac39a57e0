"""The router's linear layer in parts: exact parts, and logits and gradients as good as those of fp32 arithmetic.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep.kernels.backend import router_linear
from sonic_ep.routers import linear as routers_linear
from sonic_ep.routers.linear import linear
from tests.helpers.tolerances import assert_near
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
KERNELS: Any = import_module("sonic_ep.kernels.route.linear.triton")
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # first cuBLAS call of autograd's own thread
]


@pytest.fixture(autouse=True)
def bf16_in_the_interpreter() -> Iterator[None]:
    """It multiplies the bits of bf16 operands as if they were integers: give it fp32 ones, which are exact."""
    interpreter, tl = import_module("triton.runtime.interpreter"), import_module("triton.language")
    create_dot = interpreter.InterpreterBuilder.create_dot

    def exact_dot(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            left, right = builder.cast_impl(left, tl.float32), builder.cast_impl(right, tl.float32)
        return create_dot(builder, left, right, *rest)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", exact_dot):
        yield


@pytest.fixture
def split() -> Iterator[None]:
    """The kernels, also where the interpreter runs them on the CPU."""
    with patch.object(routers_linear, "router_linear", lambda x_TH: KERNELS if x_TH.dtype == torch.bfloat16 else None):
        yield


class Case:
    def __init__(self, T: int, E: int, H: int) -> None:
        self.x_TH = torch.randn(T, H, device=DEVICE).bfloat16()
        self.weight_EH = torch.randn(E, H, device=DEVICE) * 0.02
        self.bias_E = torch.randn(E, device=DEVICE)
        self.dlogits_TE = torch.randn(T, E, device=DEVICE) * 1e-3

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits and gradients of x, weight and bias from rows of that dtype."""
        leaves = [self.x_TH.to(dtype), self.weight_EH.to(torch.promote_types(dtype, torch.float32)), self.bias_E]
        leaves[2] = leaves[2].to(leaves[1].dtype)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        logits_TE, _ = linear(leaves[0], leaves[1], leaves[2])
        gradients = torch.autograd.grad(logits_TE, leaves, self.dlogits_TE.to(logits_TE.dtype))
        return logits_TE.detach(), *gradients  # type: ignore[return-value]


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def check(case: Case) -> None:
    exact = case.results(torch.float64)
    single = case.results(torch.float32)
    ours = case.results(torch.bfloat16)
    for name, mine, fp32, right in zip(("logits", "dx", "dweight", "dbias"), ours, single, exact, strict=True):
        assert mine.shape == right.shape
        # Short sums can happen to be exact in fp32.
        limit = 2.0**-8 if name == "dx" else max(2 * error(fp32, right), 2e-7)
        assert error(mine, right) <= limit, name
        assert mine.dtype == (torch.bfloat16 if name == "dx" else torch.float32)


SHAPES = [(1, 1, 16), (3, 5, 32), (130, 8, 64), (40, 60, 112), (70, 128, 304), (20, 130, 1104), (300, 16, 48)]


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_good_as_fp32(shape: tuple[int, int, int]) -> None:
    check(Case(*shape))


@pytest.mark.usefixtures("split")
def test_gradient_of_the_weight_summed_by_several_programs() -> None:
    with patch.object(KERNELS, "_MIN_ROWS_PER_SPLIT", 64):
        check(Case(300, 16, 48))


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("shape", [(300, 16, 48), (200, 130, 1104)], ids=str)
def test_wider_tiles_of_tokens(shape: tuple[int, int, int]) -> None:
    case = Case(*shape)
    with patch.multiple(KERNELS, _PROGRAMS=1, _EXTRA_N_COST=0.9, _is_hopper=lambda _device: True):
        assert KERNELS._extra_tokens(shape[0], 1, case.x_TH.device) == KERNELS._EXTRA_N
        check(case)


@pytest.mark.parametrize(
    ("T", "tiles_m", "wider"),
    [(16384, 1, False), (24576, 1, True), (25400, 1, False), (32768, 1, False), (16384, 4, False)],
)
def test_tiles_are_wider_where_that_spares_a_second_wave(T: int, tiles_m: int, wider: bool) -> None:
    with patch.object(KERNELS, "_is_hopper", lambda _device: True):
        assert (KERNELS._extra_tokens(T, tiles_m, torch.device("cpu")) > 0) == wider


@pytest.mark.parametrize("tiles", [1, 12, 16, 48, 64, 70, 112, 131, 132, 133, 224, 1000])
@pytest.mark.parametrize("most", [1, 3, 16])
def test_splits_fill_waves(tiles: int, most: int) -> None:
    """No number of parts that is allowed keeps clearly more multiprocessors busy."""

    def busy(splits: int) -> float:
        waves = -(-tiles * splits // KERNELS._PROGRAMS)
        return tiles * splits / (waves * KERNELS._PROGRAMS)

    splits = KERNELS._splits(tiles)[most]
    assert 1 <= splits <= most
    assert busy(splits) * (1 + KERNELS._SPLIT_COST * most) >= max(map(busy, range(1, most + 1)))


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_each_gradient_alone(wanted: int) -> None:
    case = Case(9, 8, 32)
    leaves = [case.x_TH, case.weight_EH, case.bias_E]
    leaves[wanted].requires_grad_()
    (gradient,) = torch.autograd.grad(linear(*leaves)[0], leaves[wanted : wanted + 1], case.dlogits_TE)
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert torch.equal(gradient, case.results(torch.bfloat16)[1 + wanted])


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("T", [40, 300])  # summed by one program, by several
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_not_cast(T: int, dtype: torch.dtype) -> None:
    """As FSDP with mixed precision gathers them. Only the gradient of the weight is rounded."""
    case = Case(T, 24, 48)
    leaves = [case.x_TH, case.weight_EH.to(dtype), case.bias_E.to(dtype)]
    results = []
    for weights in (leaves[1:], [leaf.float() for leaf in leaves[1:]]):
        inputs = [leaf.detach().clone().requires_grad_() for leaf in (case.x_TH, *weights)]
        with patch.object(KERNELS, "_MIN_ROWS_PER_SPLIT", 64):
            logits_TE, _ = linear(*inputs)
            results.append([logits_TE, *torch.autograd.grad(logits_TE, inputs, case.dlogits_TE)])
    for mine, single in zip(*results, strict=True):
        if DEVICE == "cuda" or mine.dtype == single.dtype:
            assert torch.equal(mine, single.to(mine.dtype))
        else:  # the interpreter truncates to bf16
            torch.testing.assert_close(mine.float(), single, rtol=2.0**-7, atol=1e-7)
    assert [result.dtype for result in results[0]] == [torch.float32, torch.bfloat16, dtype, dtype]


@pytest.mark.usefixtures("split")
def test_the_experts_gradient_is_added_before_rounding() -> None:
    case = Case(40, 24, 48)
    dx_others_TH = torch.randn_like(case.x_TH)
    both_TH = dx_others_TH.clone()
    arguments = case.dlogits_TE, case.x_TH, case.weight_EH
    dx_TH, _ = KERNELS.gradients(*arguments, of_x=True, of_weight=False, dx_others_TH=both_TH)
    assert dx_TH is both_TH
    exact = case.dlogits_TE.double() @ case.weight_EH.double() + dx_others_TH.double()
    assert error(dx_TH, exact) < 2.0**-8


@pytest.mark.usefixtures("split")
def test_without_a_bias_and_from_columns_of_wider_tensors() -> None:
    case = Case(20, 24, 40)
    x_TH, weight_EH = case.x_TH[:, 3:35], case.weight_EH[:, 3:35]
    exact = F.linear(x_TH.double(), weight_EH.double())
    assert error(linear(x_TH, weight_EH, None)[0], exact) < 2e-7


def values_of_every_size() -> Tensor:
    """fp32 values over all exponents at which the third part is a normal bf16, and zero."""
    exponents = torch.arange(-100.0, 120.0).repeat(8)
    mantissas = torch.empty_like(exponents, dtype=torch.float64).uniform_(1, 2)
    signs = torch.randint(2, exponents.shape) * 2 - 1
    values = (mantissas * torch.exp2(exponents.double()) * signs).float()
    values[::50] = 0.0
    return values.view(-1, 16).to(DEVICE)


def test_the_parts_of_a_weight_are_the_weight() -> None:
    values = values_of_every_size()
    parts = KERNELS._parts_of_weight(values).buffer[:, : values.shape[0]]
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[1:].double().sum(0), values.double())
    # Two parts are not enough.
    assert not torch.equal(parts[1:3].double().sum(0), values.double())


def test_the_parts_of_a_gradient_are_those_of_a_weight_backwards() -> None:
    values = values_of_every_size()
    parts = KERNELS._parts_of_gradient(values).buffer.flip(1).transpose(0, 1)
    assert torch.equal(parts, KERNELS._parts_of_weight(values).buffer[:, : values.shape[0]])


def test_experts_are_padded_with_zeros() -> None:
    values = torch.randn(5, 16, device=DEVICE)
    assert torch.equal(
        KERNELS._parts_of_weight(values).buffer, KERNELS._parts_of_weight(F.pad(values, (0, 0, 0, 11))).buffer
    )
    values = values.T
    assert torch.equal(
        KERNELS._parts_of_gradient(values).buffer, KERNELS._parts_of_gradient(F.pad(values, (0, 11))).buffer
    )


def test_three_slots_of_both_hold_the_three_largest_products() -> None:
    """Their product in double precision: what bf16 GEMMs give but for the rounding of sums."""
    T, E, H = 30, 24, 40
    dlogits_TE, weight_EH = torch.randn(T, E, device=DEVICE), torch.randn(E, H, device=DEVICE)
    left = KERNELS._parts_of_gradient(dlogits_TE).buffer[:, 1:].flatten(1)
    right = KERNELS._parts_of_weight(weight_EH).buffer[:3].flatten(0, 1)
    exact, scale = dlogits_TE.double() @ weight_EH.double(), dlogits_TE.double().abs() @ weight_EH.double().abs()
    # The interpreter cuts a value off where a GPU rounds it: a bit less a part.
    bits = 16 if DEVICE == "cuda" else 13
    assert ((left.double() @ right.double() - exact).abs() <= 2.0**-bits * scale).all()


def test_other_rows_take_fp32_arithmetic() -> None:
    x_TH = torch.randn(4, 8, device=DEVICE)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert router_linear(x_TH.to(dtype)) is None
    assert router_linear(x_TH[:0].bfloat16()) is None
    assert router_linear(x_TH.bfloat16()) is None  # rows of 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(16384, 128, 2048), (5000, 512, 2048), (3000, 256, 7168), (1000, 60, 1536), (24576, 8, 64), (24576, 128, 1536)],
    ids=str,
)
def test_as_good_as_fp32_on_the_gpu(shape: tuple[int, int, int]) -> None:
    case = Case(*shape)
    assert router_linear(case.x_TH) is KERNELS
    check(case)
    for first, again in zip(case.results(torch.bfloat16), case.results(torch.bfloat16), strict=True):
        assert torch.equal(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24576, 128, 1536), (24500, 60, 2048)], ids=str)
def test_wider_tiles_of_tokens_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    case = Case(*shape)
    assert KERNELS._extra_tokens(shape[0], 1, case.x_TH.device) > 0
    wide_TE = KERNELS.logits(case.x_TH, case.weight_EH, case.bias_E)
    with patch.object(KERNELS, "_EXTRA_N_COST", 9):
        assert torch.equal(wide_TE, KERNELS.logits(case.x_TH, case.weight_EH, case.bias_E))


@pytest.mark.gpu
def test_autocast_changes_nothing() -> None:
    case = Case(500, 16, 64)
    plain = case.results(torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.float16):
        cast = case.results(torch.bfloat16)
    for first, again in zip(plain, cast, strict=True):
        assert torch.equal(first, again)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["kernels", "torch"])
def test_in_blocks_no_bit_depends_on_other_tokens(dtype: torch.dtype) -> None:
    T = 70 if DEVICE == "cpu" else 3000  # more than two blocks
    case, others_TH = Case(T, 20, 64), torch.randn(T, 64, device=DEVICE).to(dtype)

    def results(tokens: Tensor, *, batch_invariant: bool = True) -> tuple[Tensor, ...]:
        """Logits and the gradients of x, of which another reader has some, and of the weight."""
        x_TH, weight_EH = case.x_TH[tokens].to(dtype).requires_grad_(), case.weight_EH.clone().requires_grad_()
        logits_TE, passed_TH = linear(x_TH, weight_EH, case.bias_E, batch_invariant=batch_invariant)
        given = case.dlogits_TE[tokens], others_TH[tokens].clone()
        return logits_TE.detach(), *torch.autograd.grad([logits_TE, passed_TH], [x_TH, weight_EH], given)

    order = torch.randperm(T, device=DEVICE)
    whole, expected = results(order), results(order, batch_invariant=False)
    for got, wanted in zip(whole, expected, strict=True):
        assert_near(got, wanted, share=2.0**-7 if got.dtype == torch.bfloat16 else 1e-5)
    # The interpreter multiplies by numpy, which chooses by the size of a tile.
    compared = [0, 1] if DEVICE == "cuda" or dtype == torch.float32 else [1]
    for some in (slice(0, 1), slice(1, 34), slice(34, T)):
        part = results(order[some])
        assert [torch.equal(part[number], whole[number][some]) for number in compared] == [True] * len(compared)
