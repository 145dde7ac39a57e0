"""The fused expert operations in plain torch, for any dtype and device: the CPU path and the GPU kernels' oracle.

Half-precision operands are computed in fp32 and rounded once on output, as tensor cores with fp32 accumulators do.
fp32 and float64 are computed in their own dtype.

Grouped operations work on a pair buffer, whose rows are sorted by expert. Three arguments are the same everywhere:
expert_starts_e: (e + 1,) int32, the first pair-buffer row of each expert and the end of the last one. An expert may
                 have no rows. Rows of an output behind the last expert's are not written.
row_of_pair_P:   (P,) int32, the received row of each pair.
tile_aligned:    whether experts usually have a multiple of 128 rows. It selects a tile on a GPU and changes no value.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I). Gate and up are interleaved, see activations.py.
"""

from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from sonic_ep.kernels.batch_invariant.blocks import rows_of_block
from sonic_ep.kernels.experts.activations import Activation, concatenate, interleave_split
from sonic_ep.kernels.experts.tile_table import ReserveFor

in_blocks = ContextVar("whether operations on rows compute in blocks", default=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp32 for half-precision dtypes, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def _up(values: Tensor) -> Tensor:
    return values.to(compute_dtype(values.dtype))


def _experts(expert_starts_e: Tensor) -> Iterator[tuple[int, slice]]:
    starts = expert_starts_e.tolist()
    for expert in range(len(starts) - 1):
        if starts[expert] < starts[expert + 1]:
            yield expert, slice(starts[expert], starts[expert + 1])


def _blocks(expert_starts_e: Tensor) -> Iterator[tuple[int, slice | Tensor]]:
    """Returns the rows of each expert, or with `in_blocks` those of each block, which its last row fills up."""
    block = rows_of_block(expert_starts_e)
    for expert, rows in _experts(expert_starts_e):
        if in_blocks.get():
            for first in range(rows.start, rows.stop, block):
                yield expert, torch.arange(first, first + block).clamp(max=rows.stop - 1)
        else:
            yield expert, rows


def up_projection(
    x_RH: Tensor,
    w1: Tensor,
    b1_eJ: Tensor | None,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    up_eIH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns H = X[row_of_pair] W1^T + b1 and A = act(H): a gathered grouped GEMM with the activation in its epilogue.

    Shapes:  x_RH (R, H); w1 (e, J, H), or with `up_eIH` the gate weights alone, (e, I, H); b1_eJ (e, J).
             Returns h_PJ (P, J) and a_PI (P, I) in the dtype of x.
    Source:  SonicMoE, arXiv 2512.14080, section 4.
    Example: three pairs: row 0 with expert 0, rows 0 and 1 with expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.activations import activation_named
        >>> from sonic_ep.kernels.experts.reference import up_projection
        >>> rows, starts = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> x, w1 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[1.0, 1.0]], [[2.0, -1.0]]])
        >>> h, a = up_projection(x, w1, None, rows, starts, activation_named("relu2"))
        >>> h.tolist(), a.tolist()
        ([[3.0], [0.0], [2.0]], [[9.0], [0.0], [4.0]])
    """
    w1_eJH = interleave_split(w1, up_eIH)
    P, J = row_of_pair_P.shape[0], w1_eJH.shape[1]
    h_PJ = x_RH.new_empty(P, J)
    a_PI = x_RH.new_empty(P, J // 2 if activation.gated else J)
    for expert, rows in _blocks(expert_starts_e):
        h = _up(x_RH.index_select(0, row_of_pair_P[rows])) @ _up(w1_eJH[expert]).T
        if b1_eJ is not None:
            h = h + _up(b1_eJ[expert])
        h_PJ[rows] = h.to(h_PJ.dtype)
        a_PI[rows] = activation.forward(h).to(a_PI.dtype)
    return h_PJ, a_PI


def down_projection(
    a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
) -> Tensor:
    """Returns Y = A W2^T + b2, not yet weighted: a grouped GEMM.

    Shapes:  a_PI (P, I); w2_eHI (e, H, I); b2_eH (e, H). Returns y_PH (P, H) in the dtype of A.
    Example: one row of expert 0, two of expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import down_projection
        >>> a, w2 = torch.tensor([[9.0], [1.0], [4.0]]), torch.tensor([[[1.0], [2.0]], [[2.0], [-1.0]]])
        >>> down_projection(a, w2, None, torch.tensor([0, 1, 3], dtype=torch.int32)).tolist()
        [[9.0, 18.0], [2.0, -1.0], [8.0, -4.0]]
    """
    y_PH = a_PI.new_empty(a_PI.shape[0], w2_eHI.shape[1])
    for expert, rows in _blocks(expert_starts_e):
        y = _up(a_PI[rows]) @ _up(w2_eHI[expert]).T
        y_PH[rows] = (y if b2_eH is None else y + _up(b2_eH[expert])).to(y_PH.dtype)
    return y_PH


def accumulate_product(out_PN: Tensor, rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor) -> None:
    """Adds the product of each row with its expert's weights to `out_PN` in place: a grouped GEMM with few summands.

    Shapes:  out_PN (P, N), contiguous; rows_PK (P, K) in the same dtype; weights_eKN (e, K, N), any dim of which may be
             contiguous.
    Example: one row of expert 0, one of expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import accumulate_product
        >>> out, rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
        >>> weights = torch.tensor([[[1.0, 0.0]], [[2.0, -1.0]]])
        >>> accumulate_product(out, rows, weights, torch.tensor([0, 1, 2], dtype=torch.int32))
        >>> out.tolist()
        [[2.0, 2.0], [7.0, 2.0]]
    """
    for expert, rows in _experts(expert_starts_e):
        out_PN[rows] = _up(out_PN[rows]) + _up(rows_PK[rows]) @ _up(weights_eKN[expert])


def accumulate_up_projection(
    h_PJ: Tensor, rows_PK: Tensor, weights_eKJ: Tensor, expert_starts_e: Tensor, activation: Activation
) -> Tensor:
    """Adds such products to H in place, and returns A = act(H), (P, I) in the dtype of H, of the sums before rounding.

    Example: one row of expert 0, one of expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.activations import activation_named
        >>> from sonic_ep.kernels.experts.reference import accumulate_up_projection
        >>> h, rows = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]])
        >>> weights, starts = torch.tensor([[[2.0]], [[-1.0]]]), torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> accumulate_up_projection(h, rows, weights, starts, activation_named("relu2")).tolist(), h.tolist()
        ([[9.0], [1.0]], [[3.0], [1.0]])
    """
    P, J = h_PJ.shape
    a_PI = h_PJ.new_empty(P, J // 2 if activation.gated else J)
    for expert, rows in _experts(expert_starts_e):
        h = _up(h_PJ[rows]) + _up(rows_PK[rows]) @ _up(weights_eKJ[expert])
        h_PJ[rows] = h
        a_PI[rows] = activation.forward(h)
    return a_PI


def down_projection_backward(
    do_RH: Tensor,
    w2_eHI: Tensor,
    b2_eH: Tensor | None,
    h_PJ: Tensor,
    weights_P: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    *,
    reserve_for: ReserveFor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dH = act'(H) (s dA'), A' = s A and dS = <dA', A> + <dO, b2>, with s the combine weights `weights_P`.

    A grouped GEMM, dA' = dO[row_of_pair] W2, with three epilogues. A is recomputed from H, and Y is not needed.
    reserve_for: as of `weight_grad`; not "sums".

    Shapes:  do_RH (R, H); w2_eHI (e, H, I); b2_eH (e, H); h_PJ (P, J); weights_P (P,).
             Returns dh_PJ (P, J) and scaled_a_PI (P, I), which is A', in the dtype of H, and ds_PZ (P, Z) in the dtype
             of the weights: Z partial sums of each dS. Z is 1 here; a GPU kernel returns one per column tile.
    Source:  SonicMoE, arXiv 2512.14080, section 3.2.
    Example: dA' is 3, 1, 4 and A is 9, 1, 4.

        >>> import torch
        >>> from sonic_ep.kernels.experts.activations import activation_named
        >>> from sonic_ep.kernels.experts.reference import down_projection_backward
        >>> rows, starts = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> do, w2 = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([[[1.0], [2.0]], [[2.0], [-1.0]]])
        >>> h, s = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([0.5, 1.0, 2.0])
        >>> grads = down_projection_backward(do, w2, None, h, s, rows, starts, activation_named("relu2"))
        >>> [grad.flatten().tolist() for grad in grads]  # dH, A', dS
        [[9.0, 2.0, 32.0], [4.5, 1.0, 8.0], [27.0, 1.0, 16.0]]
    """
    dh_PJ = torch.empty_like(h_PJ)
    scaled_a_PI = h_PJ.new_empty(h_PJ.shape[0], w2_eHI.shape[2])
    ds_P = torch.empty_like(weights_P)
    for expert, rows in _blocks(expert_starts_e):
        do = _up(do_RH.index_select(0, row_of_pair_P[rows]))
        h, s = _up(h_PJ[rows]), _up(weights_P[rows])[:, None]
        da = do @ _up(w2_eHI[expert])
        a = activation.forward(h)
        ds = (da * a).sum(1)
        ds_P[rows] = (ds if b2_eH is None else ds + do @ _up(b2_eH[expert])).to(ds_P.dtype)
        dh_PJ[rows] = activation.backward(s * da, h).to(dh_PJ.dtype)
        scaled_a_PI[rows] = (s * a).to(scaled_a_PI.dtype)
    return dh_PJ, scaled_a_PI, ds_P[:, None]


