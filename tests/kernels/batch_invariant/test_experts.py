"""The experts' operations on blocks of rows: the values of the reference, and bits that depend on no other pair."""

from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.batch_invariant import experts
from sonic_ep.kernels.batch_invariant.blocks import rows_of_block
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named
from tests.helpers.tolerances import assert_near

H, I, R = 16, 24, 40  # noqa: E741
BLOCK = rows_of_block(torch.empty(0))


class Pairs(NamedTuple):
    rows_P: Tensor
    h_PJ: Tensor
    weights_P: Tensor
    starts_e: Tensor

    def at(self, pairs: slice, starts_e: Tensor) -> Self:
        return type(self)(self.rows_P[pairs], self.h_PJ[pairs], self.weights_P[pairs], starts_e)


class Weights:
    """Of experts that compute `activation`. split: gate and up weights are two tensors."""

    def __init__(self, activation: str, e: int, *, split: bool) -> None:
        self.activation = activation_named(activation)
        J = 2 * I if self.activation.gated else I
        w1_eJH, self.b1_eJ, self.up_eIH = torch.randn(e, J, H), torch.randn(e, J), None
        if split:
            w1_eJH, self.up_eIH, self.b1_eJ = w1_eJH[:, :I], w1_eJH[:, I:], None
        self.w1, self.w2_eHI, self.b2_eH = w1_eJH, torch.randn(e, H, I), torch.randn(e, H)


def results(ops: Any, w: Weights, x_RH: Tensor, pairs: Pairs) -> list[Tensor]:
    starts_e = pairs.starts_e
    h_PJ, a_PI = ops.up_projection(x_RH, w.w1, w.b1_eJ, pairs.rows_P, starts_e, w.activation, w.up_eIH)
    y_PH = ops.down_projection(a_PI, w.w2_eHI, w.b2_eH, starts_e)
    backward = ops.down_projection_backward
    grads = backward(x_RH, w.w2_eHI, w.b2_eH, pairs.h_PJ, pairs.weights_P, pairs.rows_P, starts_e, w.activation)
    dx_PH = ops.up_projection_backward(pairs.h_PJ, w.w1, starts_e, w.up_eIH)
    return [h_PJ, a_PI, y_PH, *grads, dx_PH]


@pytest.mark.parametrize(("activation", "split"), [("swiglu_oai", False), ("gelu", False), ("swiglu", True)])
def test_blocks_compute_what_the_reference_does(activation: str, split: bool) -> None:
    counts = [BLOCK + 3, 0, 1, 2 * BLOCK]
    x_RH, w = torch.randn(R, H), Weights(activation, len(counts), split=split)
    J, P = w.w1.shape[1] * (2 if split else 1), sum(counts)
    starts_e = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    pairs = Pairs(torch.randint(R, (P,), dtype=torch.int32), torch.randn(P, J), torch.rand(P), starts_e)
    found, wanted = (results(ops, w, x_RH, pairs) for ops in (experts, reference))
    for got, right in zip(found, wanted, strict=True):
        assert_near(got, right, share=1e-5)
    # A pair alone, and without any.
    for pair, expert in ((0, 0), (BLOCK + 2, 0), (BLOCK + 3, 2), (P - 1, 3)):
        here = slice(pair, pair + 1)
        starts = torch.tensor([0] * (expert + 1) + [1] * (len(counts) - expert), dtype=torch.int32)
        alone = results(experts, w, x_RH, pairs.at(here, starts))
        assert all(torch.equal(one, all_[here]) for one, all_ in zip(alone, found, strict=True))
    none = pairs.at(slice(0, 0), torch.zeros_like(starts_e))
    assert [each.shape for each in results(experts, w, x_RH, none)] == [(0, *each.shape[1:]) for each in found]
