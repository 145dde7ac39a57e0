"""Replay of routed pairs: under activation checkpointing, the recomputed forward must route as the first one did.

Without replay a recomputation could route differently (jitter, atomics, a bias update in between), and would gather
counts again. A region is the forward of a checkpointed block, or its recomputation. Regions nest: a router gets its
pairs from the innermost region that replays, and all regions that record save them.

A checkpoint that torch.compile traces does not use regions: with `replay_contexts` its graph recomputes no layer.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, final

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sonic_ep.routing import RoutedPairs


@final
class _Region:
    """A reusable context manager for one pass through a region: records pairs, or replays them from the start.

    recorded_pairs: for each router, by its id, in the order of its calls. Both passes of a region have one dict.
    """

    def __init__(self, recorded_pairs: dict[int, list[RoutedPairs]], *, replays: bool) -> None:
        self.recorded_pairs, self.replays = recorded_pairs, replays
        self._num_replayed: Counter[int] = Counter()
        self._tokens: list[Token[tuple[_Region, ...]]] = []

    def __enter__(self) -> None:
        self._num_replayed.clear()
        self._tokens.append(_REGIONS.set((*_REGIONS.get(), self)))

    def __exit__(self, *_: object) -> None:
        _REGIONS.reset(self._tokens.pop())

    def next(self, router: object) -> RoutedPairs:
        """Returns the router's next pairs. Raises RuntimeError if the first forward called it fewer times."""
        position, recorded_pairs = self._num_replayed[id(router)], self.recorded_pairs.get(id(router), [])
        if position >= len(recorded_pairs):
            raise RuntimeError(
                f"a recomputed region calls a router {position + 1} times, its first forward called it "
                f"{len(recorded_pairs)} times"
            )
        self._num_replayed[id(router)] += 1
        return recorded_pairs[position]


_REGIONS: ContextVar[tuple[_Region, ...]] = ContextVar("sonic_ep_regions", default=())


def replayed_pairs(router: object) -> RoutedPairs | None:
    """Returns the pairs that `router` must repeat, or None if no region replays. Raises RuntimeError, see `_Region`."""
    for region in reversed(_REGIONS.get()):
        if region.replays:
            return region.next(router)
    return None


def record_pairs(router: object, routed_pairs: RoutedPairs) -> None:
    """Records `routed_pairs` in every region that records."""
    for region in _REGIONS.get():
        if not region.replays:
            region.recorded_pairs.setdefault(id(router), []).append(routed_pairs)


@contextmanager
def repeated_pairs(router: object, routed_pairs: RoutedPairs) -> Generator[None]:
    """A context in which the next call of `router` returns these pairs."""
    with _Region({id(router): [routed_pairs]}, replays=True):
        yield


def in_region() -> bool:
    """Returns True inside a region."""
    return bool(_REGIONS.get())


def replaying() -> bool:
    """Returns True inside a region that replays."""
    return any(region.replays for region in _REGIONS.get())


def refuse_new_numbers() -> None:
    """Call it where an operation of a compiled graph draws numbers. Raises RuntimeError if backward recomputes it."""
    if torch._C._current_graph_task_id() != -1 and not replaying():
        raise RuntimeError(
            "backward recomputes a router that draws numbers, in a compiled graph, and it would decide anew; "
            "give its checkpoint context_fn=sonic_ep.replay_contexts"
        )


def replay_contexts() -> tuple[Any, Any]:
    """`context_fn` for torch.utils.checkpoint.checkpoint(..., use_reentrant=False): returns a region that records the
    routing of the forward, and one that replays it in the recomputation.

    Example: checkpoint(block, x, use_reentrant=False, context_fn=sonic_ep.replay_contexts)
    """
    if get_proxy_mode() is not None:
        return create_selective_checkpoint_contexts(_save_own)
    recorded_pairs: dict[int, list[RoutedPairs]] = {}
    return _Region(recorded_pairs, replays=False), _Region(recorded_pairs, replays=True)


def _save_own(_context: object, operation: OpOverload, *_: object, **__: object) -> CheckpointPolicy:
    """The policy of a traced checkpoint: keeps what layers have computed, and recomputes the rest."""
    return CheckpointPolicy.MUST_SAVE if operation.namespace == "sonic_ep" else CheckpointPolicy.PREFER_RECOMPUTE