def up_projection_backward(
    dh_PJ: Tensor,
    w1: Tensor,
    expert_starts_e: Tensor,
    up_eIH: Tensor | None = None,
    *,
    tile_aligned: bool = False,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """Returns dX = dH W1, one row per pair: a grouped GEMM. `gather_sum` then adds the pairs of each received row.

    reserve_for: as of `weight_grad`; not "sums".

    Shapes:  dh_PJ (P, J); w1 (e, J, H), or with `up_eIH` the gate weights alone, (e, I, H).
             Returns dx_PH (P, H) in the dtype of dH.
    Example: one row of expert 0, two of expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import up_projection_backward
        >>> dh, w1 = torch.tensor([[9.0], [2.0], [32.0]]), torch.tensor([[[1.0, 1.0]], [[2.0, -1.0]]])
        >>> up_projection_backward(dh, w1, torch.tensor([0, 1, 3], dtype=torch.int32)).tolist()
        [[9.0, 9.0], [4.0, -2.0], [64.0, -32.0]]
    """
    w1_eJH = interleave_split(w1, up_eIH)
    dx_PH = dh_PJ.new_empty(dh_PJ.shape[0], w1_eJH.shape[2])
    for expert, rows in _blocks(expert_starts_e):
        dx_PH[rows] = (_up(dh_PJ[rows]) @ _up(w1_eJH[expert])).to(dx_PH.dtype)
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
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """Returns left^T right[row_of_pair] of each expert: a grouped GEMM that contracts over rows (varlen-K) and gathers.

    dW1 = weight_grad(dH, X). dW2 = weight_grad(A', dO, transposed=True).

    transposed:    return (e, B, A) instead of (e, A, B).
    split_gate_up: `left` has interleaved gate and up columns; return the rows of dW1 as [gate; up], not interleaved.
                   AssertionError together with `transposed` or `out_eAB`.
    out_eAB:       add to this buffer, of the shape of the result (a main_grad, usually fp32), and return it.
    reserve_for:   the GPU kernel leaves SMs to what runs concurrently: "sums", a gather_sum of P rows as wide as
                   `right`, launched right after it; "exchange", NCCL's kernel on another stream.

    Shapes:  left_PA (P, A); right_RB (R, B). Returns (e, A, B) or (e, B, A) in the dtype of left or of `out_eAB`.
             An expert without rows gets zeros; its part of `out_eAB` stays as it is.
    Example: three pairs: row 0 with expert 0, rows 0 and 1 with expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import weight_grad
        >>> rows, starts = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> dh, x = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> weight_grad(dh, x, rows, starts).tolist()
        [[[1.0, 2.0]], [[11.0, 16.0]]]
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
    """Returns the sum of each expert's rows, (e, B) in the dtype of the values: db1 if the values are dH.

    Example: one row of expert 0, two of expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import bias_grad
        >>> values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> bias_grad(values, torch.tensor([0, 1, 3], dtype=torch.int32)).tolist()
        [[1.0, 2.0], [8.0, 10.0]]
    """
    out = values_PB.new_zeros(expert_starts_e.shape[0] - 1, values_PB.shape[1])
    for expert, rows in _experts(expert_starts_e):
        out[expert] = _up(values_PB[rows]).sum(0)
    return out


def gathered_bias_grad(do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    """Returns db2, the sum of each expert's s * dO[row_of_pair]: (e, H) in the dtype of dO. s is `weights_P`, (P,).

    Example: three pairs: row 0 with expert 0, rows 0 and 1 with expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.experts.reference import gathered_bias_grad
        >>> rows, starts = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> do, s = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 1.0, 2.0])
        >>> gathered_bias_grad(do, s, rows, starts).tolist()
        [[0.5, 1.0], [7.0, 10.0]]
    """
    out = do_RH.new_zeros(expert_starts_e.shape[0] - 1, do_RH.shape[1])
    for expert, rows in _experts(expert_starts_e):
        do = _up(do_RH.index_select(0, row_of_pair_P[rows]))
        out[expert] = weights_P[rows].to(do.dtype) @ do
    return out
