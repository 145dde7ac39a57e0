"""The expert-parallel MLP as three operations of a compiled graph: prepare, forward and backward.

torch.compile sees only their input and output tensors. The numbers of pairs and rows are known only at run time, so
the sizes of what `prepare_dispatch` returns are symbols. The output sizes of the other two follow from their inputs.
docs/torch_compile.md describes the graph.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, R rows this rank
receives, V pairs this rank receives, P rows of the pair buffer, S ranks of the EP group, F fields of a table, E
experts, e local experts, I expert width, J pre-activation columns (2I if gated else I).
"""

from contextlib import nullcontext
from dataclasses import astuple, fields
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import DispatchHandle, HandleSizes, PreparedDispatch, Splits
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward, backward, forward
from sonic_ep.first_order import Context
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import Forward
from sonic_ep.in_flight import InFlight
from sonic_ep.kernels.backend import start_compiling
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.routers.compiled import pending_sizes
from sonic_ep.routing import INDEX_DTYPE, GroupCounts, Routing
from sonic_ep.transports import existing_transport

_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# The inputs of the last two, but for numbers and names.
_Inputs = tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor, *_Weights, *tuple[object, ...]]
_TAGS = (torch.Tag.cudagraph_unsafe,)
_PAIR_STARTS, _EXPERT_STARTS = 2, 4  # their places in `DispatchHandle.lists`
_MAX_TRANSPORT_LISTS = 6  # of any transport of several ranks: an operation always returns as many tensors


class InFlightRows(NamedTuple):
    """The rows that `prepare` sent, or None, and their routing, which may not have been checked yet."""

    rows_RH: Tensor | None
    routing: Routing


_rows_in_flight: InFlight[InFlightRows] = InFlight(lambda sent: sent.routing.check())


def moe_in_graph(
    x_TH: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    group: EPGroup,
    transport: str,
    activation: str,
    save_dispatched: bool,
) -> Tensor:
    """`moe` without its checks, in a compiled graph. transport: the `text` of the group's transport."""
    weights_P, lists, splits = torch.ops.sonic_ep.prepare_dispatch(
        x_TH.detach(),
        routing.weights_N.detach(),
        routing.token_ids_N,
        list(routing.counts),
        routing.num_tokens,
        routing.max_rows,
        routing.max_received,
        group.name,
        group.size,
        transport,
    )
    return torch.ops.sonic_ep.expert_parallel_mlp(
        x_TH,
        routing.weights_N,
        weights_P,
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
        save_dispatched,
        routing.tile_aligned,
    )[0]


@torch.library.custom_op("sonic_ep::prepare_dispatch", mutates_args=(), tags=_TAGS)
def _prepare_dispatch(
    x_TH: Tensor,
    weights_N: Tensor,
    token_ids_N: Tensor,
    counts: list[Tensor],
    num_tokens: int,
    max_rows: int | None,
    max_received: int | None,
    group_name: str,
    ep_size: int,
    transport: str,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Returns weights_P and the DispatchHandle: its lists, and as one (F, S) tensor on the CPU its splits.

    With several ranks empty lists follow, up to _MAX_TRANSPORT_LISTS, and the last field begins with the number of its
    `Forward.exchange` and with how many lists the transport has.
    """
    group = EPGroup.named(group_name)
    decided = GroupCounts(*counts)
    split_sizes = pending_sizes.pop(group_name, decided.pairs_SE)
    routing = Routing(weights_N, token_ids_N, decided, num_tokens, max_rows, max_received, split_sizes)
    with routing.status_first():
        prepared = existing_transport(group, transport).prepare(routing, plan_for(decided, group.rank), x_TH)
    _rows_in_flight.put(group_name, prepared.handle.expert_starts_e, InFlightRows(prepared.rows_RH, routing))
    handle = prepared.handle
    numbers: list[tuple[int, ...]] = [*astuple(handle.splits)[: _num_splits(ep_size)]]
    spare = 0
    if ep_size > 1:
        num_lists = len(handle.transport_lists)
        spare = _MAX_TRANSPORT_LISTS - num_lists
        numbers.append((handle.forward.exchange, num_lists, *(0,) * (ep_size - 2)))
    splits_FS = torch.tensor([values or (0,) * ep_size for values in numbers], device="cpu")
    # Casts what is no list of this step but a view of the counts: an operation may not return its inputs.
    lists = [values.to(INDEX_DTYPE) for values in handle.lists()]
    lists += [lists[0].new_empty(0) for _ in range(spare)]
    return prepared.weights_P, lists, splits_FS


@_prepare_dispatch.register_fake
def _(
    x_TH: Tensor, weights_N: Tensor, token_ids_N: Tensor, counts: list[Tensor], num_tokens: int, *constants: object
) -> tuple[Tensor, list[Tensor], Tensor]:
    ep_size = cast(int, constants[-2])
    T, e = num_tokens, counts[0].shape[1] // ep_size
    new_size = torch.library.get_ctx().new_dynamic_size
    P, V = new_size(), new_size()
    if ep_size == 1:
        sizes = (P, V, T + 1, V, e + 1)
    else:
        num_starts, *own = (new_size() for _ in range(1 + _MAX_TRANSPORT_LISTS))  # R + 1
        sizes = (P, V, num_starts, V, e + 1, *own)
    return (
        weights_N.new_empty(P),
        [weights_N.new_empty(size, dtype=INDEX_DTYPE) for size in sizes],
        torch.empty(_num_splits(ep_size) + (ep_size > 1), ep_size, dtype=torch.int64, device="cpu"),
    )


def _num_splits(ep_size: int) -> int:
    """Returns F: how many fields of Splits a transport may have. One rank has no hops."""
    return 4 if ep_size == 1 else len(fields(Splits))


def _handle_of(lists: list[Tensor], splits_FS: Tensor, num_tokens: int, num_listed: int) -> DispatchHandle:
    values = splits_FS.tolist()
    exchange, num_lists, *_ = values.pop() if splits_FS.shape[1] > 1 else (0, 0)
    sizes = HandleSizes(
        splits=Splits(*map(tuple, values)),
        num_tokens=num_tokens,
        num_rows=lists[_PAIR_STARTS].shape[0] - 1,
        num_listed=num_listed,
        forward=Forward(exchange=exchange),
    )
    return sizes.with_lists(lists[: _EXPERT_STARTS + 1 + num_lists])


def _call(group_name: str, transport: str, activation: str, save_dispatched: bool, tile_aligned: bool) -> Call:
    group = EPGroup.named(group_name)
    way = existing_transport(group, transport)
    return Call(way, group, activation_named(activation), save_dispatched, tile_aligned)


@torch.library.custom_op("sonic_ep::expert_parallel_mlp", mutates_args=(), tags=_TAGS)
def _forward(
    x_TH: Tensor,
    weights_N: Tensor,
    weights_P: Tensor,
    lists: list[Tensor],
    splits_FS: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    save_dispatched: bool,
    tile_aligned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out_TH, the received rows (empty unless `save_dispatched`), and h_PJ.

    weights_N is an input only because it has a gradient.
    """
    sent = _rows_in_flight.pop(group_name, lists[_EXPERT_STARTS])
    rows_RH = None if sent is None else sent.rows_RH
    prepared = PreparedDispatch(_handle_of(lists, splits_FS, x_TH.shape[0], weights_N.shape[0]), weights_P, rows_RH)
    weights = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH)
    start_compiling(w2_eHI, activation, bias=b1_eJ is not None)
    call = _call(group_name, transport, activation, save_dispatched, tile_aligned)
    with nullcontext() if sent is None else sent.routing.status_first():
        out_TH, saved = forward(x_TH.contiguous(), prepared, weights, call)
    if sent is not None:
        sent.routing.check()  # after all launches, because it may block
    return out_TH, saved.rows if save_dispatched else x_TH.new_empty(0), saved.pop()[0]


