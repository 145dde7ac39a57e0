"""The router's linear layer in the dtype of x: what is rounded, what is not, and nothing by autocast.

tests/kernels/route/test_linear.py has the one in fp32 on tensor cores.

Legend: T tokens on this rank, H hidden size, E
experts.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep.config import LinearDtype, MoEConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.routers.linear import linear
from sonic_ep.routers.router import Router

T, H, E = 70, 48, 16
SPLIT = [torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case:
    """fp32 weights and bias for rows of `dtype`, and a gradient of the logits."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", T: int = T) -> None:
        self.x_TH = torch.randn(T, H, device=device).to(dtype)
        self.weight_EH, self.bias_E = torch.randn(E, H, device=device) * 0.1, torch.randn(E, device=device)
        self.dlogits_TE = torch.randn(T, E, device=device)

    def results(self, linear_dtype: LinearDtype, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        """Logits and gradients, the forward under that autocast."""
        leaves = {"dx": self.x_TH, "dweight": self.weight_EH, "dbias": self.bias_E}
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        with torch.autocast(self.x_TH.device.type, dtype=autocast, enabled=autocast is not None):
            logits_TE, _ = linear(*leaves.values(), linear_dtype=linear_dtype)
        return self._with_gradients(logits_TE, leaves)

    def textbook(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """F.linear of everything in that dtype, the logits' gradient too."""
        leaves = {"dx": self.x_TH, "dweight": self.weight_EH, "dbias": self.bias_E}
        leaves = {name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in leaves.items()}
        return self._with_gradients(F.linear(*leaves.values()), leaves)

    def _with_gradients(self, logits_TE: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        grads = torch.autograd.grad(logits_TE, list(leaves.values()), self.dlogits_TE.to(logits_TE.dtype))
        return {"logits": logits_TE.detach(), **dict(zip(leaves, grads, strict=True))}


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # first cuBLAS call of autograd's own thread
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SPLIT)
def test_half_precision_is_that_of_one_gemm(dtype: torch.dtype, device: str) -> None:
    case = Case(dtype, device)
    ours, exact, plain = case.results("input"), case.textbook(torch.float64), case.textbook(dtype)
    fp32 = case.results("float32")
    eps = torch.finfo(dtype).eps
    for name, mine in ours.items():
        assert mine.dtype == (dtype if name == "dx" else torch.float32), name
        assert torch.equal(mine.to(dtype), plain[name]), name
        assert error(mine, exact[name]) < eps, name
        if name != "dx":
            assert error(mine, exact[name]) > 10 * error(fp32[name], exact[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_rows_have_the_arithmetic_of_float32(dtype: torch.dtype) -> None:
    case = Case(dtype)
    ours, theirs = case.results("input"), case.results("float32")
    for name, mine in ours.items():
        assert mine.dtype == (dtype if name in ("logits", "dx") else torch.float32)
        assert torch.equal(mine, theirs[name]), name


@pytest.mark.parametrize("cast", SPLIT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype: torch.dtype, cast: torch.dtype) -> None:
    case = Case(dtype)
    plain, inside = case.results("input"), case.results("input", autocast=cast)
    for name, wanted in plain.items():
        assert inside[name].dtype == wanted.dtype, name
        assert torch.equal(inside[name], wanted), name


class Handed(torch.autograd.Function):
    """x, with a gradient that comes as one tensor, whose address is kept."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, gradient_TH: Tensor) -> Tensor:
        ctx.gradient_TH = gradient_TH
        return x_TH.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.gradient_TH, None


@pytest.mark.parametrize("linear_dtype", ["float32", "input"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_both_results_are_summed(dtype: torch.dtype, linear_dtype: LinearDtype) -> None:
    case = Case(dtype)
    x_TH, dx_others_TH = case.x_TH.clone().requires_grad_(), torch.randn_like(case.x_TH)
    logits_TE, passed_TH = linear(x_TH, case.weight_EH, case.bias_E, linear_dtype)
    assert torch.equal(passed_TH, x_TH)
    assert passed_TH.data_ptr() == x_TH.data_ptr()
    handed_TH = dx_others_TH.clone()
    loss = (logits_TE * case.dlogits_TE).sum() + Handed.apply(passed_TH, handed_TH)
    (dx_TH,) = torch.autograd.grad(loss, x_TH)
    wanted_TH = case.results(linear_dtype)["dx"].double() + dx_others_TH.double()
    assert error(dx_TH, wanted_TH) < 4 * torch.finfo(dtype).eps
    if linear_dtype == "input":
        assert dx_TH.data_ptr() == handed_TH.data_ptr()


@pytest.mark.parametrize("linear_dtype", ["float32", "input"])
def test_either_result_alone(linear_dtype: LinearDtype) -> None:
    case = Case(torch.bfloat16)
    x_TH, weight_EH = case.x_TH.clone().requires_grad_(), case.weight_EH.clone().requires_grad_()
    _, passed_TH = linear(x_TH, weight_EH, None, linear_dtype)
    dx_TH, dweight_EH = torch.autograd.grad(passed_TH.square().sum(), [x_TH, weight_EH], allow_unused=True)
    assert torch.equal(dx_TH, 2 * x_TH)
    assert dweight_EH is None
    fixed_TH = case.x_TH
    logits_TE, passed_TH = linear(fixed_TH, weight_EH, None, linear_dtype)
    assert passed_TH is fixed_TH
    assert logits_TE.requires_grad


def test_no_rows() -> None:
    results = Case(torch.bfloat16, T=0).results("input")
    assert results["logits"].shape == (0, E)
    assert torch.equal(results["dweight"], torch.zeros(E, H))


def make_router(**options: Any) -> Router:
    router = Router(MoEConfig(d=H, n=4, E=E, K=2, router=RouterConfig(linear_dtype="input", **options)))
    torch.nn.init.normal_(router.weight, std=0.1)
    return router


def test_behind_the_logits_everything_is_fp32() -> None:
    router = make_router(linear_bias=True, balance="batch", balance_coef=0.1, z_loss_coef=0.1)
    x_TH = torch.randn(T, H).bfloat16()
    logits_TE, _ = router.logits(x_TH)
    assert logits_TE.dtype == torch.float32
    assert torch.equal(logits_TE, logits_TE.bfloat16().float())
    routed = router(x_TH, group=EPGroup.alone(), sequence_length=T)
    weights_N = routed.routing.weights_N
    assert weights_N.dtype == routed.aux_loss.dtype == torch.float32
    assert not torch.equal(weights_N, weights_N.bfloat16().float())
    (weights_N.square().sum() + routed.aux_loss).backward()
    for parameter in router.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_jittered_rows_are_rounded_to_the_dtype_of_x() -> None:
    router, x_TH = make_router(jitter=0.25), torch.randn(T, H).bfloat16()
    torch.manual_seed(1)
    logits_TE, _ = router.logits(x_TH)
    torch.manual_seed(1)
    jittered_TH = x_TH.float() * torch.empty(T, H).uniform_(0.75, 1.25)
    assert torch.equal(logits_TE, F.linear(jittered_TH.bfloat16(), router.weight.bfloat16()).float())
