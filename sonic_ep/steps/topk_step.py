"""The routing of a framework's top-K as a program.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.bounded_steps import BoundedSteps
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.groups.order import NO_ORDER
from sonic_ep.kernels.backend import runs_triton
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Trace
from sonic_ep.routers.replay import in_region
from sonic_ep.routers.topk_pairs import Added, GivenTopK, RoutedTopK, RouterCall, round_topk, route_topk
from sonic_ep.routing import GroupCounts
from sonic_ep.steps.programs import USUAL_TOKENS, Programs, Ranks, Sizes, StepPrograms, may_run, numbers_of, slots_of
from sonic_ep.symmetric_memory import parts_made_by

_NUM_COUNTS = len(GroupCounts._fields)


class Rounded(NamedTuple):
    """What a program that rounds depends on besides. dtype: of the scores. has_allowed: whether experts are limited.
    by_expert: see GivenTopK."""

    config: MoEConfig
    added: Added
    dtype: torch.dtype
    has_allowed: bool
    by_expert: bool


class TopKKind(NamedTuple):
    """All that a program depends on, besides sizes. of_map: whether a map is given, see `pairs_with_weights`. dtype: of
    the weights. ranks: on several, with a mailbox. rounded: None if it does not round."""

    call: RouterCall
    E: int
    K: int
    of_map: bool
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None
    rounded: Rounded | None = None

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
        of_map = chosen.dtype == torch.bool
        return self._run(TopKKind(call, E, K, of_map, weights.dtype, chosen.device, self.ranks), [chosen, weights])

    def round(self, given: GivenTopK, added: Added, config: MoEConfig, call: RouterCall) -> RoutedTopK | None:
        """Returns what `round_topk` does, likewise."""
        ids_TK, weights, scores_TE, allowed_TE, by_expert = given
        if config.rounding.draws_numbers or in_region():
            return None
        if call.group.size > 1 and call.training and call.exchange.problem_with(ids_TK.shape[0]) is not None:
            return None
        call.group.enter_layer(0)
        rounded = Rounded(config, added, scores_TE.dtype, allowed_TE is not None, by_expert)
        kind = TopKKind(call, config.E, config.K, False, weights.dtype, ids_TK.device, self.ranks, rounded)
        return self._run(kind, [ids_TK, weights, scores_TE, *([] if allowed_TE is None else [allowed_TE])])

    def _run(self, kind: TopKKind, given: list[Tensor]) -> RoutedTopK | None:
        chosen, ranks = given[0], kind.ranks
        if kind.call.problem is not None or not may_run(chosen) or not runs_triton(chosen):
            return None
        if ranks is not None:
            assert self.steps is not None
            if ranks.symmetric is None and not isinstance(ranks.transport.chosen(kind.device), CollectiveTransport):
                return None  # the transport is chosen, and its buffers are allocated, by the code
            ranks = self.programs.known(replace(ranks, mailbox=self.steps.mailbox))
            kind = kind._replace(ranks=ranks)
        sizes: Sizes = (chosen.shape[0],) if ranks is None else (chosen.shape[0], NO_ORDER)
        programs = self.programs.find(kind, sizes)
        if programs is None:
            return None
        if ranks is not None:
            if ranks.symmetric is not None:
                ranks.symmetric.raise_if_lost()
            sizes = chosen.shape[0], ranks.group.order.send()
        inputs = [each.detach().contiguous() for each in given]
        weights_N, slots_N, token_ids_N, *rest = programs.forward.run(sizes, inputs)
        counts = GroupCounts._make(rest[:_NUM_COUNTS])
        if kind.rounded is None:
            counts = counts._replace(rows_SE=counts.chosen_SE, pairs_SE=counts.chosen_SE)  # the same, for `moe`
        split_sizes = None if self.steps is None else self.steps.arriving(rest[_NUM_COUNTS])
        return RoutedTopK(weights_N, slots_N, token_ids_N, counts, split_sizes, chosen)


def traced_topk(kind: TopKKind, sizes: Sizes) -> Programs:
    """Traces the program of this kind. sizes: of the traced step."""
    usual, ranks = kind.usual_sizes, kind.ranks
    trace = Trace(kind.device, dict(zip(usual, sizes, strict=True)), usual)
    with trace, ExitStack() as stack:
        if ranks is not None:
            trace.mailbox = ranks.mailbox
            stack.enter_context(parts_made_by(trace.fixed_part))
        inputs = cast(list[Tensor], [trace.input((trace.size("T"), C), dtype) for C, dtype in _inputs(kind)])
        given = numbers_of(inputs)
        found = _routed(kind, inputs)
        packed = slots_of(found.counts)
        packed += slots_of([] if found.split_sizes is None else [found.split_sizes.on_device])
        outputs = slots_of(found[:3])
        trace.finish()
    generation = 0 if ranks is None or ranks.symmetric is None else ranks.symmetric.generation
    return Programs(Program(trace, given, outputs, (), packed), {}, generation)


def _inputs(kind: TopKKind) -> list[tuple[int, torch.dtype]]:
    """Returns the number of columns and the dtype of each."""
    E, K, rounded = kind.E, kind.K, kind.rounded
    if rounded is None:
        return [(E, torch.bool), (E, kind.dtype)] if kind.of_map else [(K, torch.int64), (K, kind.dtype)]
    tables = [(K, torch.int64), (E if rounded.by_expert else K, kind.dtype), (E, rounded.dtype)]
    return [*tables, *([(E, torch.bool)] if rounded.has_allowed else [])]


def _routed(kind: TopKKind, inputs: list[Tensor]) -> RoutedTopK:
    if kind.rounded is None:
        return route_topk(inputs[0], inputs[1], kind.E, kind.K, kind.call)
    config, added, *_, by_expert = kind.rounded
    ids_TK, weights, scores_TE, *allowed = inputs
    given = GivenTopK(ids_TK, weights, scores_TE, allowed[0] if allowed else None, by_expert)
    return round_topk(None, given, added, config, kind.call)
