"""The fused choice: exactly that of routers/select.py on the scores it writes, which are close to the exact ones.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.interface import RouterOperations, TopK
from sonic_ep.kernels.route.topk.reference import experts_of_best_groups, scores_of, top_experts
from sonic_ep.routers import topk
from tests.helpers.tolerances import assert_near
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
OPERATIONS: RouterOperations = import_module("sonic_ep.kernels.route.fused")  # type: ignore[assignment]
# The interpreter computes in numpy, which warns of inf - inf.
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    E: int
    K: int
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        raised = "-".join(f"{key}={value}" for key, value in self.options.items())
        return f"E{self.E}-K{self.K}{'-bias' if self.bias else ''}{'-' + raised if raised else ''}"

    @property
    def config(self) -> RouterConfig:
        return RouterConfig(check_logits=True, **self.options)


def groups(number: int, per_token: int, **options: Any) -> dict[str, Any]:
    return {"num_groups": number, "groups_per_token": per_token, **options}


SIGMOID = {"score": "sigmoid"}
CASES = [
    Case(1, 1),
    Case(1, 1, True, SIGMOID),
    Case(2, 2),
    Case(3, 2, True),
    Case(7, 7, False, SIGMOID),
    Case(8, 2),
    Case(16, 16),
    Case(16, 16, True, SIGMOID),
    Case(33, 5),
    Case(60, 4, True, SIGMOID),
    Case(64, 8),
    Case(128, 8),
    Case(128, 8, True, SIGMOID),
    Case(200, 16, True),
    Case(512, 10),
    Case(1024, 1, False, SIGMOID),
    Case(4, 2, False, groups(2, 1)),
    Case(16, 4, True, groups(4, 2)),
    Case(12, 6, False, groups(4, 2)),  # K experts exactly in the best groups
    Case(12, 7, True, groups(4, 2)),  # one more than that
    Case(24, 6, False, groups(3, 3, score="sigmoid")),  # all groups
    Case(160, 6, False, groups(8, 3)),
    Case(256, 8, True, groups(8, 4, score="sigmoid")),
    Case(60, 16, True, groups(30, 8)),
]
of_cases = pytest.mark.parametrize("case", CASES, ids=str)


def awkward(*shape: int, generator: torch.Generator) -> Tensor:
    """Few values, so many ties, and all the ones that comparisons trip over."""
    values = torch.tensor([0.0, -0.0, 0.5, -1.0, 2.0**-149, 3e38, -3e38, INF, -INF, NAN, -NAN])
    return values[torch.randint(len(values), shape, generator=generator)]


def draw_values(kind: int, *shape: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(*shape, generator=generator)
    match kind % 8:
        case 0:
            return normal
        case 1:
            return normal * 30
        case 2:
            return torch.randint(3, shape, generator=generator).float()
        case 3:
            return torch.full(shape, normal.flatten()[0].item() if normal.numel() else 0.0)
        case 4:
            return awkward(*shape, generator=generator)
        case 5:
            rare = torch.rand(*shape, generator=generator) < 0.05
            return torch.where(rare, awkward(*shape, generator=generator), normal)
        case 6:
            return torch.full(shape, -INF)
        case _:
            return normal * 1e4


def exact_scores(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """In double, of what fp32 leaves of logit - largest logit."""
    if config.score == "sigmoid":
        return logits_TE.double().sigmoid()
    largest_T1 = torch.where(logits_TE.isnan(), -INF, logits_TE).amax(1, keepdim=True)
    terms_TE = (logits_TE - largest_T1).double().exp()
    return terms_TE / terms_TE.sum(1, keepdim=True)


def assert_as_written(logits_TE: Tensor, bias_E: Tensor | None, K: int, config: RouterConfig) -> TopK:
    chosen = OPERATIONS.compute_topk(logits_TE, bias_E, K, config)
    expected = exact_scores(logits_TE, config)
    torch.testing.assert_close(chosen.scores_TE.double(), expected, rtol=1e-6, atol=1e-37, equal_nan=True)
    ranking_TE = chosen.scores_TE if bias_E is None else chosen.scores_TE + bias_E
    torch.testing.assert_close(chosen.ranking_TE, ranking_TE, rtol=0, atol=0, equal_nan=True)
    allowed_TE = None if config.num_groups == 1 else experts_of_best_groups(ranking_TE, config)
    if allowed_TE is None:
        assert chosen.allowed_TE is None
    else:
        assert torch.equal(chosen.allowed_TE, allowed_TE)  # type: ignore[arg-type]
    assert torch.equal(chosen.topk_ids_TK, top_experts(ranking_TE, allowed_TE, K))
    assert chosen.plain_counts_E is not None
    assert chosen.plain_entropy_T is not None
    counts_E = torch.bincount(chosen.topk_ids_TK.flatten(), minlength=logits_TE.shape[1])
    assert torch.equal(chosen.plain_counts_E, counts_E)
    plain = topk.TopK(chosen.scores_TE.double(), chosen.ranking_TE, None, chosen.topk_ids_TK)
    entropy_T = plain.entropy_T().masked_fill(~logits_TE.isfinite().all(1), float("nan"))
    # A sum of E terms up to 1/e; of a token with one expert it is what rounding leaves of 1 - 1.
    assert_near(chosen.plain_entropy_T.double(), entropy_T, share=1e-5, scale=1.0, equal_nan=True)
    assert chosen.bad_logits == (~logits_TE.isfinite()).sum()
    return chosen


@of_cases
def test_the_choice_is_top_experts_of_its_own_scores(case: Case) -> None:
    """Random sizes and values; 1008 draws over the cases on a GPU, fewer of the large ones in the interpreter."""
    draws = 42 if DEVICE == "cuda" or case.E <= 64 else 12
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        T = int(torch.randint(1, 12, (), generator=generator)) if seed else 1
        logits_TE = draw_values(seed, T, case.E, generator=generator).to(DEVICE)
        bias_E = draw_values(seed // 8, case.E, generator=generator).to(DEVICE) if case.bias else None
        assert_as_written(logits_TE, bias_E, case.K, case.config)


@of_cases
def test_no_tokens(case: Case) -> None:
    bias_E = torch.zeros(case.E, device=DEVICE) if case.bias else None
    chosen = assert_as_written(torch.empty(0, case.E, device=DEVICE), bias_E, case.K, case.config)
    assert chosen.topk_ids_TK.shape == (0, case.K)


def test_more_rows_than_programs_take_at_once() -> None:
    with patch("sonic_ep.kernels.route.scores._MAX_PROGRAMS", 2):
        assert_as_written(torch.randn(600, 16, device=DEVICE), None, 3, Case(16, 3).config)


def test_columns_of_a_wider_matrix() -> None:
    logits_TE = torch.randn(9, 40, device=DEVICE)[:, 3:35]
    assert not logits_TE.is_contiguous()
    assert_as_written(logits_TE, None, 4, Case(32, 4).config)


def test_bad_logits_are_counted_only_where_asked_for() -> None:
    logits_TE = torch.randn(5, 8, device=DEVICE)
    assert OPERATIONS.compute_topk(logits_TE, None, 2, RouterConfig()).bad_logits is None


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_of_the_choice_carry_their_gradient(score: Any) -> None:
    config = RouterConfig(score=score, renormalize=False)
    logits_TE = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    with patch.object(topk, "router_operations", lambda *_: OPERATIONS):
        result = topk.compute_topk(logits_TE, None, 2, config)
    assert result.plain_counts_E is not None
    assert not result.ranking_TE.requires_grad
    weight_TE = torch.randn(6, 8, device=DEVICE)
    (gradient,) = torch.autograd.grad((result.scores_TE * weight_TE).sum(), logits_TE)
    (expected,) = torch.autograd.grad((scores_of(logits_TE, config) * weight_TE).sum(), logits_TE)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 1000, 24576])
@of_cases
def test_large_batches(case: Case, T: int) -> None:
    generator = torch.Generator().manual_seed(T)
    for kind in (0, 2, 5):
        logits_TE = draw_values(kind, T, case.E, generator=generator).cuda()
        bias_E = draw_values(kind, case.E, generator=generator).cuda() if case.bias else None
        assert_as_written(logits_TE, bias_E, case.K, case.config)


@pytest.mark.gpu
def test_the_widest_router() -> None:
    config = RouterConfig(check_logits=True)
    assert_as_written(torch.randn(300, 4096, device="cuda"), torch.randn(4096, device="cuda"), 16, config)


@pytest.mark.gpu
def test_the_gpu_takes_the_kernel() -> None:
    result = topk.compute_topk(torch.randn(64, 16, device="cuda"), None, 4, RouterConfig())
    assert result.plain_counts_E is not None
    assert (
        topk.compute_topk(torch.randn(64, 16, device="cuda").double(), None, 4, RouterConfig()).plain_counts_E is None
    )
