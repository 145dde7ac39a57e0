"""The expert-parallel MLP, forward and backward, without autograd: what both ways of differentiating it are made of.

Dispatch and combine only move rows (the combine weights act on the owner's rank), so each is the other's backward:

    forward    rows = dispatch(x)     out = combine(experts(rows))
    backward   dO   = dispatch(dout)  dx  = combine(dX)             dS goes back pair by pair

Kept between the two: x (or the received rows), H, the weights of the pairs and the index lists. Never Y, A or gathered
rows. docs/memory.md has the formula.

Legend: T tokens and H hidden size on this rank, N pairs sent, R received rows, P pair-buffer rows, e local experts,
I expert width, J = 2I if gated else I.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sonic_ep.dispatch.protocol import Opened, Receipt, Transport, combine_at_once, return_at_once
from sonic_ep.kernels import expert_mlp
from sonic_ep.kernels.activations import Activation
from sonic_ep.kernels.expert_mlp import ExpertWeights, PairLists
from sonic_ep.kernels.operations import operations_for

_FULL = 15 / 16  # of the room that was made for H, at least, or it is not worth its memory


@dataclass(frozen=True, slots=True)
class Call:
    """What one call is beside its tensors. keeps_received: keep the received rows for backward, and not x. rounded: of
    its routing."""

    transport: Transport
    activation: Activation
    keeps_received: bool
    rounded: bool


@dataclass(slots=True)
class Kept:
    """What backward needs besides the weights. rows: x_TH, or the received rows, as the call says."""

    rows: Tensor
    h_PJ: Tensor | None
    gates_P: Tensor | None
    receipt: Receipt

    def take(self) -> tuple[Tensor, Tensor]:
        """H and the weights of the pairs, to be forgotten here: backward needs their memory soon after."""
        h_PJ, gates_P, self.h_PJ, self.gates_P = self.h_PJ, self.gates_P, None, None
        assert h_PJ is not None
        assert gates_P is not None
        return h_PJ, gates_P


def forward(x_TH: Tensor, opened: Opened, weights: ExpertWeights, call: Call) -> tuple[Tensor, Kept]:
    """out_TH, and what backward needs. opened: what the call's transport has opened for the routing. A collective.

    x_TH is contiguous; if `open` was given rows, it was given these.
    """
    rows_RH, y_PH, h_PJ = _experts(x_TH, opened, weights, call)
    if opened.settle is not None:
        settled, narrowed = opened.settle()
        P = settled.gates_P.shape[0]
        room = opened.gates_P.shape[0]
        if narrowed and P <= room:
            y_PH, h_PJ = y_PH[:P], h_PJ[:P] if P >= room * _FULL else h_PJ[:P].clone()
        else:
            del y_PH, h_PJ
            rows_RH, y_PH, h_PJ = _experts(x_TH, settled, weights, call)
        opened = settled
    kept_rows = call.transport.keep(rows_RH) if call.keeps_received else x_TH
    kept = Kept(kept_rows, h_PJ, opened.gates_P, opened.receipt)
    return call.transport.combine_pairs(y_PH, opened.gates_P, opened.receipt), kept


def _experts(x_TH: Tensor, opened: Opened, weights: ExpertWeights, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """rows_RH, y_PH and h_PJ."""
    rows_RH = opened.rows_RH
    if rows_RH is None:
        rows_RH = call.transport.dispatch(x_TH, opened.receipt)
    ops = operations_for(rows_RH, weights.w2_eHI, call.activation)
    pairs = _pair_lists(opened.receipt, call)
    return rows_RH, *expert_mlp.forward(ops, rows_RH, weights, pairs, call.activation)


def backward(
    dout_TH: Tensor,
    kept: Kept,
    weights: ExpertWeights,
    call: Call,
    needs: Sequence[bool],
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """dx_TH, dgates_N, dw1, dw2, db1, db2; the last four only as far as `needs` says. A collective.

    kept: its H and gates are taken.
    dw1 is (e, J, H) as w1 is, and [gate; up] where these lie apart.
    into: buffers to which dw1 and dw2 are added, and which are then returned.

    Where other ranks wait for dX, it comes first and travels beside dW2 and dW1. Alone, dW2 comes first: after it A'
    can go, before dX of all pairs takes memory; dS is summed beside dW2, and dX beside dW1. Every rank takes every
    collective, whether or not it needs the result.
    """
    transport, receipt, pairs = call.transport, kept.receipt, _pair_lists(kept.receipt, call)
    ops = operations_for(dout_TH, weights.w2_eHI, call.activation)
    needs_w1, needs_w2, needs_b1, needs_b2 = needs
    do_RH = transport.dispatch(dout_TH.contiguous(), receipt)
    rows = (lambda: kept.rows) if call.keeps_received else transport.prefetch(kept.rows, receipt)
    h_PJ, gates_P = kept.take()
    grads = expert_mlp.backward_hidden(ops, do_RH, h_PJ, gates_P, weights, pairs, call.activation)
    gates_P = gates_P if needs_b1 or needs_b2 else None
    dh_PJ, held_ds_PN, held_a_PI = grads.dh_PJ, [grads.ds_PN], [grads.scaled_a_PI]
    del grads, h_PJ

    def down_weights() -> Tensor | None:
        scaled_a_PI = held_a_PI.pop()
        return expert_mlp.backward_down_weights(ops, do_RH, scaled_a_PI, pairs, into[1]) if needs_w2 else None

    others_wait = len(receipt.splits.rows_out) > 1
    dw2, dgates_N = None, None
    if not others_wait:
        start_returning = transport.start_return_pairs if needs_w2 else partial(return_at_once, transport)
        returning = start_returning(held_ds_PN.pop(), receipt)
        dw2 = down_weights()
        dgates_N = returning()
        del returning
    # Alone, dW1 is all that comes after.
    goes_beside = needs_w1 or (others_wait and needs_w2)
    start_back = transport.start_combine_pairs if goes_beside else partial(combine_at_once, transport)
    back = start_back(expert_mlp.backward_pairs(ops, dh_PJ, weights, pairs), None, receipt)
    if others_wait:
        dgates_N = transport.return_pairs(held_ds_PN.pop().sum(1), receipt)
        dw2 = down_weights()
    rows_RH = rows()
    dw1 = None
    if needs_w1:
        apart = weights.up_eIH is not None
        dw1 = expert_mlp.backward_up_weights(ops, rows_RH, dh_PJ, pairs, into[0], apart=apart, beside=back.beside)
    dx_TH = back.result()
    db1, db2 = None, None
    if gates_P is not None:
        db1, db2 = expert_mlp.backward_biases(ops, do_RH, gates_P, dh_PJ, pairs)
    return dx_TH, dgates_N, dw1, dw2, db1 if needs_b1 else None, db2 if needs_b2 else None


def _pair_lists(receipt: Receipt, call: Call) -> PairLists:
    return PairLists(receipt.row_of_pair_P, receipt.expert_starts_e, call.rounded)
