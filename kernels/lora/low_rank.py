"""Low-rank updates of the experts' weights, W + B A, as grouped GEMMs over the same row lists. W + B A is never made.

A product with r columns is small next to one with W, so each is a GEMM of its own. A product with r summands is added
to the product with W by the epilogue of its GEMM:

    forward     H = X W1^T + (X A1^T) B1^T             Y = A W2^T + (A A2^T) B2^T
    backward    u = dO B2, dA' = dO W2 + u A2          v = dH B1, dX = dH W1 + v A1
                dA2 = u^T A', dB2 = dO^T (A' A2^T)     dA1 = v^T X, dB1 = dH^T (X A1^T)

Nothing is saved for backward: X A1^T is computed again, and A' A2^T of A', which backward has.

Source: LoRA, Hu et al., arXiv 2106.09685, section 4.1; the names of backward are SonicMoE's (mlp.py).

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I), r rank of a low-rank update, Z partial sums of one value.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep.kernels.backend import COLUMN_MULTIPLE, Operations, add_hidden_grads
from sonic_ep.kernels.experts.activations import Activation, activation_named
from sonic_ep.kernels.program.trace import by_torch

if TYPE_CHECKING:
    from sonic_ep.kernels.experts.mlp import RowLists

ANY_ACTIVATION = activation_named("relu")  # of products of which only H is read


@dataclass(frozen=True, slots=True)
class ExpertsLoRA:
    """Low-rank updates of the local experts' weights: W1 + B1 A1 and W2 + B2 A2. A pair may be None: no update.

    a1_erH (e, r, H) and b1_eJr (e, J, r); a2_erI (e, r, I) and b2_eHr (e, H, r). Both pairs have a rank of their own.
    B includes the usual factor alpha / r. Several updates of one weight are one: concatenate along r.
    """

    a1_erH: Tensor | None = None
    b1_eJr: Tensor | None = None
    a2_erI: Tensor | None = None
    b2_eHr: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns A1, B1, A2 and B2."""
        return self.a1_erH, self.b1_eJr, self.a2_erI, self.b2_eHr

    @property
    def ranks(self) -> tuple[int, int]:
        """r of the updates of W1 and W2; 0 for none."""
        a1, a2 = self.a1_erH, self.a2_erI
        return 0 if a1 is None else a1.shape[1], 0 if a2 is None else a2.shape[1]

    def padded(self) -> "ExpertsLoRA":
        """Returns contiguous tensors with r padded to a multiple of COLUMN_MULTIPLE by zeros. Differentiable."""

        def pad(values: Tensor | None, dim: int) -> Tensor | None:
            if values is None:
                return None
            missing = -values.shape[dim] % COLUMN_MULTIPLE
            if missing:
                values = F.pad(values, (0, missing) if dim == 2 else (0, 0, 0, missing))
            return values.contiguous()

        return ExpertsLoRA(*(pad(values, dim) for values, dim in zip(self.tensors(), (1, 2, 1, 2), strict=True)))


def _gathered(ops: Operations, x_RH: Tensor, weights_erH: Tensor, lists: "RowLists") -> Tensor:
    """Returns X[row_of_pair] weights^T, (P, r)."""
    return ops.up_projection(x_RH, weights_erH, None, lists.row_of_pair_P, lists.expert_starts_e, ANY_ACTIVATION)[0]


def _product(ops: Operations, rows: Tensor, weights: Tensor, lists: "RowLists") -> Tensor:
    """Returns rows weights^T of each row's expert, for rows of the pair buffer."""
    return ops.down_projection(rows, weights, None, lists.expert_starts_e, tile_aligned=lists.tile_aligned)


def _product_back(ops: Operations, rows: Tensor, weights: Tensor, lists: "RowLists") -> Tensor:
    """Returns rows weights of each row's expert, for rows of the pair buffer."""
    return ops.up_projection_backward(rows, weights, lists.expert_starts_e, tile_aligned=lists.tile_aligned)


def add_up_projection(
    ops: Operations, x_RH: Tensor, h_PJ: Tensor, lora: ExpertsLoRA, lists: "RowLists", activation: Activation
) -> Tensor:
    """Adds (X A1^T) B1^T to H in place and returns A = act(H)."""
    assert lora.a1_erH is not None
    assert lora.b1_eJr is not None
    rows_Pr = _gathered(ops, x_RH, lora.a1_erH, lists)
    return ops.accumulate_up_projection(h_PJ, rows_Pr, lora.b1_eJr.mT, lists.expert_starts_e, activation)


