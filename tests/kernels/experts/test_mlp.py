"""The chain of operations against torch.autograd of a dense layer that loops over pairs, in float64."""

import random
from dataclasses import dataclass
from typing import Self

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.reference import gather_sum
from sonic_ep.kernels.experts import mlp, reference
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights, RowLists
from tests.kernels import oracle

pytestmark = pytest.mark.usefixtures("poison")

TOLERANCE = 1e-12
WEIGHTS = ("w1", "w2", "b1", "b2")
ALL = [*oracle.GATED, *oracle.PLAIN]


@dataclass(frozen=True)
class Case:
    """A pair (expert, row, gate) of `experts_of_row`, and padding: (expert, how many rows repeat its last pair)."""

    H: int
    I: int  # noqa: E741
    e: int
    experts_of_row: tuple[tuple[int, ...], ...]
    padding: tuple[tuple[int, int], ...] = ()

    @property
    def rows_of_expert(self) -> list[list[int]]:
        return [[r for r, experts in enumerate(self.experts_of_row) if k in experts] for k in range(self.e)]

    def __str__(self) -> str:
        R, P = len(self.experts_of_row), sum(map(len, self.experts_of_row))
        padding = f"-pad{sum(n for _, n in self.padding)}" if self.padding else ""
        return f"R{R}-H{self.H}-I{self.I}-e{self.e}-V{P}{padding}"


