"""The local experts on received rows: forward and backward of SonicMoE's layer as a chain of fused operations.

Input: received rows. Output: one row per pair. The transport computes the weighted sums of pairs, because it may fuse
them with the combine. Only H is saved for backward; the caller saves it with the received rows and the lists. A and A'
are freed after use, Y is freed once it is summed, and gathered rows exist only inside a GEMM.

Source: SonicMoE, arXiv 2512.14080, algorithms 1 to 3.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I), r rank of a low-rank update.
"""

from dataclasses import dataclass

from torch import Tensor

from sonic_ep.kernels.backend import Operations
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.tile_table import ReserveFor
from sonic_ep.kernels.lora import low_rank
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the local experts. w1: (e, J, H), or with `up_eIH` the gate weights alone, (e, I, H).

    lora: low-rank updates that are added to the products with w1 and w2; the rows of its B1 are interleaved.
    transposed: w1 and w2 are views of contiguous (e, H, J) and (e, I, H), in which their gradients are wanted.
    """

    w1: Tensor
    w2_eHI: Tensor
    b1_eJ: Tensor | None = None
    b2_eH: Tensor | None = None
    up_eIH: Tensor | None = None
    lora: ExpertsLoRA | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class RowLists:
    """Index lists of the pair buffer, int32.

    row_of_pair_P:   the received row of each pair-buffer row.
    expert_starts_e: (e + 1,), the first pair-buffer row of each expert and the end of the last one.
    tile_aligned:    whether experts usually have a multiple of 128 rows. It selects the GEMM tile.
    """

    row_of_pair_P: Tensor
    expert_starts_e: Tensor
    tile_aligned: bool = False


def forward_hidden(
    ops: Operations, x_RH: Tensor, weights: ExpertWeights, lists: RowLists, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Returns a_PI, of which the output is made, and h_PJ, which backward needs."""
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    h_PJ, a_PI = ops.up_projection(x_RH, weights.w1, weights.b1_eJ, rows, starts, activation, weights.up_eIH)
    lora = weights.lora
    if lora is not None and lora.a1_erH is not None:
        a_PI = low_rank.add_up_projection(ops, x_RH, h_PJ, lora, lists, activation)
    return a_PI, h_PJ


def forward_output(ops: Operations, a_PI: Tensor, weights: ExpertWeights, lists: RowLists) -> Tensor:
    """Returns y_PH, the expert output of each pair before weighting and summation."""
    starts, tile_aligned = lists.expert_starts_e, lists.tile_aligned
    y_PH = ops.down_projection(a_PI, weights.w2_eHI, weights.b2_eH, starts, tile_aligned=tile_aligned)
    if weights.lora is not None:
        low_rank.add_down_projection(ops, a_PI, y_PH, weights.lora, lists)
    return y_PH


@dataclass(frozen=True, slots=True)
class HiddenGrads:
    """The results of `backward_hidden`.

    dh_PJ: dH, for dX, dW1 and db1. scaled_a_PI: A', for dW2. ds_PZ: Z partial sums of the dS of each pair. u_Pr and
    v_Pr: dO B2 and dH B1, for the gradients of low-rank updates; None without them.
    """

    dh_PJ: Tensor
    scaled_a_PI: Tensor
    ds_PZ: Tensor
    u_Pr: Tensor | None = None
    v_Pr: Tensor | None = None


def backward_hidden(
    ops: Operations,
    do_RH: Tensor,
    h_PJ: Tensor,
    weights_P: Tensor,
    weights: ExpertWeights,
    lists: RowLists,
    activation: Activation,
    *,
    reserve_for: ReserveFor | None = None,
) -> HiddenGrads:
    """Returns dH, A' and dS. Nothing after it needs H, so the caller can free H.

    reserve_for: what runs concurrently and needs SMs, here as in the functions below.
    """
    w2_eHI, b2_eH, rows, starts = weights.w2_eHI, weights.b2_eH, lists.row_of_pair_P, lists.expert_starts_e
    grads = ops.down_projection_backward(
        do_RH, w2_eHI, b2_eH, h_PJ, weights_P, rows, starts, activation, reserve_for=reserve_for
    )
    lora = weights.lora
    if lora is None:
        return HiddenGrads(*grads)
    u_Pr = low_rank.add_backward_hidden(ops, do_RH, h_PJ, weights_P, grads, lora, lists, activation)
    return HiddenGrads(*grads, u_Pr, low_rank.backward_hidden_up(ops, grads[0], lora, lists))


def backward_pairs(
    ops: Operations,
    dh_PJ: Tensor,
    weights: ExpertWeights,
    lists: RowLists,
    v_Pr: Tensor | None = None,
    *,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """Returns dx_PH, the gradient of the row of each pair, before the pairs of a received row are summed."""
    options = {"tile_aligned": lists.tile_aligned, "reserve_for": reserve_for}
    dx_PH = ops.up_projection_backward(dh_PJ, weights.w1, lists.expert_starts_e, weights.up_eIH, **options)
    if weights.lora is not None and v_Pr is not None:
        low_rank.add_backward_pairs(ops, v_Pr, dx_PH, weights.lora, lists)
    return dx_PH


def backward_down_weights(
    ops: Operations,
    do_RH: Tensor,
    scaled_a_PI: Tensor,
    lists: RowLists,
    into: Tensor | None = None,
    *,
    transposed: bool = False,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """Returns dW2 = dO[row_of_pair]^T A' of each expert, (e, H, I). With `into` adds to it and returns it.

    transposed: the result is (e, I, H).
    """
    order = {"transposed": not transposed, "reserve_for": reserve_for}
    return ops.weight_grad(scaled_a_PI, do_RH, lists.row_of_pair_P, lists.expert_starts_e, **order, out_eAB=into)


def backward_up_weights(
    ops: Operations,
    x_RH: Tensor,
    dh_PJ: Tensor,
    lists: RowLists,
    into: Tensor | None = None,
    *,
    split_gate_up: bool = False,
    transposed: bool = False,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """Returns dW1 = dH^T X[row_of_pair] of each expert, (e, J, H). With `into` adds to it and returns it.

    split_gate_up: the rows are [dgate; dup] instead of interleaved. Not with `into`, nor with `transposed`.
    transposed: the result is (e, H, J).
    """
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    order = {"transposed": transposed, "split_gate_up": split_gate_up}
    return ops.weight_grad(dh_PJ, x_RH, rows, starts, **order, out_eAB=into, reserve_for=reserve_for)


def backward_biases(
    ops: Operations, do_RH: Tensor, weights_P: Tensor, dh_PJ: Tensor, lists: RowLists
) -> tuple[Tensor, Tensor]:
    """Returns db1 (e, J) and db2 (e, H)."""
    return (
        ops.bias_grad(dh_PJ, lists.expert_starts_e),
        ops.gathered_bias_grad(do_RH, weights_P, lists.row_of_pair_P, lists.expert_starts_e),
    )
