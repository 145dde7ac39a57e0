"""The expert-parallel MLP as three operations of a compiled graph: open, forward and backward.

torch.compile sees tensors go in and come out. How many pairs and rows there are is known only when they run, so the
sizes that `open_routing` returns are symbols; those of the others follow from their inputs, which lets a graph free
what it is done with. docs/torch_compile.md has the whole picture.

Legend: T tokens and H hidden size on this rank, N pairs sent, U rows sent, R received rows, V received pairs, P
pair-buffer rows, S ranks of the group, E experts, e local experts, I expert width, J = 2I if gated else I.
"""

from contextlib import nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import Opened, Receipt, ReceiptSizes, Splits
from sonic_ep.expert_parallel_mlp import Call, Kept, backward, forward
from sonic_ep.groups import EPGroup
from sonic_ep.handover import Handover
from sonic_ep.kernels.activations import activation_named
from sonic_ep.kernels.expert_mlp import ExpertWeights
from sonic_ep.routers.compiled import unread
from sonic_ep.routing import INDEX_DTYPE, Counts, Routing
from sonic_ep.transports import transport_held

_TAGS = (torch.Tag.cudagraph_unsafe,)
_LISTS = [field.name for field in fields(Receipt)]
_PAIR_STARTS, _EXPERT_STARTS = _LISTS.index("pair_starts_R"), _LISTS.index("expert_starts_e")


class _OnTheirWay(NamedTuple):
    """Rows that `open` has sent, if it has, by a routing that may be unchecked."""

    rows_RH: Tensor | None
    routing: Routing


_sent: Handover[_OnTheirWay] = Handover(lambda sent: sent.routing.check())


def moe_in_graph(
    x_TH: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    group: EPGroup,
    transport: str,
    activation: str,
    keeps_received: bool,
) -> Tensor:
    """`moe` without its checks. transport: its `text`."""
    gates_P, lists, splits = torch.ops.sonic_ep.open_routing(
        x_TH.detach(),
        routing.gates_N.detach(),
        routing.token_ids_N,
        list(routing.counts),
        routing.num_tokens,
        routing.most_rows,
        routing.most_received,
        group.name,
        group.size,
        transport,
    )
    return torch.ops.sonic_ep.expert_parallel_mlp(
        x_TH,
        routing.gates_N,
        gates_P,
        lists,
        splits,
        weights.w1,
        weights.w2_eHI,
        weights.b1_eJ,
        weights.b2_eH,
        group.name,
        group.size,
        transport,
        activation,
        keeps_received,
        routing.rounded,
    )[0]