def add_down_projection(ops: Operations, a_PI: Tensor, y_PH: Tensor, lora: ExpertsLoRA, lists: "RowLists") -> None:
    """Adds (A A2^T) B2^T to Y in place, if W2 has an update."""
    if lora.a2_erI is not None and lora.b2_eHr is not None:
        rows_Pr = _product(ops, a_PI, lora.a2_erI, lists)
        ops.accumulate_product(y_PH, rows_Pr, lora.b2_eHr.mT, lists.expert_starts_e)


def add_backward_hidden(
    ops: Operations,
    do_RH: Tensor,
    h_PJ: Tensor,
    weights_P: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    lora: ExpertsLoRA,
    lists: "RowLists",
    activation: Activation,
) -> Tensor | None:
    """Adds to dH and dS, of `grads` dh_PJ, scaled_a_PI and ds_PZ, what W2's update gives. Returns u_Pr, or None."""
    if lora.a2_erI is None or lora.b2_eHr is None:
        return None
    e, H, r = lora.b2_eHr.shape
    b2_erH = by_torch(_transposed, (e, r, H), lora.b2_eHr.dtype, lora.b2_eHr)
    u_Pr = _gathered(ops, do_RH, b2_erH, lists)
    dh_PJ, _, ds_PZ = grads
    da_PI = _product_back(ops, u_Pr, lora.a2_erI, lists)
    add_hidden_grads(dh_PJ, ds_PZ, h_PJ, da_PI, weights_P, activation)
    return u_Pr


def backward_down(
    ops: Operations, do_RH: Tensor, scaled_a_PI: Tensor, u_Pr: Tensor, lora: ExpertsLoRA, lists: "RowLists"
) -> tuple[Tensor, Tensor]:
    """Returns dA2 (e, r, I) and dB2 (e, H, r). u_Pr: what `add_backward_hidden` returned."""
    assert lora.a2_erI is not None
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    da2 = ops.weight_grad(u_Pr, scaled_a_PI, _own_rows(scaled_a_PI), starts)
    scaled_Pr = _product(ops, scaled_a_PI, lora.a2_erI, lists)
    return da2, ops.weight_grad(scaled_Pr, do_RH, rows, starts, transposed=True)


def backward_hidden_up(ops: Operations, dh_PJ: Tensor, lora: ExpertsLoRA, lists: "RowLists") -> Tensor | None:
    """Returns v_Pr, or None if W1 has no update."""
    return None if lora.b1_eJr is None else _product_back(ops, dh_PJ, lora.b1_eJr, lists)


def add_backward_pairs(ops: Operations, v_Pr: Tensor, dx_PH: Tensor, lora: ExpertsLoRA, lists: "RowLists") -> None:
    """Adds v A1 to dX in place. v_Pr: what `backward_hidden_up` returned."""
    assert lora.a1_erH is not None
    ops.accumulate_product(dx_PH, v_Pr, lora.a1_erH, lists.expert_starts_e)


def backward_up(
    ops: Operations, x_RH: Tensor, dh_PJ: Tensor, v_Pr: Tensor, lora: ExpertsLoRA, lists: "RowLists"
) -> tuple[Tensor, Tensor]:
    """Returns dA1 (e, r, H) and dB1 (e, J, r). v_Pr: what `backward_hidden_up` returned."""
    assert lora.a1_erH is not None
    rows, starts = lists.row_of_pair_P, lists.expert_starts_e
    da1 = ops.weight_grad(v_Pr, x_RH, rows, starts)
    t_Pr = _gathered(ops, x_RH, lora.a1_erH, lists)
    return da1, ops.weight_grad(t_Pr, dh_PJ, _own_rows(dh_PJ), starts, transposed=True)


def _own_rows(values: Tensor) -> Tensor:
    """Returns the row list of a gather that moves nothing."""
    return by_torch(row_numbers, (values.shape[0],), torch.int32, values)


def row_numbers(values: Tensor) -> Tensor:
    """Returns 0, 1, ... for each row, int32."""
    return torch.arange(values.shape[0], dtype=torch.int32, device=values.device)


def _transposed(values: Tensor) -> Tensor:
    return values.transpose(1, 2).contiguous()