@_forward.register_fake
def _(
    x_TH: Tensor, _: Tensor, weights_P: Tensor, lists: list[Tensor], __: Tensor, w1_eJH: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    save_dispatched = others[-2]
    (T, H), R = x_TH.shape, lists[_PAIR_STARTS].shape[0] - 1
    return (
        x_TH.new_empty(T, H),
        x_TH.new_empty((R, H) if save_dispatched else 0),
        x_TH.new_empty(weights_P.shape[0], w1_eJH.shape[1]),
    )


@torch.library.custom_op("sonic_ep::expert_parallel_mlp_backward", mutates_args=(), tags=_TAGS)
def _backward(
    dout_TH: Tensor,
    rows: Tensor,
    h_PJ: Tensor,
    weights_P: Tensor,
    lists: list[Tensor],
    splits_FS: Tensor,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None,
    b2_eH: Tensor | None,
    num_pairs: int,
    group_name: str,
    ep_size: int,
    transport: str,
    activation: str,
    save_dispatched: bool,
    tile_aligned: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dx_TH, dweights_N and the gradients of the weights; those that are not needed are empty."""
    saved = SavedForBackward(
        rows.contiguous(), h_PJ, weights_P, _handle_of(lists, splits_FS, dout_TH.shape[0], num_pairs)
    )
    weights = ExpertWeights(w1_eJH, w2_eHI, b1_eJ, b2_eH)
    call = _call(group_name, transport, activation, save_dispatched, tile_aligned)
    grads = backward(dout_TH, saved, weights, call, needs)
    weight_grads = (grads.dw1, grads.dw2, grads.db1_eJ, grads.db2_eH)
    dw1, dw2, db1, db2 = (dout_TH.new_empty(0) if grad is None else grad for grad in weight_grads)
    return grads.dx_TH, grads.dweights_N, dw1, dw2, db1, db2


@_backward.register_fake
def _(
    dout_TH: Tensor, *others: *tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor, *_Weights, int, *tuple[object, ...]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, weights_P, _, _, *weights, num_pairs = others[:10]
    weights = zip(weights, cast(list[bool], others[-1]), strict=True)
    dw1, dw2, db1, db2 = (dout_TH.new_empty(weight.shape if weight is not None and n else 0) for weight, n in weights)
    return dout_TH.new_empty(dout_TH.shape), weights_P.new_empty(num_pairs), dw1, dw2, db1, db2


def _setup_context(ctx: Context[tuple[object, ...]], inputs: _Inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_TH, weights_N, weights_P, lists, splits_FS, w1, w2, b1, b2, *constants = inputs
    *_, save_dispatched, _tile_aligned = constants
    _, rows, h_PJ = output
    ctx.save_for_backward(rows if save_dispatched else x_TH, h_PJ, weights_P, splits_FS, w1, w2, b1, b2, *lists)
    ctx.mark_non_differentiable(rows, h_PJ)
    ctx.set_materialize_grads(False)
    ctx.call = (weights_N.shape[0], *constants)


def _differentiate(ctx: Context[tuple[object, ...]], dout_TH: Tensor, *_: None) -> tuple[object, ...]:
    rows, h_PJ, weights_P, splits_FS, w1, w2, b1, b2, *lists = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[5:9])
    dx_TH, dweights_N, *grads = torch.ops.sonic_ep.expert_parallel_mlp_backward(
        dout_TH, rows, h_PJ, weights_P, lists, splits_FS, w1, w2, b1, b2, *ctx.call, needs
    )
    grads = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dx_TH, dweights_N, None, [None] * len(lists), None, *grads, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
