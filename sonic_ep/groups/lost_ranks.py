"""`PeerWatch`: what the ranks of a group do when one of them does not come to a collective.

Ranks that wait for long tell each other where, through the group's store and the store of all groups, and raise an
error that names those that told nothing. docs/failures.md#lost-ranks says how. A wait of less than a second touches no
store.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple, NoReturn, Protocol, Self, final

import torch
import torch.distributed as dist

from sonic_ep.groups.hosts import HostLayout

_SLICE = 1.0  # seconds between two looks into the store
_GRACE = 10.0  # the most seconds in which the others may write where they are: some compute, and come later
_SPIN = 0.001  # seconds between two pauses of a thread that asks whether the device is done
_POLL = 0.05  # seconds between two reads of what they wrote
_STORE_LIMIT = 2.0  # seconds after which a store that does not answer is given up
_SLACK = 0.5  # seconds by which gloo may be late to notice its own timeout
_LOST = "sonic_ep/lost"
_AT = "sonic_ep/at"  # in the group's store: the last collective in which a rank has waited long
_WAITS = "sonic_ep/waits"  # in the store of all groups, by global rank: where it waits
_MAX_REASON = 160


class LostRankError(RuntimeError):
    """A rank of the group has died, is stuck, or calls other collectives. The process group is of no more use."""


class BrokenConnectionError(RuntimeError):
    """The connection to another rank broke. The message is torch's."""


class Collective(NamedTuple):
    """A collective of one rank. number: how many of the group it has called. layer: see `PeerWatch.layer`."""

    number: int
    stage: str
    layer: int
    in_backward: bool

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer else ""
        return f"{self.stage}{layer}{' in backward' if self.in_backward else ''}"


class _Report(NamedTuple):
    """The words of one rank. waited: seconds. cause: "timeout", "connection", or "others" if others knew first."""

    collective: Collective
    waited: float
    cause: str

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        collective, *rest = json.loads(text)
        return cls(Collective(*collective), *rest)


