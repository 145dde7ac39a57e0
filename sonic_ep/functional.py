"""`moe`: the expert-parallel MLP as one differentiable function of rows, weights and a routing.

Dispatch and combine only move rows (the combine weights act on the owner's rank), so each is the other's backward:

    forward    rows = dispatch(x)     out = combine(experts(rows))
    backward   dO   = dispatch(dout)  dx  = combine(dX)             dS goes back pair by pair

Kept between the two: x (or the received rows), H, the weights of the pairs and the index lists. Never Y, A or gathered
rows. docs/memory.md has the formula.

Legend: T tokens and H hidden size on this rank, N pairs sent, R received rows, P pair-buffer rows, e local experts,
I expert width, J = 2I if gated else I.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sonic_ep.checks import problem_with_weights
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import Plan
from sonic_ep.dispatch.protocol import Receipt, Transport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels import expert_mlp
from sonic_ep.kernels.activations import Activation, activation_named, interleave
from sonic_ep.kernels.expert_mlp import ExpertWeights, PairLists
from sonic_ep.kernels.operations import Operations, operations_for
from sonic_ep.routing import Routing


def transport_for(group: EPGroup) -> Transport:
    """The transport of a group: none for one rank, all-to-all for more."""
    return LocalTransport() if group.size == 1 else AllToAllTransport(group)


def moe(
    x_TH: Tensor,
    routing: Routing,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None = None,
    b2_eH: Tensor | None = None,
    *,
    transport: Transport,
    group: EPGroup,
    activation: str = "swiglu",
    layout: Literal["interleaved", "concatenated"] = "interleaved",
    keep_dispatched: bool = False,
) -> Tensor:
    """out[t] = sum over the pairs (t, e, s) of the routing of s * expert_e(x[t]). A collective of `group`.

    Shapes:  x_TH (T, H); w1_eJH (e, J, H), w2_eHI (e, H, I), b1_eJ (e, J), b2_eH (e, H) of this rank's e = E / ep_size
             experts, in the dtype of x; result (T, H) in the dtype of x.
    Layout:  for gated activations, rows of w1 (and b1) are gate and up in turn; "concatenated" takes [gate; up] halves
             and costs a copy of w1 a call.
    Keeps:   x_TH, or with `keep_dispatched` the received rows, which saves one dispatch in backward.
    Raises:  ValueError, before any collective, for weights of the wrong shape, dtype, device or strides and for a
             routing of another number of tokens. Nothing is exchanged to check this: a mistake that only one rank makes
             leaves the others waiting for it. `MoE` and `Routing.from_pairs` check across ranks.
    Source:  SonicMoE, arXiv 2512.14080, sections 3 and 4; across ranks design.md, section 3.
    """
    act = activation_named(activation)
    if x_TH.dim() != 2:
        raise ValueError(f"x has shape {tuple(x_TH.shape)}, wanted (T, d)")
    if routing.num_tokens != x_TH.shape[0]:
        raise ValueError(f"the routing is of {routing.num_tokens} tokens, x has {x_TH.shape[0]}")
    E = routing.counts.rows_SE.shape[1]
    problem = problem_with_weights(x_TH, w1_eJH, w2_eHI, b1_eJ, b2_eH, gated=act.gated, local_experts=E // group.size)
    if problem is not None:
        raise ValueError(problem)
    if act.gated and layout == "concatenated":
        w1_eJH, b1_eJ = interleave(w1_eJH), None if b1_eJ is None else interleave(b1_eJ)
    gates_N = routing.gates_N.to(torch.promote_types(routing.gates_N.dtype, torch.float32))
    call = _Call(replace(routing, gates_N=gates_N), transport, act, keep_dispatched)
    return _ExpertParallelMLP.apply(x_TH, gates_N, w1_eJH, w2_eHI, b1_eJ, b2_eH, call)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call that are not differentiable."""

    routing: Routing
    transport: Transport
    activation: Activation
    keep_dispatched: bool


class _ExpertParallelMLP(torch.autograd.Function):
    @staticmethod
    def forward(  # autograd wants every tensor as an argument of its own
        ctx: Any,
        x_TH: Tensor,
        gates_N: Tensor,
        w1_eJH: Tensor,
        w2_eHI: Tensor,
        b1_eJ: Tensor | None,
        b2_eH: Tensor | None,
        call: _Call,
    ) -> Tensor:
        counts, transport = call.routing.counts, call.transport
        plan = Plan.from_counts(counts.rows_SE, counts.pairs_SE)
        opened = transport.open(call.routing, plan)
        receipt, gates_P = opened.receipt, opened.gates_P
        x_TH = x_TH.contiguous()
        rows_RH = transport.dispatch(x_TH, receipt)
        weights = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH)
        ops = operations_for(rows_RH, w2_eHI, call.activation)
        partial_RH, h_PJ = expert_mlp.forward(ops, rows_RH, gates_P, weights, _pair_lists(receipt), call.activation)
        kept = rows_RH if call.keep_dispatched else x_TH
        ctx.save_for_backward(kept, h_PJ, gates_P, w1_eJH, w2_eHI, b1_eJ, b2_eH, *receipt.lists())
        ctx.sizes = receipt.without_lists()
        ctx.transport, ctx.activation, ctx.kept_is_received = transport, call.activation, call.keep_dispatched
        ctx.ops = ops
        return transport.combine(partial_RH, receipt)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dout_TH,) = grad_outputs
        kept, h_PJ, gates_P, w1_eJH, w2_eHI, b1_eJ, b2_eH, *lists = ctx.saved_tensors
        receipt: Receipt = ctx.sizes.with_lists(tuple(lists))
        transport: Transport = ctx.transport
        ops: Operations = ctx.ops
        weights, pairs = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH), _pair_lists(receipt)
        needs_w1, needs_w2, needs_b1, needs_b2 = ctx.needs_input_grad[2:6]
        # Every rank takes every collective, whether or not this one needs the result.
        do_RH = transport.dispatch(dout_TH.contiguous(), receipt)
        rows_RH = kept if ctx.kept_is_received else transport.dispatch(kept, receipt)
        grads = expert_mlp.backward_activations(ops, do_RH, h_PJ, gates_P, weights, pairs, ctx.activation)
        dx_TH = transport.combine(grads.dx_RH, receipt)
        dgates_N = transport.return_pairs(grads.ds_P, receipt)
        dh_PJ, scaled_a_PI = grads.dh_PJ, grads.scaled_a_PI
        del grads
        dw2 = expert_mlp.backward_down_weights(ops, do_RH, scaled_a_PI, pairs) if needs_w2 else None
        del scaled_a_PI
        dw1 = expert_mlp.backward_up_weights(ops, rows_RH, dh_PJ, pairs) if needs_w1 else None
        db1, db2 = None, None
        if needs_b1 or needs_b2:
            db1, db2 = expert_mlp.backward_biases(ops, do_RH, gates_P, dh_PJ, pairs)
        return dx_TH, dgates_N, dw1, dw2, db1 if needs_b1 else None, db2 if needs_b2 else None, None


def _pair_lists(receipt: Receipt) -> PairLists:
    return PairLists(receipt.row_of_pair_P, receipt.pairs_by_row_V, receipt.pair_starts_R, receipt.expert_starts_e)
