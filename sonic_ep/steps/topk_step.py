"""The routing of a framework's top-K as a program.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sonic_ep.dispatch.bounded_steps import BoundedSteps
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.groups.order import NO_ORDER
from sonic_ep.kernels.backend import runs_triton
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Trace
from sonic_ep.routers.topk_pairs import RoutedTopK, RouterCall, route_topk
from sonic_ep.routing import GroupCounts
from sonic_ep.steps.programs import USUAL_TOKENS, Programs, Ranks, Sizes, StepPrograms, may_run, numbers_of, slots_of
from sonic_ep.symmetric_memory import parts_made_by


class TopKKind(NamedTuple):
    """All that a program depends on, besides sizes. of_map: whether a map is given, see `pairs_with_weights`. dtype: of
    the weights. ranks: on several, with a mailbox."""

    call: RouterCall
    E: int
    K: int
    of_map: bool
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens of this rank, and on several ranks the order of backwards."""
        return {"T": USUAL_TOKENS} if self.ranks is None else {"T": USUAL_TOKENS, "order": NO_ORDER}


@dataclass(slots=True)
class TopKStep:
    """The routing of one step. ranks, steps: on several."""

    programs: StepPrograms[TopKKind]
    ranks: Ranks | None = None
    steps: BoundedSteps[tuple[Tensor, bool]] | None = None

    def route(self, chosen: Tensor, weights: Tensor, E: int, K: int, call: RouterCall) -> RoutedTopK | None:
        """Returns what `route_topk` does, or None where its code has to run. A collective if it does not."""
        T, ranks, device = chosen.shape[0], self.ranks, chosen.device
        if call.problem is not None or not may_run(chosen) or not runs_triton(chosen):
            return None
        if ranks is not None:
            assert self.steps is not None
            if ranks.symmetric is None and not isinstance(ranks.transport.chosen(device), CollectiveTransport):
                return None  # the transport is chosen, and its buffers are allocated, by the code
            ranks = self.programs.known(replace(ranks, mailbox=self.steps.mailbox))
        kind = TopKKind(call, E, K, chosen.dtype == torch.bool, weights.dtype, device, ranks)
        programs = self.programs.find(kind, (T, NO_ORDER)[: 1 if ranks is None else 2])
        if programs is None:
            return None
        sizes: Sizes = (T,)
        if ranks is not None:
            if ranks.symmetric is not None:
                ranks.symmetric.raise_if_lost()
            sizes = T, ranks.group.order.send()
        given = [chosen.contiguous(), weights.detach().contiguous()]
        weights_N, slots_N, token_ids_N, *rest = programs.forward.run(sizes, given)
        chosen_SE, *others = rest[:4]
        split_sizes = None if self.steps is None else self.steps.arriving(rest[4])
        counts = GroupCounts(chosen_SE, chosen_SE, chosen_SE, *others)
        return RoutedTopK(weights_N, slots_N, token_ids_N, counts, split_sizes)


def traced_topk(kind: TopKKind, sizes: Sizes) -> Programs:
    """Traces the program of this kind. sizes: of the traced step."""
    usual, ranks = kind.usual_sizes, kind.ranks
    trace = Trace(kind.device, dict(zip(usual, sizes, strict=True)), usual)
    with trace, ExitStack() as stack:
        if ranks is not None:
            trace.mailbox = ranks.mailbox
            stack.enter_context(parts_made_by(trace.fixed_part))
        shape, dtype = (trace.size("T"), kind.E if kind.of_map else kind.K), torch.bool if kind.of_map else torch.int64
        chosen, weights = (cast(Tensor, trace.input(shape, each)) for each in (dtype, kind.dtype))
        found = route_topk(chosen, weights, kind.E, kind.K, kind.call)
        counts = found.counts
        packed = slots_of([counts.chosen_SE, counts.tokens_S, counts.cut_S, counts.t])
        packed += slots_of([] if found.split_sizes is None else [found.split_sizes.on_device])
        outputs, given = slots_of(found[:3]), numbers_of([chosen, weights])
        trace.finish()
    generation = 0 if ranks is None or ranks.symmetric is None else ranks.symmetric.generation
    return Programs(Program(trace, given, outputs, (), packed), {}, generation)
