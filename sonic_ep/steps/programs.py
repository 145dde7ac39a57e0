"""The programs (kernels/program/) of a step: one for forward, and one for backward.

The code of a step is traced once for each kind of step. The programs then run for every length.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar, cast, final

import torch
from torch import Tensor

from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.program.mailbox import Mailbox
from sonic_ep.kernels.program.native import launcher
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.sizes import Number
from sonic_ep.kernels.program.trace import Shape, Slot, Trace
from sonic_ep.transports import GroupTransport

_LOG = logging.getLogger("sonic_ep.launches")
Kind = TypeVar("Kind")
USUAL_TOKENS = 8192
Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The EP group of a step of several ranks. symmetric: what `transport` has chosen, or None for one that needs its
    sizes on the host. is_static: see LayerTransport.

    layer: the number of the layer. mailbox: to which a run brings the sizes of the step, if it exchanges counts.
    """

    group: EPGroup
    transport: GroupTransport
    symmetric: SymmetricTransport | None
    is_static: bool = False
    layer: int = 0
    mailbox: Mailbox | None = None

    def same_as(self, other: "Ranks") -> bool:
        """Returns True if all fields are the same objects."""
        return all(getattr(self, name) is getattr(other, name) for name in self.__slots__)


class Programs(NamedTuple):
    """The passes of a step. backward: by which gradients it gets or adds to. generation: of the buffers whose addresses
    they know. saved_inputs: the numbers of forward's inputs that backward needs besides x and weights.
    num_lists: how many of the later tensors backward does not need, the last ones.
    """

    forward: Program
    backward: dict[object, Program]
    generation: int
    saved_inputs: tuple[int, ...] = ()
    num_lists: int = 0

    def lists(self, later: list[Tensor], sizes: Sizes) -> list[Tensor]:
        """Returns the later tensors that backward does not need, from what a run returned behind its outputs."""
        own = iter(later)
        found = [
            next(own) if start is None else self.forward.part_of_block(number, later[-1], sizes)
            for number, start in enumerate(self.forward.in_block)
        ]
        return found[len(found) - self.num_lists :]

    def saved(self, later: list[Tensor]) -> list[Tensor]:
        """Returns what backward needs of them."""
        in_block = self.forward.in_block
        num_own, num_saved = in_block.count(None), in_block[: len(in_block) - self.num_lists].count(None)
        return later if num_saved == num_own else [*later[:num_saved], *later[num_own:]]


class Later(NamedTuple):
    """A tensor that forward leaves for backward. first_byte: in the block that small ones share; None if it has a
    tensor of its own."""

    shape: Shape
    dtype: torch.dtype
    strides: Shape
    first_byte: Number | None

    @classmethod
    def of(cls, slots: Sequence[Slot], program: Program) -> list[Self]:
        """Returns one for each of the later slots of a program."""
        pairs = zip(slots, program.in_block, strict=True)
        return [cls(slot.shape, slot.dtype, slot.strides, start) for slot, start in pairs]

    @staticmethod
    def inputs(trace: Trace, later: "list[Later]") -> tuple[list[Slot], list[Slot]]:
        """Returns a slot for each, and those that a run of backward is given: tensors of their own, then the block."""
        own = [trace.input(each.shape, each.dtype, each.strides) for each in later if each.first_byte is None]
        left, given = [*own], own
        if len(own) < len(later):
            given = [*own, block := trace.input((1,), torch.uint8)]
            return [
                left.pop(0)
                if each.first_byte is None
                else trace.part(block, each.first_byte, each.shape, each.dtype, each.strides)
                for each in later
            ], given
        return left, given


def may_run(values: Tensor) -> bool:
    """Returns True if there are values, on the current GPU, and nothing watches what the code does."""
    return (
        values.is_cuda
        and values.get_device() == torch.cuda.current_device()
        and values.numel() > 0
        and not torch.is_inference_mode_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def slots_of(tensors: Iterable[Tensor | Slot | None]) -> list[Slot]:
    """Returns what the code of a traced pass takes for tensors, without None."""
    return cast(list[Slot], [each for each in tensors if each is not None])


def numbers_of(inputs: Iterable[Tensor | Slot]) -> list[int]:
    """Returns the numbers of the tensors of inputs."""
    return [cast(int, slot.buffer.index) for slot in slots_of(inputs)]


@final
class StepPrograms(Generic[Kind]):
    """The programs of one layer, by kind of step. A copy starts without any.

    traced: returns the programs for a kind, which is hashable, and the sizes of a step.
    """

    def __init__(self, traced: Callable[[Kind, Sizes], Programs]) -> None:
        self._traced = traced
        self._programs: dict[Kind, list[Programs]] = {}
        self._failed: set[Kind] = set()
        self._last: tuple[Kind | None, Sizes, Programs | None] = None, (), None
        self._ranks: list[Ranks] = []
        self._generation = 0

    def __reduce__(self) -> tuple[type[Self], tuple[object]]:
        return type(self), (self._traced,)

    @property
    def num_programs(self) -> int:
        return sum(map(len, self._programs.values()))

    def known(self, ranks: Ranks) -> Ranks:
        """Returns the ranks of an earlier step if they are the same, for its kind: then it has programs already.

        Forgets programs that know the addresses of buffers which are no more.
        """
        if ranks.symmetric is not None and ranks.symmetric.generation != self._generation:
            self._programs, self._failed, self._last, self._ranks = {}, set(), (None, (), None), []
            self._generation = ranks.symmetric.generation
        same = next((each for each in self._ranks if each.same_as(ranks)), None)
        if same is None:
            self._ranks.append(ranks)
        return same or ranks

    def find(self, kind: Kind, sizes: Sizes) -> Programs | None:
        """Returns the programs of such a step, traced at the first one; None if they cannot be."""
        last_kind, last_sizes, programs = self._last
        if sizes == last_sizes and kind == last_kind:
            return programs
        known = self._programs.setdefault(kind, [])
        programs = next((each for each in known if each.forward.fits(*sizes)), None)
        if programs is None:
            if kind in self._failed:
                return None
            try:
                launcher()
                programs = self._traced(kind, sizes)
            except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):  # the code can still run
                _LOG.warning("a layer runs its code, because its steps cannot run as programs", exc_info=True)
                self._failed.add(kind)
                return None
            known.append(programs)
        self._last = kind, sizes, programs
        return programs
