"""`Order`: in which order this rank runs the backwards of a group's layers, in a form that costs nothing to compare.

A backward sends rows and values, and nothing that says whose they are. If two ranks run two backwards in different
orders, each takes the rows of one for those of the other, and gradients are wrong. So every rank adds the identity of a
backward to a hash on its host when the backward begins. The hash travels in the next forward's exchange of counts, and
starts anew there. If the hashes differ, the ranks tell each other their lists, and all raise the same error.

The forwards of layers in CUDA graphs (cuda_graphs.py) exchange nothing that a host reads, so they are in the list too.
"""

from typing import NamedTuple, final

# A hash is an odd multiple-and-add of the one before, in the low bits of an int64. What is sent has _IS_SENT, so that
# kernels get an integer of one type, and is a multiple of _STEP, as the address that stands for it in a recording is.
_FACTOR, _BITS, _STEP, _IS_SENT = 6364136223846793005, 51, 16, 2**55
_MAX_LISTED = 1024  # of one list; the hash goes on
# What is sent where there is nothing to compare: with one rank, and while a CUDA graph is captured.
NO_ORDER = _IS_SENT


class Forward(NamedTuple):
    """A forward, the same on every rank of the group.

    layer: see `EPGroup.layer`. exchange: the number of the exchange of counts in which the ranks routed.
    """

    layer: int = 0
    exchange: int = 0


class Ran(NamedTuple):
    """What a rank ran: the backward of a forward, or, with `is_replay`, the replay of a forward's CUDA graph."""

    forward: Forward
    is_replay: bool = False

    def __str__(self) -> str:
        layer, number = self.forward
        of_layer = f"layer {layer}" if layer else "a layer"
        return (
            f"forward {number} of {of_layer}" if self.is_replay else f"the backward of forward {number}, of {of_layer}"
        )


@final
class Order:
    """The backwards of this rank in one process group.

    exchange: how many exchanges of counts the group has had. last: the forward of the last backward. sent: what this
    rank ran between the last two exchanges, as far as it is listed.
    """

    def __init__(self) -> None:
        self.exchange, self.last = 0, Forward()
        self.sent: list[Ran] = []
        self._ran: list[Ran] = []
        self._hash = 0

    def add(self, forward: Forward, *, is_replay: bool = False) -> None:
        """Call it where a backward begins. It takes less than a microsecond."""
        self.last = forward
        identity = (forward.exchange << 16) + 2 * forward.layer + is_replay + 1
        self._hash = (self._hash * _FACTOR + identity) % 2**_BITS
        if len(self._ran) < _MAX_LISTED:
            self._ran.append(Ran(forward, is_replay))

    def ran(self) -> tuple[int, list[Ran]]:
        """Returns the hash, and the list that it stands for."""
        return self._hash, self._ran

    def send(self) -> int:
        """Returns the hash, and starts a new list. Call it once in each exchange of counts."""
        self.exchange += 1
        self.sent, self._ran = self._ran, []
        value, self._hash = self._hash, 0
        return _IS_SENT + _STEP * value


def problem_with_orders(lists: list[list[Ran]]) -> str:
    """Returns the message for lists that differ, by rank: the first difference, in words."""
    longest = max(map(len, lists))
    padded = [[*map(str, ran), *["nothing more"] * (longest - len(ran))] for ran in lists]
    place = next((place for place, each in enumerate(zip(*padded, strict=True)) if len(set(each)) > 1), None)
    shown = f"they differ after the first {_MAX_LISTED}"
    if place is not None:
        shown = ", ".join(f"{ran[place]} on rank {rank}" for rank, ran in enumerate(padded))
        shown = f"number {place + 1} since the last forward was {shown}"
    return (
        f"the ranks of the EP group ran backwards in different orders, so their gradients are wrong: {shown}; run the "
        "backwards of layers and of steps in the same order on every rank, and go on from weights before that step"
    )