class _Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class Whereabouts(NamedTuple):
    """A process group among all. ranks: the global ranks, by rank of the group. world: returns the store of all."""

    name: str
    ranks: list[int]
    world: Callable[[], _Store]

    def tell(self, rank: int, place: str) -> None:
        """Writes where this rank waits; nothing if it does not."""
        self.world().set(f"{_WAITS}/{self.ranks[rank]}", json.dumps([self.name, place]) if place else "")

    def elsewhere(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns where the members of `ranks` wait that wait in another group."""
        found, store = {}, self.world()
        for rank in ranks:
            key = f"{_WAITS}/{self.ranks[rank]}"
            text = store.get(key) if store.check([key]) else b""
            name, place = json.loads(text) if text else (self.name, "")
            if name != self.name:
                found[rank] = f"{place} of process group {name!r}"
        return found


@final
class PeerWatch:
    """The collectives of one process group on this rank.

    layer: the number of the MoE layer that runs its forward, as it was built; 0 for none.
    hosts: where the ranks are, for errors; one host, until a transport has asked.
    store: returns the store of the group. whereabouts: of the group.
    lock: held while a thread is in a collective over gloo. is_threaded: whether on any rank several threads use the
    group, as far as the ranks have told each other.
    """

    def __init__(self, rank: int, size: int, store: Callable[[], _Store], whereabouts: Whereabouts) -> None:
        self.layer = 0
        self.hosts = HostLayout(("",) * size)
        self.lock, self.is_threaded = threading.RLock(), False
        self._thread: int | None = None
        self._rank, self._size, self._store, self._whereabouts = rank, size, store, whereabouts
        self._begun = Collective(0, "", 0, False)
        self._message: str | None = None  # of the error, once a rank is lost
        self._store_answers = True

    def begin(self, stage: str, layer: int | None = None) -> Collective:
        """Returns the collective that this rank calls now. layer: if it is not the one that runs its forward.

        Raises the LostRankError of `wait` again if a rank is lost.
        """
        if self._message is not None:
            raise LostRankError(self._message)
        layer = self.layer if layer is None else layer
        self._begun = Collective(self._begun.number + 1, stage, layer, in_backward())
        return self._begun

    def current(self, stage: str) -> Collective:
        """Returns the last collective, named `stage`: what the host waits for after it has called it."""
        return Collective(self._begun.number, stage, self.layer, in_backward())

    def is_another_thread(self) -> bool:
        """Returns True if another thread than this one called this last."""
        before, self._thread = self._thread, threading.get_ident()
        return before not in (None, self._thread)

    def wait(self, has_ended: Callable[[float], bool], collective: Collective, timeout: float) -> None:
        """Waits until the collective has ended.

        has_ended: waits so many seconds at most, and returns whether it has. It may raise BrokenConnectionError.
        Raises LostRankError if a rank did not come within `timeout` seconds, has died, or is in another collective.
        """
        begun, now, is_shown = time.monotonic(), 0.0, False
        found: list[bool] = []
        limit = timeout + _SLACK
        while True:
            try:
                if has_ended(min(_SLICE, limit - now)):
                    if is_shown:
                        self._ask_store(lambda: self._whereabouts.tell(self._rank, ""))
                    return
            except BrokenConnectionError as error:
                now = time.monotonic() - begun
                timed_out = now >= timeout - min(_SLACK, timeout / 10)  # gloo's own clock has begun before this one
                reason = "" if timed_out else _short(str(error))
                self._raise(_Report(collective, now, "timeout" if timed_out else "connection"), timeout, reason)
            now = time.monotonic() - begun
            if now >= limit:
                self._raise(_Report(collective, now, "timeout"), timeout)
            self._ask_store(lambda: found.append(self._is_hopeless()))
            if not is_shown:
                self._ask_store(lambda: self._whereabouts.tell(self._rank, str(collective)))
                is_shown = True
            if any(found):
                self._raise(_Report(collective, time.monotonic() - begun, "others"), timeout)

    def _ask_store(self, action: Callable[[], object]) -> None:
        if self._store_answers:
            self._store_answers = _within(_STORE_LIMIT, action)

    def _is_hopeless(self) -> bool:
        """Returns True if another rank has given up, or waits in another collective of this number.

        Otherwise tells which one this rank has begun, unless a rank is further.
        """
        store, own = self._store(), self._begun
        if store.check([_LOST]):
            return True
        other = Collective(*json.loads(store.get(_AT))) if store.check([_AT]) else None
        if other is None or other.number < own.number:
            store.set(_AT, json.dumps(own))
            return False
        return other.number == own.number and (other.stage, other.in_backward) != (own.stage, own.in_backward)

    def _raise(self, own: _Report, timeout: float, reason: str = "") -> NoReturn:
        reports, elsewhere, grace = {self._rank: own}, dict[int, str](), min(timeout, _GRACE)
        if self._store_answers:
            limit = grace + 2 * _STORE_LIMIT
            self._store_answers = _within(limit, lambda: self._gather(reports, elsewhere, grace))
        known = self._store_answers
        self._message = message_of({**reports}, self.hosts, timeout, reason, elsewhere, store_answers=known)
        raise LostRankError(self._message) from None

    def _gather(self, reports: dict[int, _Report], elsewhere: dict[int, str], grace: float) -> None:
        """Writes this rank's report, and adds the others' reports as they come, and who waits in another group.

        Returns when the others have done so too: with its process, this rank may end the store.
        """
        store, end = self._store(), time.monotonic() + grace
        store.set(f"{_LOST}/{self._rank}", json.dumps(reports[self._rank]))
        store.set(_LOST, "")
        while True:
            for rank in range(self._size):
                if rank not in reports and store.check([f"{_LOST}/{rank}"]):
                    reports[rank] = _Report.from_json(store.get(f"{_LOST}/{rank}"))
            if len(reports) == self._size:
                break
            elsewhere.update(self._whereabouts.elsewhere(set(range(self._size)) - reports.keys()))
            if len(reports.keys() | elsewhere) == self._size or time.monotonic() > end:
                break
            time.sleep(_POLL)
        store.add(f"{_LOST}/read", 1)
        end = time.monotonic() + _STORE_LIMIT
        while store.add(f"{_LOST}/read", 0) < len(reports) and time.monotonic() < end:
            time.sleep(_POLL)


def message_of(
    reports: dict[int, _Report],
    hosts: HostLayout,
    timeout: float,
    reason: str,
    elsewhere: Mapping[int, str] = MappingProxyType({}),
    *,
    store_answers: bool,
) -> str:
    """Returns the error message, of at most five lines.

    reports: by rank. hosts: of all ranks. reason: torch's words. elsewhere: where ranks wait, by rank, that wait in
    other groups. store_answers: False if the store broke, or its host has stopped.
    """
    missing = [rank for rank in range(len(hosts.hosts_S)) if rank not in reports]
    first = min(report.collective for report in reports.values())
    timed_out = any(report.cause == "timeout" for report in reports.values())
    # The rank that hosts the store may raise and end before the others, but not before it has reported.
    is_known = store_answers or len(reports) > 1 or len(missing) == 1
    waiting = [
        f"{ranks_in_words(ranks)} waited in {place} (collective {place.number})" for place, ranks in _by_place(reports)
    ]
    away = [f"rank {rank} waited in {elsewhere[rank]}" for rank in missing if rank in elsewhere]
    fix = "this process group is of no more use: start all ranks again"
    if missing:
        who = ranks_in_words(missing) if is_known else "a rank"
        place = hosts.place_of(missing)
        ended = "its process" if len(missing) == 1 or not is_known else "one of their processes"
        cause = f"within {timeout:g} s: it died, it is stuck, or it is slower than that"
        cause = cause if timed_out else f"because {ended} has ended"
        lines = [
            f"{who} of the EP group{place if is_known else ''} did not come to {first} {cause}",
            "; ".join(waiting),
        ]
        if not is_known:
            lines[1] = (
                f"the store of the process group does not answer, so it may be any of {ranks_in_words(missing)}"
                f"{place}: most likely the one that hosts the store, usually rank 0"
            )
        if len(away) == len(missing):
            lines = [f"{who} of the EP group{place} did not come to {first}: {'; '.join(away)}", "; ".join(waiting)]
            fix = f"use all groups, and run backwards of their layers, in the same order on every rank; {fix}"
        else:
            lines[1] = "; ".join([lines[1], *away])
            fix = f"look at the log of {ranks_in_words(missing)} first, or raise transport.timeout; {fix}"
    elif len(waiting) > 1:
        lines = [f"the ranks of the EP group were in different collectives: {'; '.join(waiting)}"]
        fix = f"call the layers, and their backwards, equally often and in the same order on every rank; {fix}"
    elif timed_out:
        longest = max(report.waited for report in reports.values())
        late = [rank for rank, report in reports.items() if report.waited < longest - timeout / 2]
        lines = [f"{first} of the EP group took longer than {timeout:g} s, though every rank came"]
        if late:
            lines = [f"{ranks_in_words(late)} of the EP group came too late to {first}: the limit is {timeout:g} s"]
        fix = f"look for what took so long, or raise transport.timeout; {fix}"
    else:
        lines = [f"the connections of the EP group broke in {first}, to which every rank came"]
    return "\n".join([*lines, *([f"torch says: {reason}"] if reason else []), fix])


def _short(reason: str) -> str:
    """Returns the first sentence of gloo, without its file and line."""
    return re.sub(r"^\[\S+:\d+\] ", "", reason.partition("\n")[0]).partition(". ")[0][:_MAX_REASON]


def _by_place(reports: dict[int, _Report]) -> list[tuple[Collective, list[int]]]:
    places: dict[Collective, list[int]] = {}
    for rank, report in sorted(reports.items()):
        places.setdefault(report.collective, []).append(rank)
    return sorted(places.items())


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Returns "rank 1", or "ranks 0, 1 and 3"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _within(seconds: float, action: Callable[[], object]) -> bool:
    """Returns True if `action` ended in time, without an error. A thread is left behind if it did not.

    If the host of a store has stopped, a call of the store returns no sooner than the host goes on.
    """
    ended: list[bool] = []

    def run() -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 - a broken store, or one of a group that was destroyed
            return
        ended.append(True)

    thread = threading.Thread(target=run, daemon=True, name="sonic_ep-store")
    thread.start()
    thread.join(seconds)
    return bool(ended)


def in_backward() -> bool:
    """Returns True within a backward of autograd."""
    return torch._C._current_graph_task_id() != -1


def work_has_ended(work: dist.Work) -> Callable[[float], bool]:
    """Returns the `has_ended` of gloo's work."""

    def has_ended(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # returns at once. The work may have ended after the wait above gave up
            except RuntimeError as error:
                raise BrokenConnectionError(str(error)) from None
        return True

    return has_ended


def polled(is_ready: Callable[[], bool]) -> Callable[[float], bool]:
    """Returns the `has_ended` of something that can only be asked."""

    def has_ended(seconds: float) -> bool:
        now = time.monotonic()
        end, pause = now + seconds, now + _SPIN
        while not is_ready():
            now = time.monotonic()
            if now > end:
                return False
            if now > pause:
                time.sleep(0)  # lets other threads run. It takes 0.05 ms or more, in which the device may get idle
                pause = time.monotonic() + _SPIN
        return True

    return has_ended
