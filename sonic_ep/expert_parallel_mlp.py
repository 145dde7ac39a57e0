"""The expert-parallel MLP, forward and backward, without autograd. steps/ runs it and traces it.

The destination rank applies the combine weights. So dispatch and combine only move and add rows, and each is the
other's backward:

    forward    rows = dispatch(x)     out = combine(experts(rows))
    backward   dO   = dispatch(dout)  dx  = combine(dX)             dS is sent back pair by pair (combine_scalars)

Saved for backward: x (or the received rows), H, the weights of pairs and the index lists; never Y, A or gathered rows.
docs/memory.md has the formula.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, R rows this rank receives, P rows of the pair
buffer, e local experts, I expert width, J pre-activation columns (2I if gated else I).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Transport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import Operations, operations_for
from sonic_ep.kernels.experts import mlp
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.mlp import ExpertWeights, RowLists
from sonic_ep.kernels.experts.tile_table import ReserveFor
from sonic_ep.kernels.lora import low_rank
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.kernels.program.trace import begin_output

NO_LORA = ExpertsLoRA()


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call that are no tensors.

    group: of the transport. save_dispatched: save the received rows for backward instead of x.
    tile_aligned: `Routing.tile_aligned`.
    """

    transport: Transport
    group: EPGroup
    activation: Activation
    save_dispatched: bool
    tile_aligned: bool


@dataclass(slots=True)
class SavedForBackward:
    """All that backward needs besides the weights. rows: x_TH, or the received rows if `Call.save_dispatched`."""

    rows: Tensor
    h_PJ: Tensor | None
    weights_P: Tensor | None
    handle: DispatchHandle

    def pop(self) -> tuple[Tensor, Tensor]:
        """Returns H and the weights of pairs, and drops the references, so that backward can free them after use."""
        h_PJ, weights_P, self.h_PJ, self.weights_P = self.h_PJ, self.weights_P, None, None
        assert h_PJ is not None
        assert weights_P is not None
        return h_PJ, weights_P


class Gradients(NamedTuple):
    """The result of `backward`. The gradient of a weight that needs none is None.

    dw1, dw2: in the layout of w1 and w2, with transposed weights (e, H, J) and (e, I, H). With split gate/up weights
    the rows of dw1 are [dgate; dup], (e, J, H). lora: of A1, B1, A2 and B2.
    """

    dx_TH: Tensor
    dweights_N: Tensor
    dw1: Tensor | None
    dw2: Tensor | None
    db1_eJ: Tensor | None
    db2_eH: Tensor | None
    lora: ExpertsLoRA


def forward(
    x_TH: Tensor, prepared: PreparedDispatch, weights: ExpertWeights, call: Call, *, needs_output: bool = True
) -> tuple[Tensor, SavedForBackward]:
    """Returns out_TH (T, H) and what backward needs. A collective.

    x_TH: contiguous; the same rows that `prepare` got, if it got any. prepared: the result of `call.transport.prepare`.
    needs_output: if False, out_TH is zero. Equal on all ranks.
    """
    rows_RH = prepared.rows_RH
    if rows_RH is None:
        rows_RH = call.transport.dispatch(x_TH, prepared.handle).result()
    ops = _operations(rows_RH, weights, call)
    pairs = _row_lists(prepared.handle, call)
    a_PI, h_PJ = mlp.forward_hidden(ops, rows_RH, weights, pairs, call.activation)
    saved_rows = x_TH
    if call.save_dispatched:
        saved_rows = rows_RH.clone() if prepared.handle.rows_are_reused else rows_RH
    saved = SavedForBackward(saved_rows, h_PJ, prepared.weights_P, prepared.handle)
    if not needs_output:
        return torch.zeros_like(x_TH), saved
    begin_output()
    y_PH = mlp.forward_output(ops, a_PI, weights, pairs)
    del a_PI
    return call.transport.combine(y_PH, prepared.weights_P, prepared.handle).result(), saved


