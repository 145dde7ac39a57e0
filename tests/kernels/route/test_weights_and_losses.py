"""Fused weights, losses and gradient of the logits: against routers/topk.py and reference.py in double precision.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends, B sequences.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.route.interface import RouterOperations
from sonic_ep.kernels.route.select.reference import pairs_of_mask, select_tokens
from sonic_ep.kernels.route.topk.reference import scores_of, times_chosen, top_experts, topk_mask
from sonic_ep.routers import topk
from sonic_ep.routers import weights_and_losses as outputs
from sonic_ep.routers.replay import replay_contexts
from sonic_ep.routers.router import Router
from sonic_ep.routers.topk import TopK
from sonic_ep.routers.weights_and_losses import weights_and_losses
from sonic_ep.routing import INDEX_DTYPE, BalanceCounts, GroupCounts, RoutedPairs
from tests.helpers.tolerances import assert_near
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
OPERATIONS: RouterOperations = import_module("sonic_ep.kernels.route.fused")  # type: ignore[assignment]
# The interpreter computes in numpy, which warns of inf - inf.
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@contextmanager
def choosing(operations: RouterOperations | None) -> Iterator[None]:
    """These operations, whatever the device."""
    with (
        patch.object(topk, "router_operations", return_value=operations),
        patch.object(outputs, "router_operations", return_value=operations),
    ):
        yield


def fused() -> AbstractContextManager[None]:
    """The kernels, also where the interpreter runs them on the CPU."""
    return choosing(OPERATIONS)


def pairs_of(result: TopK, pairs_E: Tensor, other_ranks_E: Tensor) -> RoutedPairs:
    """Each expert's `pairs_E` best tokens; another rank of the group chose `other_ranks_E`."""
    mask_TE = select_tokens(result.ranking_TE, result.topk_ids_TK, result.allowed_TE, pairs_E.to(DEVICE))
    token_ids_N, expert_ids_N = pairs_of_mask(mask_TE, int(pairs_E.sum()))
    chosen_N = topk_mask(result.topk_ids_TK, mask_TE.shape[1])[token_ids_N, expert_ids_N]
    chosen_SE, balance_counts = _gathered(result.counts_E(), other_ranks_E), None
    if result.by_score_TK is not None:
        assert torch.equal(result.by_score_TK, top_experts(result.scores_TE, None, result.topk_ids_TK.shape[1]))
        by_score_E = times_chosen(result.by_score_TK, mask_TE.shape[1])
        balance_counts = BalanceCounts(result.by_score_TK, _gathered(by_score_E, other_ranks_E.flip(0)))
    tokens_S = torch.tensor([mask_TE.shape[0], 1], device=DEVICE)
    counts = GroupCounts(chosen_SE, chosen_SE, chosen_SE, tokens_S, tokens_S * 0, 1)
    token_ids_N = token_ids_N.to(INDEX_DTYPE)
    return RoutedPairs(
        result.topk_ids_TK, token_ids_N, expert_ids_N, chosen_N, counts, None, balance_counts=balance_counts
    )


def _gathered(own_E: Tensor, other_E: Tensor) -> Tensor:
    """Columns of what two ranks have told."""
    reports = torch.stack([own_E, other_E.to(DEVICE)])
    return torch.nn.functional.pad(reports, (3, 0), value=7)[:, 3:]