@torch.library.custom_op("sonic_ep::open_routing", mutates_args=(), tags=_TAGS)
def _open_routing(
    x_TH: Tensor,
    gates_N: Tensor,
    token_ids_N: Tensor,
    counts: list[Tensor],
    num_tokens: int,
    most_rows: int | None,
    most_received: int | None,
    group_name: str,
    ep_size: int,
    transport: str,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """gates_P and the receipt: its lists and its splits."""
    group = EPGroup.named(group_name)
    decided = Counts(*counts)
    on_host = unread.take(group_name, decided.pairs_SE)
    routing = Routing(gates_N, token_ids_N, decided, num_tokens, most_rows, most_received, on_host)
    with routing.reports_first():
        opened = transport_held(group, transport).open(routing, plan_for(decided, group.rank), x_TH)
    _sent.leave(group_name, opened.receipt.expert_starts_e, _OnTheirWay(opened.rows_RH, routing))
    splits = opened.receipt.splits
    numbers = [splits.rows_out, splits.rows_in, splits.pairs_out, splits.pairs_in]
    splits_4S = torch.tensor(numbers, device="cpu")
    return opened.gates_P, list(opened.receipt.lists()), splits_4S


@_open_routing.register_fake
def _(
    x_TH: Tensor,
    gates_N: Tensor,
    token_ids_N: Tensor,
    counts: list[Tensor],
    num_tokens: int,
    most_rows: int | None,
    most_received: int | None,
    group_name: str,
    ep_size: int,
    transport: str,
) -> tuple[Tensor, list[Tensor], Tensor]:
    T, e = num_tokens, counts[0].shape[1] // ep_size
    new_size = torch.library.get_ctx().new_dynamic_size
    P, V = new_size(), new_size()
    if ep_size == 1:
        sizes = (P, V, T + 1, V, e + 1)
    else:
        num_starts, *own = (new_size() for _ in range(4))  # each transport has three lists of its own
        sizes = (P, V, num_starts, V, e + 1, *own)
    return (
        gates_N.new_empty(P),
        [gates_N.new_empty(size, dtype=INDEX_DTYPE) for size in sizes],
        torch.empty(4, ep_size, dtype=torch.int64, device="cpu"),
    )


def _receipt_of(lists: list[Tensor], splits_4S: Tensor, num_tokens: int, num_listed: int) -> Receipt:
    splits = Splits(*map(tuple, splits_4S.tolist()))
    sizes = ReceiptSizes(splits, num_tokens, lists[_PAIR_STARTS].shape[0] - 1, num_listed)
    return sizes.with_lists(lists)


def _call(group_name: str, transport: str, activation: str, keeps_received: bool, rounded: bool) -> Call:
    way = transport_held(EPGroup.named(group_name), transport)
    return Call(way, activation_named(activation), keeps_received, rounded)


@torch.library.custom_op("sonic_ep::expert_parallel_mlp", mutates_args=(), tags=_TAGS)
def _forward(
    x_TH: Tensor,
    gates_N: Tensor,
    gates_P: Tensor,
    lists: list[Tensor],
    splits_4S: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    keeps_received: bool,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out_TH, the received rows if kept, else nothing, and h_PJ. gates_N is here for its gradient alone."""
    sent = _sent.take(group_name, lists[_EXPERT_STARTS])
    rows_RH = None if sent is None else sent.rows_RH
    opened = Opened(_receipt_of(lists, splits_4S, x_TH.shape[0], gates_N.shape[0]), gates_P, rows_RH)
    weights = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH)
    call = _call(group_name, transport, activation, keeps_received, rounded)
    with nullcontext() if sent is None else sent.routing.reports_first():
        out_TH, kept = forward(x_TH.contiguous(), opened, weights, call)
    if sent is not None:
        sent.routing.check()  # now that all has been launched
    return out_TH, kept.rows if keeps_received else x_TH.new_empty(0), kept.take()[0]


@_forward.register_fake
def _(
    x_TH: Tensor,
    gates_N: Tensor,
    gates_P: Tensor,
    lists: list[Tensor],
    splits_4S: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    keeps_received: bool,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (T, H), R = x_TH.shape, lists[_PAIR_STARTS].shape[0] - 1
    return (
        x_TH.new_empty(T, H),
        x_TH.new_empty((R, H) if keeps_received else 0),
        x_TH.new_empty(gates_P.shape[0], w1_eJH.shape[1]),
    )


@torch.library.custom_op("sonic_ep::expert_parallel_mlp_backward", mutates_args=(), tags=_TAGS)
def _backward(
    dout_TH: Tensor,
    rows: Tensor,
    h_PJ: Tensor,
    gates_P: Tensor,
    lists: list[Tensor],
    splits_4S: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    num_pairs: int,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    keeps_received: bool,
    rounded: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx_TH, dgates_N and the gradients of the weights, empty where not needed."""
    kept = Kept(rows.contiguous(), h_PJ, gates_P, _receipt_of(lists, splits_4S, dout_TH.shape[0], num_pairs))
    weights = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH)
    call = _call(group_name, transport, activation, keeps_received, rounded)
    grads = backward(dout_TH, kept, weights, call, needs)
    dx_TH, dgates_N, dw1, dw2, db1, db2 = (dout_TH.new_empty(0) if grad is None else grad for grad in grads)
    return dx_TH, dgates_N, dw1, dw2, db1, db2


@_backward.register_fake
def _(
    dout_TH: Tensor,
    rows: Tensor,
    h_PJ: Tensor,
    gates_P: Tensor,
    lists: list[Tensor],
    splits_4S: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    num_pairs: int,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    keeps_received: bool,
    rounded: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = zip((w1_eJH, w2_eHI, b1_eJ, b2_eH), needs, strict=True)
    dw1, dw2, db1, db2 = (dout_TH.new_empty(weight.shape if weight is not None and n else 0) for weight, n in weights)
    return dout_TH.new_empty(dout_TH.shape), gates_P.new_empty(num_pairs), dw1, dw2, db1, db2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TH, gates_N, gates_P, lists, splits_4S, w1, w2, b1, b2, *constants = inputs
    *_, keeps_received, _rounded = constants
    _, rows, h_PJ = output
    ctx.save_for_backward(rows if keeps_received else x_TH, h_PJ, gates_P, splits_4S, w1, w2, b1, b2, *lists)
    ctx.mark_non_differentiable(rows, h_PJ)
    ctx.set_materialize_grads(False)
    ctx.constants = (gates_N.shape[0], *constants)


def _differentiate(ctx: Any, dout_TH: Tensor, *_: None) -> tuple[Any, ...]:
    rows, h_PJ, gates_P, splits_4S, w1, w2, b1, b2, *lists = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[5:9])
    dx_TH, dgates_N, *grads = torch.ops.sonic_ep.expert_parallel_mlp_backward(
        dout_TH, rows, h_PJ, gates_P, lists, splits_4S, w1, w2, b1, b2, *ctx.constants, needs
    )
    grads = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dx_TH, dgates_N, None, [None] * len(lists), None, *grads, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