def random_topk(R: int, e: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """None to all experts for each row."""
    rng = random.Random(seed)
    return tuple(tuple(sorted(rng.sample(range(e), rng.randint(0, e)))) for _ in range(R))


CASES = [
    Case(7, 5, 3, ((0, 1, 2), (), (1,), (0, 2), ())),
    Case(7, 5, 3, ((0, 1, 2), (), (1,), (0, 2), ()), padding=((0, 3), (2, 1))),
    Case(16, 8, 8, random_topk(21, 8, seed=1), padding=((0, 2), (5, 7), (7, 1))),
    Case(4, 3, 4, ((2,),) * 9),  # one expert takes all
    Case(4, 3, 1, ((0,), (), (0,)), padding=((0, 5),)),
    Case(3, 1, 2, ((0, 1),)),
    Case(4, 3, 2, ((), ())),  # V = 0
    Case(4, 3, 2, ()),  # R = 0
]
PADDED = [case for case in CASES if case.padding]


@dataclass(frozen=True)
class Problem:
    """One case with numbers. weights_V and the real slots stand by expert, then row."""

    x_RH: Tensor
    do_RH: Tensor
    weights_P: Tensor
    weights: dict[str, Tensor]
    lists: RowLists
    pairs_by_row: tuple[Tensor, Tensor]
    real_slots: list[int]

    @classmethod
    def draw(cls, case: Case, activation: str, *, bias: bool, integers: bool = False) -> Self:
        generator = torch.Generator().manual_seed(7)

        def draw(*sizes: int, scale: float = 1.0) -> Tensor:
            if integers:
                return torch.randint(-3, 4, sizes, generator=generator).double()
            return scale * torch.randn(sizes, generator=generator, dtype=torch.float64)

        R, H, I, e = len(case.experts_of_row), case.H, case.I, case.e  # noqa: E741
        J = 2 * I if activation in oracle.GATED else I
        weights = {"w1": draw(e, J, H, scale=3 / H**0.5), "w2": draw(e, H, I)}
        if bias:
            weights |= {"b1": draw(e, J), "b2": draw(e, H)}
        lists, pairs_by_row, real_slots = lists_of(case)
        x_RH, do_RH = draw(R, H), draw(R, H)
        weights_P = torch.zeros(lists.row_of_pair_P.shape[0], dtype=torch.float64)
        weights_P[real_slots] = draw(len(real_slots))
        return cls(x_RH, do_RH, weights_P, weights, lists, pairs_by_row, real_slots)

    def expert_weights(self) -> ExpertWeights:
        return ExpertWeights(*(self.weights.get(name) for name in WEIGHTS))  # type: ignore[arg-type]


def lists_of(case: Case) -> tuple[RowLists, tuple[Tensor, Tensor], list[int]]:
    """The index lists, padding behind each expert's pairs; the pairs of each row (CSR); and the slots of real pairs."""
    padding = dict(case.padding)
    row_of_pair: list[int] = []
    real_slots: list[int] = []
    pairs_of_row: list[list[int]] = [[] for _ in case.experts_of_row]
    starts = [0]
    for expert, rows in enumerate(case.rows_of_expert):
        for row in rows:
            pairs_of_row[row].append(len(row_of_pair))
            real_slots.append(len(row_of_pair))
            row_of_pair.append(row)
        row_of_pair += rows[-1:] * padding.get(expert, 0)
        starts.append(len(row_of_pair))
    pair_starts = [sum(map(len, pairs_of_row[:r])) for r in range(len(pairs_of_row) + 1)]
    columns = (row_of_pair, starts, [pair for pairs in pairs_of_row for pair in pairs], pair_starts)
    rows, expert_starts, pairs, row_starts = (torch.tensor(values, dtype=torch.int32) for values in columns)
    return RowLists(rows, expert_starts), (pairs, row_starts), real_slots


def dense(case: Case, problem: Problem, activation: str) -> dict[str, Tensor]:
    """out, H of each real pair, and every gradient of <out, dO>: one expert on one row at a time."""
    x_RH = problem.x_RH.clone().requires_grad_()
    weights_V = problem.weights_P[problem.real_slots].requires_grad_()
    weights = {name: w.clone().requires_grad_() for name, w in problem.weights.items()}
    out = [torch.zeros(case.H, dtype=torch.float64) for _ in case.experts_of_row]
    pre_activations = []
    for expert, rows in enumerate(case.rows_of_expert):
        for row in rows:
            h = weights["w1"][expert] @ x_RH[row] + (weights["b1"][expert] if "b1" in weights else 0)
            y = weights["w2"][expert] @ oracle.activate(activation, h) + (
                weights["b2"][expert] if "b2" in weights else 0
            )
            out[row] = out[row] + weights_V[len(pre_activations)] * y
            pre_activations.append(h.detach())
    out_RH = torch.stack(out) if out else x_RH * 0
    leaves = {"x": x_RH, "s": weights_V, **weights}
    grads = torch.autograd.grad(
        (out_RH * problem.do_RH).sum() + sum(0 * leaf.sum() for leaf in leaves.values()), list(leaves.values())
    )
    J = weights["w1"].shape[1]
    h_VJ = torch.stack(pre_activations) if pre_activations else torch.zeros(0, J, dtype=torch.float64)
    return {"out": out_RH.detach(), "H": h_VJ, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def computed(problem: Problem, activation: str) -> dict[str, Tensor]:
    """The same from mlp. dS of padding is left out, as combine_scalars leaves it out."""
    act, lists, weights = activation_named(activation), problem.lists, problem.expert_weights()
    x_RH, do_RH, weights_P = problem.x_RH, problem.do_RH, problem.weights_P
    a_PI, h_PJ = mlp.forward_hidden(reference, x_RH, weights, lists, act)
    y_PH = mlp.forward_output(reference, a_PI, weights, lists)
    out_RH = gather_sum(y_PH, *problem.pairs_by_row, weights_P)
    grads = mlp.backward_hidden(reference, do_RH, h_PJ, weights_P, weights, lists, act)
    dx_PH = mlp.backward_pairs(reference, grads.dh_PJ, weights, lists)
    dx_RH = gather_sum(dx_PH, *problem.pairs_by_row)
    results = {"out": out_RH, "H": h_PJ[problem.real_slots], "dx": dx_RH, "ds": grads.ds_PZ.sum(1)[problem.real_slots]}
    results["dw1"] = mlp.backward_up_weights(reference, x_RH, grads.dh_PJ, lists)
    results["dw2"] = mlp.backward_down_weights(reference, do_RH, grads.scaled_a_PI, lists)
    if weights.b1_eJ is not None:
        results["db1"], results["db2"] = mlp.backward_biases(reference, do_RH, weights_P, grads.dh_PJ, lists)
    return results


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_every_gradient(case: Case, bias: bool) -> None:
    check(case, "swiglu", bias=bias)


@pytest.mark.parametrize("activation", ALL)
def test_output_and_every_gradient_of_every_activation(activation: str) -> None:
    check(CASES[2], activation, bias=True)


def check(case: Case, activation: str, *, bias: bool) -> None:
    problem = Problem.draw(case, activation, bias=bias)
    actual, expected = computed(problem, activation), dense(case, problem, activation)
    assert actual.keys() == expected.keys()
    for name in expected:
        scale = max(1.0, oracle.largest(expected[name]))
        torch.testing.assert_close(
            actual[name], expected[name], rtol=0, atol=TOLERANCE * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("activation", ["reglu", "relu2"])
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_changes_no_bit(case: Case, activation: str) -> None:
    """On integers, where sums are exact in any order, results with and without padding are equal."""
    without = Case(case.H, case.I, case.e, case.experts_of_row)
    padded, plain = (Problem.draw(each, activation, bias=True, integers=True) for each in (case, without))
    assert padded.weights_P.shape[0] > plain.weights_P.shape[0]
    actual, expected = computed(padded, activation), computed(plain, activation)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_rows_carry_exact_zeros_into_the_gradients(case: Case, activation: str) -> None:
    problem = Problem.draw(case, activation, bias=True)
    act, weights, lists = activation_named(activation), problem.expert_weights(), problem.lists
    _, h_PJ = mlp.forward_hidden(reference, problem.x_RH, weights, lists, act)
    grads = mlp.backward_hidden(reference, problem.do_RH, h_PJ, problem.weights_P, weights, lists, act)
    padding = torch.ones(h_PJ.shape[0], dtype=torch.bool)
    padding[problem.real_slots] = False
    assert padding.any()
    assert not grads.dh_PJ[padding].any()
    assert not grads.scaled_a_PI[padding].any()


def test_rows_without_a_pair_get_exact_zeros() -> None:
    results = computed(Problem.draw(CASES[0], "swiglu", bias=True), "swiglu")
    lonely = [row for row, experts in enumerate(CASES[0].experts_of_row) if not experts]
    assert lonely
    assert not results["out"][lonely].any()
    assert not results["dx"][lonely].any()


def test_experts_without_a_pair_get_zero_gradients() -> None:
    case = CASES[3]
    results = computed(Problem.draw(case, "swiglu", bias=True), "swiglu")
    idle = [expert for expert, rows in enumerate(case.rows_of_expert) if not rows]
    assert idle == [0, 1, 3]
    for name in ("dw1", "dw2", "db1", "db2"):
        assert not results[name][idle].any(), name
        assert results[name][2].any(), name