class Case:
    """Random logits, their choice by the kernel, and a selection that drops and adds pairs."""

    def __init__(self, B: int, L: int, E: int, K: int, config: RouterConfig, seed: int = 0, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        T = B * L
        self.config, self.L = config, L
        self.logits_TE = (torch.randn(T, E, generator=generator) * scale).to(DEVICE)
        bias_E = torch.randn(E, generator=generator).to(DEVICE) if config.expert_bias else None
        with fused():
            self.result = topk.compute_topk(self.logits_TE, bias_E, K, config)
        pairs_E = torch.randint(0, T + 1, (E,), generator=generator)
        self.routed_pairs = pairs_of(self.result, pairs_E, torch.randint(9, (E,), generator=generator))
        self.dweights_N = torch.randn(int(pairs_E.sum()), generator=generator).to(DEVICE)
        # A loss is a mean over tokens: T makes its gradient as large as that of the weights.
        self.dloss = (T * torch.randn((), generator=generator)).to(DEVICE)

    def fused(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, loss, and the gradient of the logits from both."""
        logits_TE = self.logits_TE.requires_grad_()
        with fused():
            weights_N, loss = weights_and_losses(logits_TE, self.result, self.routed_pairs, self.L, self.config)
        gradient = torch.autograd.grad([weights_N, loss], logits_TE, [self.dweights_N, self.dloss])[0]
        return weights_N.detach(), loss.detach(), gradient

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in double precision, by plain torch."""
        logits_TE = self.logits_TE.detach().double().requires_grad_()
        scores_TE = scores_of(logits_TE, self.config)
        result = TopK(scores_TE, scores_TE.detach(), self.result.allowed_TE, self.routed_pairs.topk_ids_TK)
        weights_N, loss = weights_and_losses(logits_TE, result, self.routed_pairs, self.L, self.config)
        pulls = [self.dweights_N.double(), self.dloss.double()]
        return weights_N.detach(), loss.detach(), torch.autograd.grad([weights_N, loss], logits_TE, pulls)[0]

    def check(self) -> None:
        names = ("weights", "loss", "gradient of the logits")
        for name, got, exact in zip(names, self.fused(), self.exact(), strict=True):
            assert got.dtype == torch.float32
            assert got.shape == exact.shape
            # A gradient is a difference of products of the size of dweights, and of one expert's score it is 0.
            scale = max(0.05, float(exact.abs().max())) if exact.numel() else 0.0
            assert_near(got.double(), exact, share=2e-6, scale=scale, msg=lambda text, name=name: f"{name}: {text}")


LOSSES: dict[str, dict[str, Any]] = {
    "none": {},
    "z": {"z_loss_coef": 0.1},
    "sequence": {"balance": "sequence", "balance_coef": 0.5},
    "batch-z": {"balance": "batch", "balance_coef": 0.5, "z_loss_coef": 0.1},
    "global-z": {"balance": "global", "balance_coef": 0.5, "z_loss_coef": 0.1},
}
of_losses = pytest.mark.parametrize("losses", [*LOSSES.values()], ids=[*LOSSES])
of_scores = pytest.mark.parametrize("score", ["softmax", "sigmoid"])
SHAPES = [(1, 1, 1, 1), (1, 5, 3, 2), (3, 7, 8, 2), (2, 9, 16, 16), (4, 6, 33, 5), (2, 8, 60, 4), (2, 5, 128, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@of_losses
@of_scores
def test_weights_losses_and_gradient(score: Any, losses: dict[str, Any], shape: tuple[int, int, int, int]) -> None:
    for seed, renormalize in enumerate([True, False] * 2):
        scale = 1.0 if seed < 2 else 2.5
        config = RouterConfig(score=score, renormalize=renormalize, scale=scale, expert_bias=seed == 3, **losses)
        Case(*shape, config, seed).check()


@of_losses
@of_scores
def test_constant_logits(score: Any, losses: dict[str, Any]) -> None:
    Case(2, 6, 12, 3, RouterConfig(score=score, **losses), scale=0.0).check()


@of_scores
def test_512_experts(score: Any) -> None:
    Case(2, 3, 512, 10, RouterConfig(score=score, balance="sequence", balance_coef=0.5, z_loss_coef=0.1)).check()


def test_group_limits() -> None:
    config = RouterConfig(score="sigmoid", num_groups=4, groups_per_token=2, expert_bias=True, scale=2.5)
    Case(2, 8, 16, 3, config).check()


@pytest.mark.parametrize("balance", ["sequence", "batch", "global"])
def test_more_tokens_than_programs_take_at_once(balance: Any) -> None:
    config = RouterConfig(balance=balance, balance_coef=0.5, z_loss_coef=0.1)
    with patch("sonic_ep.kernels.route.scores._MAX_PROGRAMS", 4):
        Case(2, 150, 16, 3, config).check()
    for sums in (1, 7):
        with patch.multiple("sonic_ep.kernels.route.weights_and_losses.triton", _SUMS=sums, _TILE_OF_SUMS=32):
            Case(3, 650, 16, 3, config).check()


@of_scores
def test_one_output_alone_has_its_own_gradient(score: Any) -> None:
    case = Case(2, 6, 8, 2, RouterConfig(score=score, balance="batch", balance_coef=0.5, z_loss_coef=0.1))
    whole = case.fused()[2]
    logits_TE = case.logits_TE.requires_grad_()
    with fused():
        weights_N, loss = weights_and_losses(logits_TE, case.result, case.routed_pairs, case.L, case.config)
    (of_weights,) = torch.autograd.grad(weights_N, logits_TE, case.dweights_N, retain_graph=True)
    (of_loss,) = torch.autograd.grad(loss, logits_TE, case.dloss)
    assert of_weights.abs().max() > 0
    assert of_loss.abs().max() > 0
    torch.testing.assert_close(of_weights + of_loss, whole)


def test_no_pairs_at_all() -> None:
    case = Case(1, 4, 6, 2, RouterConfig(z_loss_coef=0.1))
    none_E = torch.zeros(6, dtype=torch.int64)
    case.routed_pairs, case.dweights_N = pairs_of(case.result, none_E, none_E), torch.empty(0, device=DEVICE)
    case.check()


@of_losses
@of_scores
def test_no_tokens(score: Any, losses: dict[str, Any]) -> None:
    logits_TE = torch.empty(0, 6, device=DEVICE, requires_grad=True)
    config = RouterConfig(score=score, **losses)
    none_E = torch.zeros(6, dtype=torch.int64)
    with fused():
        result = topk.compute_topk(logits_TE, None, 2, config)
        routed_pairs = pairs_of(result, none_E, none_E + 1)
        weights_N, loss = weights_and_losses(logits_TE, result, routed_pairs, 1, config)
    assert loss == 0
    (gradient,) = torch.autograd.grad(weights_N.sum() + loss, logits_TE)
    assert gradient.shape == (0, 6)


@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
def test_sigmoid_scores_that_all_underflow_give_finite_weights_and_gradients(renormalize: bool) -> None:
    config = RouterConfig(score="sigmoid", renormalize=renormalize, balance="batch", balance_coef=0.5)
    case = Case(1, 3, 4, 2, config)
    for level in (-200.0, -80.0, -50.0):
        case.logits_TE = torch.full((3, 4), level, device=DEVICE)
        with fused():
            case.result = topk.compute_topk(case.logits_TE, None, 2, config)
        for values in case.fused():
            assert values.isfinite().all()


def test_a_token_with_nan_spoils_no_other() -> None:
    case = Case(1, 6, 8, 2, RouterConfig())
    clean = case.fused()[2]
    with torch.no_grad():
        case.logits_TE[2, 3] = torch.nan
    spoiled = case.fused()[2]
    others = torch.arange(6, device=DEVICE) != 2
    assert spoiled[2].isnan().all()
    assert torch.equal(spoiled[others], clean[others])


def test_the_selection_given_counts_and_not_the_choice() -> None:
    """Under replay the choice of the recomputed logits may be another than the selection's."""
    case = Case(1, 8, 8, 2, RouterConfig(balance="batch", balance_coef=0.5))
    other = Case(1, 8, 8, 2, case.config, seed=1)
    assert not torch.equal(case.routed_pairs.topk_ids_TK, other.routed_pairs.topk_ids_TK)
    case.routed_pairs, case.dweights_N = other.routed_pairs, other.dweights_N
    case.check()


def test_one_tensor_of_tokens_by_experts_is_kept() -> None:
    case = Case(2, 10, 16, 2, RouterConfig(balance="sequence", balance_coef=0.5, z_loss_coef=0.1))
    saved: list[Tensor] = []
    logits_TE = case.logits_TE.requires_grad_()
    with fused(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        weights_and_losses(logits_TE, case.result, case.routed_pairs, case.L, case.config)
    large = [tensor for tensor in saved if tensor.numel() >= logits_TE.numel() and tensor.is_floating_point()]
    assert [tensor.data_ptr() for tensor in large] == [logits_TE.data_ptr()]


def router_gradients(router: Router, x_TH: Tensor, *, recompute: bool) -> list[Tensor]:
    def block(x_TH: Tensor) -> Tensor:
        routed = router(x_TH, group=EPGroup.alone(), sequence_length=12)
        is_pair = routed.routing.token_ids_N >= 0  # spare entries have -1
        token_ids_N, weights_N = routed.routing.token_ids_N[is_pair].long(), routed.routing.weights_N[is_pair]
        return x_TH.index_add(0, token_ids_N, x_TH[token_ids_N] * weights_N[:, None]) + routed.aux_loss

    x_TH = x_TH.detach().requires_grad_()
    if recompute:
        y_TH = checkpoint(block, x_TH, use_reentrant=False, context_fn=replay_contexts)
    else:
        y_TH = block(x_TH)
    assert isinstance(y_TH, Tensor)
    weight_TH = torch.linspace(-1, 1, x_TH.numel(), device=DEVICE).view_as(x_TH)
    return [y_TH.detach(), *torch.autograd.grad((y_TH * weight_TH).sum(), [x_TH, router.weight])]


@of_losses
@of_scores
def test_a_router_is_the_plain_one_also_when_it_is_recomputed(score: Any, losses: dict[str, Any]) -> None:
    settings = RouterConfig(score=score, expert_bias=True, check_logits=True, **losses)
    rounding = RoundingConfig(mode="nearest", t=4, G=8)
    router = Router(MoEConfig(d=6, n=4, E=8, K=2, router=settings, rounding=rounding), device=DEVICE)
    assert router.expert_bias is not None
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.expert_bias)
    x_TH = torch.randn(24, 6, device=DEVICE)
    with choosing(None):
        plain = router_gradients(router, x_TH, recompute=False)
    for recompute in (False, True):
        with fused():
            results = router_gradients(router, x_TH, recompute=recompute)
        for got, expected in zip(results, plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@of_losses
@of_scores
@pytest.mark.parametrize(
    "shape", [(4, 4096, 128, 8), (2, 1000, 512, 10), (16384, 1, 60, 4), (1, 300, 4096, 16)], ids=str
)
def test_large_batches(score: Any, losses: dict[str, Any], shape: tuple[int, int, int, int]) -> None:
    case = Case(*shape, RouterConfig(score=score, scale=2.5, **losses))
    case.check()
    for first, again in zip(case.fused(), case.fused(), strict=True):
        assert torch.equal(first, again)
