"""Replay of saved selections: under activation checkpointing the recomputed forward must route as the first one did.

A recomputation that decided anew could differ (jitter, atomics, a bias update in between) and would gather counts
again. Regions nest: a router takes its selection from the innermost region that replays and hands it to all recording.

A checkpoint that torch.compile traces runs no recomputation of ours: its graph keeps what the decision returned.
"""

from contextvars import ContextVar, Token
from typing import Any, final

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sonic_ep.routing import RoutedPairs

# The operation that decides in a compiled graph (compiled.py).
DECIDE_PAIRS_OP = "sonic_ep::decide_pairs"


@final
class _Tape:
    """Selections of one forward region, in order, for each router."""

    def __init__(self) -> None:
        self.recorded_pairs: dict[int, list[RoutedPairs]] = {}
        self.replayed: dict[int, int] = {}

    def next(self, router: object) -> RoutedPairs:
        position = self.replayed.get(id(router), 0)
        recorded_pairs = self.recorded_pairs.get(id(router), [])
        if position >= len(recorded_pairs):
            raise RuntimeError(
                f"a recomputed region calls a router {position + 1} times, its first forward called it "
                f"{len(recorded_pairs)} times"
            )
        self.replayed[id(router)] = position + 1
        return recorded_pairs[position]


@final
class _Region:
    """Context manager, reusable: one pass through a region, recording on its tape or replaying it from the start."""

    def __init__(self, tape: _Tape, *, replays: bool) -> None:
        self.tape, self.replays = tape, replays
        self._tokens: list[Token[tuple[_Region, ...]]] = []

    def __enter__(self) -> None:
        if self.replays:
            self.tape.replayed.clear()
        self._tokens.append(_REGIONS.set((*_REGIONS.get(), self)))

    def __exit__(self, *_: object) -> None:
        _REGIONS.reset(self._tokens.pop())


_REGIONS: ContextVar[tuple[_Region, ...]] = ContextVar("sonic_ep_regions", default=())


def replayed_pairs(router: object) -> RoutedPairs | None:
    """The selection that `router` must repeat, or None where it decides for itself."""
    for region in reversed(_REGIONS.get()):
        if region.replays:
            return region.tape.next(router)
    return None


def record_pairs(router: object, routed_pairs: RoutedPairs) -> None:
    """Keep `routed_pairs` for every region that records."""
    for region in _REGIONS.get():
        if not region.replays:
            region.tape.recorded_pairs.setdefault(id(router), []).append(routed_pairs)


def in_region() -> bool:
    """Does a region record or replay?"""
    return bool(_REGIONS.get())


def replaying() -> bool:
    """Does a region replay?"""
    return any(region.replays for region in _REGIONS.get())


def replay_contexts() -> tuple[Any, Any]:
    """`context_fn` for torch.utils.checkpoint.checkpoint(..., use_reentrant=False): record, then replay.

    Example: checkpoint(block, x, use_reentrant=False, context_fn=sonic_ep.replay_contexts)
    """
    if get_proxy_mode() is not None:
        return create_selective_checkpoint_contexts(_save_collectives)
    tape = _Tape()
    return _Region(tape, replays=False), _Region(tape, replays=True)


def _save_collectives(_context: object, operation: Any, *arguments: object, **__: object) -> CheckpointPolicy:
    if operation.namespace == "sonic_ep":
        of_group = {a.name: value for a, value in zip(operation._schema.arguments, arguments, strict=True)}
        if operation.name() == DECIDE_PAIRS_OP or of_group.get("ep_size", 1) != 1:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
