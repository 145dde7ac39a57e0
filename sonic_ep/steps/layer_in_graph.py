"""`MoE` as one operation of a compiled graph (sonic_ep/graph/operation.py).

Legend: T tokens on this rank, E experts, S ranks of the EP group.
"""

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sonic_ep.autocast import autocast_to
from sonic_ep.graph.modules import module_of, with_tensors
from sonic_ep.graph.operation import GraphOperation, Outputs, in_graph, output_of
from sonic_ep.routing import INDEX_DTYPE, GroupCounts

if TYPE_CHECKING:
    from sonic_ep.layer import MoE


def moe_layer(tensors: list[Tensor], sizes: tuple[int, int, int], *constants: object) -> list[Tensor]:
    """Returns y, the loss and the fields of the statistics, in a compiled graph.

    tensors: x, then the layer's parameters. sizes: ep_size, E, and the most pairs of this rank; token_ids_N has as many
    entries, and is -1 behind its pairs. constants: see the operation, below.
    """
    (y, aux_loss), _, ticket = in_graph(torch.ops.sonic_ep.moe_layer, tensors, *constants)
    ep_size, E, most = sizes
    fields: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (aux_loss.dtype, (math.prod(y.shape[:-1]),)),
        (INDEX_DTYPE, (most,)),
        *[(torch.int64, shape) for shape in GroupCounts.shapes(ep_size, E)],
    ]
    return [y, aux_loss, *[output_of(ticket, number, y, *field) for number, field in enumerate(fields)]]


def _compute(
    tensors: list[Tensor],
    key: Tensor,
    buffers: list[Tensor],
    autocast: torch.dtype | None,
    problem: str | None,
) -> Outputs:
    (x, *parameters), layer = tensors, cast("MoE", module_of(key))
    with autocast_to(autocast, x.device.type), with_tensors(layer, parameters, buffers):
        y, aux_loss, stats = layer._of_graph(x, problem)
    return Outputs([y, aux_loss], later=[stats.entropy_T, stats.token_ids_N, *stats.counts])


def _like(
    tensors: list[Tensor],
    key: Tensor,
    buffers: list[Tensor],
    autocast: torch.dtype | None,
    *_: object,
) -> Outputs:
    x = tensors[0]
    y = x.new_empty(x.shape, dtype=autocast)
    return Outputs([y, x.new_empty((), dtype=torch.promote_types(y.dtype, torch.float32))])


# key, buffers: of the layer. autocast: its dtype, if it is on. problem: of this rank with x, or None.
GraphOperation(
    "moe_layer",
    "Tensor key, Tensor[] buffers, ScalarType? autocast, str? problem",
    _compute,
    _like,
)
