"""The local experts over received rows: SonicMoE's layer, forward and backward, as a chain of fused operations.

From received rows to values of pairs: their (weighted) sums are the transport's, which may fuse them with the way back.
Nothing is kept but H (the caller keeps it with its rows and lists): A and A' are made and dropped, Y lives only until
it is summed, gathered rows exist only inside a GEMM. Source: SonicMoE, arXiv 2512.14080, algorithms 1 to 3.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I).
"""

from dataclasses import dataclass

from torch import Tensor

from sonic_ep.kernels.backend import Operations
from sonic_ep.kernels.experts.activations import Activation


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of the local experts. w1: (e, J, H), or with `up_eIH` the gate alone, (e, I, H)."""

    w1: Tensor
    w2_eHI: Tensor
    b1_eJ: Tensor | None = None
    b2_eH: Tensor | None = None
    up_eIH: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PairLists:
    """Index lists, int32: the received row of each pair-buffer row, and the rows of each expert (prefix sums).

    rounded: do experts have whole tiles of rows, as a rule? For the choice of tiles.
    """

    row_of_pair_P: Tensor
    expert_starts_e: Tensor
    tile_aligned: bool = False


def forward(
    ops: Operations, x_RH: Tensor, weights: ExpertWeights, lists: PairLists, activation: Activation
) -> tuple[Tensor, Tensor]:
    """y_PH, the expert output of every pair, before weights and sum, and h_PJ."""
    rows, starts, tile_aligned = lists.row_of_pair_P, lists.expert_starts_e, lists.tile_aligned
    h_PJ, a_PI = ops.up_projection(x_RH, weights.w1, weights.b1_eJ, rows, starts, activation, weights.up_eIH)
    return ops.down_projection(a_PI, weights.w2_eHI, weights.b2_eH, starts, tile_aligned=tile_aligned), h_PJ


@dataclass(frozen=True, slots=True)
class HiddenGrads:
    """dH and what comes with it. dh_PJ is for dX, dW1 and db1, scaled_a_PI (A') for dW2, ds_PN are parts of dS."""

    dh_PJ: Tensor
    scaled_a_PI: Tensor
    ds_PZ: Tensor


def backward_hidden(
    ops: Operations,
    do_RH: Tensor,
    h_PJ: Tensor,
    weights_P: Tensor,
    weights: ExpertWeights,
    lists: PairLists,
    activation: Activation,
) -> HiddenGrads:
    """dH, A' and dS: all that backward needs H for, so that a caller can let it go."""
    grads = ops.down_projection_backward(
        do_RH, weights.w2_eHI, weights.b2_eH, h_PJ, weights_P, lists.row_of_pair_P, lists.expert_starts_e, activation
    )
    return HiddenGrads(*grads)


def backward_pairs(ops: Operations, dh_PJ: Tensor, weights: ExpertWeights, lists: PairLists) -> Tensor:
    """dx_PH, the gradient of the row of every pair, before their sum."""
    starts, tile_aligned = lists.expert_starts_e, lists.tile_aligned
    return ops.up_projection_backward(dh_PJ, weights.w1, starts, weights.up_eIH, tile_aligned=tile_aligned)


def backward_down_weights(
    ops: Operations, do_RH: Tensor, scaled_a_PI: Tensor, lists: PairLists, into_eHI: Tensor | None = None
) -> Tensor:
    """dW2 = dO[row_of_pair]^T A' per expert; added to `into_eHI` where there is one."""
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    return ops.weight_grad(scaled_a_PI, do_RH, rows, starts, transposed=True, out_eAB=into_eHI)


def backward_up_weights(
    ops: Operations,
    x_RH: Tensor,
    dh_PJ: Tensor,
    lists: PairLists,
    into_eJH: Tensor | None = None,
    *,
    split_gate_up: bool = False,
    reserve_sms: bool = False,
) -> Tensor:
    """dW1 = dH^T X[row_of_pair] per expert, or with `split_gate_up` dgate above dup; added to `into_eJH` where there is
    one.

    beside: leave some multiprocessors to sums of dX that are launched next.
    """
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    return ops.weight_grad(
        dh_PJ, x_RH, rows, starts, split_gate_up=split_gate_up, out_eAB=into_eJH, reserve_sms=reserve_sms
    )


def backward_biases(
    ops: Operations, do_RH: Tensor, weights_P: Tensor, dh_PJ: Tensor, lists: PairLists
) -> tuple[Tensor, Tensor]:
    """db1 and db2."""
    return (
        ops.bias_grad(dh_PJ, lists.expert_starts_e),
        ops.gathered_bias_grad(do_RH, weights_P, lists.row_of_pair_P, lists.expert_starts_e),
    )
