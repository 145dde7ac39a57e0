"""`Order`: in which order this rank runs the backwards of a group's layers, in a form that costs nothing to compare.

Every rank adds the identity of a backward to a hash on its host when the backward begins. The hash travels in the next
forward's exchange of counts, and starts anew there. If the hashes differ, the ranks tell each other their lists, and
all raise the same error. docs/failures.md#the-order-of-backwards says why.

The forwards of layers in CUDA graphs (cuda_graphs.py) exchange nothing that a host reads, so they are in the list too.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, final

# A hash is the one before, multiplied by an odd number, plus an identity, in the low bits of an int64.
_FACTOR, _BITS = 6364136223846793005, 62
_MAX_LISTED = 1024  # of one list; the hash goes on
# Sent where there is nothing to compare: with one rank, and while a CUDA graph is captured.
NO_ORDER = 0


class Forward(NamedTuple):
    """A forward.

    exchange: the number of the exchange of counts in which the ranks routed, the same on every rank. Of a CUDA graph,
    the number of the layer's replay. layer: see `EPGroup.layer`. waits: whether the host waits for other ranks in its
    backward, if that is over gloo.
    """

    layer: int = 0
    exchange: int = 0
    waits: bool = True


class Ran(NamedTuple):
    """One run of a rank: the backward of a forward, or with `is_replay` the replay of a forward's CUDA graph.

    is_graphed: whether the forward is in a CUDA graph. in_region: no backward, but a forward that begins in a region of
    activation checkpointing. is_last: of such a forward that is recomputed, whether the region has saved nothing behind
    its layers.
    """

    forward: Forward
    is_graphed: bool = False
    is_replay: bool = False
    in_region: bool = False
    is_last: bool = False

    @property
    def identity(self) -> int:
        """The same on every rank, and of no other. A forward that exchanges counts needs no layer, which may be 0."""
        layer, exchange, _ = self.forward
        kind = 8 * self.is_last + 4 * self.in_region + 2 * self.is_replay + self.is_graphed + 1
        return (exchange << 20) + (layer << 3) * self.is_graphed + kind

    def __str__(self) -> str:
        layer, number, _ = self.forward
        of_layer = f"layer {layer}" if layer else "a layer"
        if self.in_region:
            behind = ", which has saved nothing behind its MoE layers" if self.is_last else ""
            return f"a forward of {of_layer} under activation checkpointing{behind}"
        return (
            f"replay {number} of {of_layer}" if self.is_replay else f"the backward of forward {number}, of {of_layer}"
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

    def add(self, forward: Forward) -> None:
        """Call it where the backward of a forward begins that exchanged counts. It takes a microsecond."""
        self.add_ran(Ran(forward))

    def add_ran(self, ran: Ran) -> None:
        self.last = ran.forward
        self._hash = (self._hash * _FACTOR + ran.identity) % 2**_BITS
        if len(self._ran) < _MAX_LISTED:
            self._ran.append(ran)

    def add_region(self, layer: int, *, is_last: bool = False) -> None:
        """Call it in front of an exchange of counts in a region of activation checkpointing that is not reentrant."""
        last = self.last
        self.add_ran(Ran(Forward(layer), in_region=True, is_last=is_last))
        self.last = last

    def ran(self) -> tuple[int, list[Ran]]:
        """Returns the hash, and the list that it stands for."""
        return self._hash, self._ran

    def send(self) -> int:
        """Returns the hash, and starts a new list. Call it once in each exchange of counts."""
        self.exchange += 1
        self.sent, self._ran = self._ran, []
        value, self._hash = self._hash, 0
        return value

    def restart(self, exchange: int) -> None:
        """Starts a new list, and counts exchanges from there: all ranks call it after an exchange that was none."""
        self.send()
        self.exchange = exchange


def problem_with_orders(lists: list[list[Ran]], hashes: Sequence[int]) -> str:
    """Returns the message for lists whose hashes differ, by rank: the first difference, in words."""
    shown = f"they differ after the first {_MAX_LISTED}"
    if max(map(len, lists)) < _MAX_LISTED:  # shown only if nothing else is
        shown = f"the lists are the same, {len(lists[0])} long, but what has arrived of them is {[*hashes]}"
    for number, each in enumerate(zip_longest(*lists), 1):
        if len({None if ran is None else ran.identity for ran in each}) > 1:
            texts = (f"{'nothing more' if ran is None else ran} on rank {rank}" for rank, ran in enumerate(each))
            shown = f"number {number} since the last forward was {', '.join(texts)}"
            if all(ran is not None and ran.in_region for ran in each):
                return (
                    "the ranks of the EP group disagree what a checkpointed block does behind its MoE layers "
                    f"({shown}), and a recomputation leaves out what nobody needs; let all ranks do the same there, "
                    "under the same dispatch modes, or put what one does alone under torch.no_grad()"
                )
            if any(ran is not None and ran.in_region for ran in each):
                return (
                    f"the ranks of the EP group disagree whether activations are checkpointed ({shown}), and a "
                    "recomputation exchanges counts once more; checkpoint a layer on every rank, or on none"
                )
            break
    return (
        f"the ranks of the EP group ran backwards in different orders, which gives wrong gradients: {shown}; run the "
        "backwards of layers and of steps in the same order on every rank, and go on from weights before that step"
    )
