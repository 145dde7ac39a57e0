"""Every fused operation of the layer in plain torch, any dtype, any device: the CPU path and the GPU kernels' oracle.

Half-precision operands are computed in fp32 and rounded once on output, as tensor cores with fp32 accumulators do;
fp32 and float64 are computed as they are. Grouped operations work on a pair buffer whose rows stand by expert;
`expert_starts_e` (e + 1, int32) are exclusive prefix sums of rows per expert, and empty experts are legal.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I). Gate and up are interleaved, see activations.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sonic_ep.kernels.experts.activations import Activation, concatenate, interleave_split


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half-precision dtypes, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def _up(values: Tensor) -> Tensor:
    return values.to(compute_dtype(values.dtype))


def _experts(expert_starts_e: Tensor) -> Iterator[tuple[int, slice]]:
    starts = expert_starts_e.tolist()
    for expert in range(len(starts) - 1):
        if starts[expert] < starts[expert + 1]:
            yield expert, slice(starts[expert], starts[expert + 1])


def up_projection(
    x_RH: Tensor,
    w1: Tensor,
    b1_eJ: Tensor | None,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    up_eIH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """H = X[row_of_pair] W1^T + b1 and A = act(H): gathered grouped GEMM with the activation in its epilogue.

    w1: (e, J, H), or with `up_eIH` the gate alone, (e, I, H). Returns h_PJ and a_PI in the dtype of x.
    Source: SonicMoE, arXiv 2512.14080, section 4.
    """
    w1_eJH = interleave_split(w1, up_eIH)
    P, J = row_of_pair_P.shape[0], w1_eJH.shape[1]
    h_PJ = x_RH.new_empty(P, J)
    a_PI = x_RH.new_empty(P, J // 2 if activation.gated else J)
    for expert, rows in _experts(expert_starts_e):
        h = _up(x_RH.index_select(0, row_of_pair_P[rows])) @ _up(w1_eJH[expert]).T
        if b1_eJ is not None:
            h = h + _up(b1_eJ[expert])
        h_PJ[rows] = h
        a_PI[rows] = activation.forward(h)
    return h_PJ, a_PI


def down_projection(
    a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
) -> Tensor:
    """y_PH = A W2^T + b2: grouped GEMM.

    rounded: do experts have whole tiles of rows, as a rule? It changes no value, only how a GPU computes them.
    """
    y_PH = a_PI.new_empty(a_PI.shape[0], w2_eHI.shape[1])
    for expert, rows in _experts(expert_starts_e):
        y = _up(a_PI[rows]) @ _up(w2_eHI[expert]).T
        y_PH[rows] = y if b2_eH is None else y + _up(b2_eH[expert])
    return y_PH


def down_projection_backward(
    do_RH: Tensor,
    w2_eHI: Tensor,
    b2_eH: Tensor | None,
    h_PJ: Tensor,
    weights_P: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """dA' = dO[row_of_pair] W2 with three epilogues: dH = act'(H) (s dA'), A' = s A, dS = <dA', A> + <dO, b2>.

    A is recomputed from H, Y is never needed. weights_P: s. Returns dh_PJ and scaled_a_PI in the dtype of H, ds_PN,
    parts (one here) whose sum is dS, in that of the gates. Source: SonicMoE, arXiv 2512.14080, section 3.2.
    """
    dh_PJ = torch.empty_like(h_PJ)
    scaled_a_PI = h_PJ.new_empty(h_PJ.shape[0], w2_eHI.shape[2])
    ds_P = torch.empty_like(weights_P)
    for expert, rows in _experts(expert_starts_e):
        do = _up(do_RH.index_select(0, row_of_pair_P[rows]))
        h, s = _up(h_PJ[rows]), _up(weights_P[rows])[:, None]
        da = do @ _up(w2_eHI[expert])
        a = activation.forward(h)
        ds = (da * a).sum(1)
        ds_P[rows] = ds if b2_eH is None else ds + do @ _up(b2_eH[expert])
        dh_PJ[rows] = activation.backward(s * da, h).to(dh_PJ.dtype)
        scaled_a_PI[rows] = (s * a).to(scaled_a_PI.dtype)
    return dh_PJ, scaled_a_PI, ds_P[:, None]


def up_projection_backward(
    dh_PJ: Tensor, w1: Tensor, expert_starts_e: Tensor, up_eIH: Tensor | None = None, *, tile_aligned: bool = False
) -> Tensor:
    """dx_PH = dH W1: grouped GEMM, one row a pair; `gather_sum` adds a received row's pairs. w1, rounded: as above."""
    w1_eJH = interleave_split(w1, up_eIH)
    dx_PH = dh_PJ.new_empty(dh_PJ.shape[0], w1_eJH.shape[2])
    for expert, rows in _experts(expert_starts_e):
        dx_PH[rows] = _up(dh_PJ[rows]) @ _up(w1_eJH[expert])
    return dx_PH


def weight_grad(
    left_PA: Tensor,
    right_RB: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    *,
    transposed: bool = False,
    split_gate_up: bool = False,
    out_eAB: Tensor | None = None,
    reserve_sms: bool = False,
) -> Tensor:
    """Per expert, left^T right[row_of_pair]: (e, A, B), a grouped GEMM over rows (varlen-K) with a gathered operand.

    dW1 = weight_grad(dH, X), dW2 = weight_grad(A', dO, transposed=True), which gives (e, B, A).
    halves: rows of even columns of `left` first, then those of odd ones: [gate; up], not interleaved. Alone.
    out_eAB: accumulate into this buffer instead (a main_grad, usually fp32), and return it.
    beside: a GPU's kernel leaves multiprocessors to a gather_sum of P rows as wide as `right`, launched right after it.
    """
    assert not (split_gate_up and (transposed or out_eAB is not None))
    if split_gate_up:
        left_PA = concatenate(left_PA)
    A, B = left_PA.shape[1], right_RB.shape[1]
    e = expert_starts_e.shape[0] - 1
    out = out_eAB if out_eAB is not None else left_PA.new_zeros((e, B, A) if transposed else (e, A, B))
    for expert, rows in _experts(expert_starts_e):
        left, right = _up(left_PA[rows]), _up(right_RB.index_select(0, row_of_pair_P[rows]))
        out[expert] += (right.T @ left if transposed else left.T @ right).to(out.dtype)
    return out


def bias_grad(values_PB: Tensor, expert_starts_e: Tensor) -> Tensor:
    """(e, B) sum of each expert's rows."""
    out = values_PB.new_zeros(expert_starts_e.shape[0] - 1, values_PB.shape[1])
    for expert, rows in _experts(expert_starts_e):
        out[expert] = _up(values_PB[rows]).sum(0)
    return out


def gathered_bias_grad(do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    """db2: (e, H) sum of each expert's s * dO[row_of_pair]."""
    out = do_RH.new_zeros(expert_starts_e.shape[0] - 1, do_RH.shape[1])
    for expert, rows in _experts(expert_starts_e):
        do = _up(do_RH.index_select(0, row_of_pair_P[rows]))
        out[expert] = weights_P[rows].to(do.dtype) @ do
    return out