def backward(
    dout_TH: Tensor,
    saved: SavedForBackward,
    weights: ExpertWeights,
    call: Call,
    needs: Sequence[bool],
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:
    """Returns the gradients of x, of the weights of pairs, and of the experts' weights that need one. A collective.

    saved: loses its H and weights of pairs.
    needs: whether dw1, dw2, db1, db2 are needed, and with `weights.lora` the gradients of W1's and of W2's update.
    into: buffers to which dw1 and dw2 are added, and which are returned instead; None for a new tensor.

    With several ranks, dX is computed first: it and dS return while dW2 and dW1 are computed. With one rank, dW2 is
    computed first, so that A' can be freed before dX of all pairs is allocated; the sums of dS overlap dW2, the sums of
    dX overlap dW1. Every rank calls every collective, whether or not it needs the result.
    """
    transport, handle, pairs = call.transport, saved.handle, _row_lists(saved.handle, call)
    if host_may_wait(dout_TH):
        call.group.begin_backward(handle.forward, dout_TH)
    ops = _operations(dout_TH, weights, call)
    needs_w1, needs_w2, needs_b1, needs_b2, *needs_lora = needs
    lora = weights.lora
    lora_grads: list[Tensor | None] = [None, None, None, None]  # of A1, B1, A2 and B2
    do_RH = transport.dispatch(dout_TH.contiguous(), handle).result()
    rows = Pending.done(saved.rows) if call.save_dispatched else transport.dispatch(saved.rows, handle, overlap=True)
    h_PJ, weights_P = saved.pop()
    grads = mlp.backward_hidden(
        ops, do_RH, h_PJ, weights_P, weights, pairs, call.activation, reserve_for=rows.reserve_for
    )
    weights_P = weights_P if needs_b1 or needs_b2 else None
    # The lists hold the only references to dS and A', so that each is freed as soon as it has been read.
    dh_PJ, held_ds_PZ, held_a_PI = grads.dh_PJ, [grads.ds_PZ], [grads.scaled_a_PI]
    u_Pr, v_Pr = grads.u_Pr, grads.v_Pr
    del grads, h_PJ

    def down_weights(reserve_for: ReserveFor | None) -> Tensor | None:
        scaled_a_PI = held_a_PI.pop()
        if lora is not None and u_Pr is not None and needs_lora[1]:
            lora_grads[2:] = low_rank.backward_down(ops, do_RH, scaled_a_PI, u_Pr, lora, pairs)
        if not needs_w2:
            return None
        options = {"transposed": weights.transposed, "reserve_for": reserve_for}
        return mlp.backward_down_weights(ops, do_RH, scaled_a_PI, pairs, into[1], **options)

    def combine_dx(*, overlap: bool) -> Pending:
        dx_PH = mlp.backward_pairs(ops, dh_PJ, weights, pairs, v_Pr, reserve_for=rows.reserve_for)
        return transport.combine(dx_PH, None, handle, overlap=overlap)

    if len(handle.splits.rows_out) > 1:
        pending = combine_dx(overlap=needs_w1 or needs_w2)
        returning = transport.combine_scalars(held_ds_PZ.pop(), handle, overlap=needs_w1 or needs_w2)
        dw2 = down_weights(pending.reserve_for)
    else:
        returning = transport.combine_scalars(held_ds_PZ.pop(), handle, overlap=needs_w2)
        dw2 = down_weights(returning.reserve_for)
        returning = Pending.done(returning.result())  # at once, behind the kernel that it overlaps
        pending = combine_dx(overlap=needs_w1)  # only dW1 is left to overlap
    rows_RH = rows.result()
    dw1 = None
    if needs_w1:
        order = {"split_gate_up": weights.up_eIH is not None, "transposed": weights.transposed}
        dw1 = mlp.backward_up_weights(ops, rows_RH, dh_PJ, pairs, into[0], **order, reserve_for=pending.reserve_for)
    if lora is not None and v_Pr is not None and needs_lora[0]:
        lora_grads[:2] = low_rank.backward_up(ops, rows_RH, dh_PJ, v_Pr, lora, pairs)
    dx_TH, dweights_N = pending.result(), returning.result()
    db1, db2 = None, None
    if weights_P is not None:
        db1, db2 = mlp.backward_biases(ops, do_RH, weights_P, dh_PJ, pairs)
    db1, db2 = db1 if needs_b1 else None, db2 if needs_b2 else None
    dlora = NO_LORA if lora is None else ExpertsLoRA(*lora_grads)
    return Gradients(dx_TH, dweights_N, dw1, dw2, db1, db2, dlora)


def _operations(rows: Tensor, weights: ExpertWeights, call: Call) -> Operations:
    batch_invariant = call.transport.batch_invariant
    return operations_for(rows, weights.w2_eHI, call.activation, batch_invariant=batch_invariant)


def _row_lists(handle: DispatchHandle, call: Call) -> RowLists:
    return RowLists(handle.row_of_pair_P, handle.expert_starts_e, call.tile_aligned)
