"""`GivenRouting`: the experts that a caller gives to tokens, and the tokens that are padding. `record_routing` records
the experts that routers chose.

Padding takes no part in a step. The layer computes the other rows alone, so that routing, counts, losses, rounding and
dispatch never see it. So T is the number of the other tokens here.

Legend: O tokens with padding, T tokens on this rank, E experts, K experts per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.checks import ID_DTYPES, problem_with_tensor

UNSET = -1  # in place of an expert id: of a token that is padding
NOT_ROUNDED = "rounding.mode=%r has no effect in steps with routed_experts"


@dataclass(frozen=True, slots=True)
class GivenRouting:
    """Experts and padding that a caller gives for the tokens of one call, from the arguments of `MoE.forward`.

    routed_experts: (O, K) or (B, L, K) integers, each token's experts in place of the router's top-K, as
    `record_routing` returns them; -1 in place of each for padding. The weights come from the scores of this
    call, so the router gets gradients. Nothing is rounded.
    padding_mask: (O,) or (B, L) bool, True for padding. y is 0 there, and stats have the other tokens alone.
    With either the host waits for the device, and torch.compile breaks its graph.

    shape: of the tokens with padding. rows_T: int64, the tokens that are no padding, ascending; None without padding.
    expert_ids_TK: int64, their experts, or for several layers (T, layers, K); None where the router chooses. problem:
    of this rank with the arguments, or None; with one nothing is given.
    """

    shape: torch.Size = torch.Size()
    rows_T: Tensor | None = None
    expert_ids_TK: Tensor | None = None
    problem: str | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        routed_experts: Tensor | None,
        padding_mask: Tensor | None,
        *,
        E: int,
        K: int,
        layers: tuple[int, ...] = (),
        ragged: bool = True,
    ) -> Self:
        """Returns what the arguments give for x, (O, d) or (B, L, d).

        layers: the number of them, if routed_experts is of several: (..., layers, K). ragged: False if the balance loss
        compares sequences, which padding would give different lengths.
        """
        shape = x.shape[:-1]
        problem = _problem_with("routed_experts", routed_experts, ID_DTYPES, (*shape, *layers, K))
        problem = problem or _problem_with("padding_mask", padding_mask, (torch.bool,), shape)
        if problem is None and (x.is_meta or not host_may_wait(x)):
            problem = (
                "routed_experts and padding_mask are read on the host, which neither a CUDA graph nor the meta device "
                "allows; call the layer without them there"
            )
        if problem is not None:
            return cls(shape, problem=problem)
        is_padding_O, ids_OK = torch.zeros(shape.numel(), dtype=torch.bool, device=x.device), None
        if padding_mask is not None:
            is_padding_O = padding_mask.reshape(-1).to(x.device)
        if routed_experts is not None:
            ids_OK = routed_experts.reshape(-1, *layers, K).to(x.device, torch.int64)
            is_padding_O = is_padding_O | (ids_OK == UNSET).flatten(1).all(1)
        T, *faults = torch.stack([(~is_padding_O).sum(), *_faults(ids_OK, is_padding_O, E)]).tolist()
        if any(faults):
            return cls(shape, problem=_described(faults, E, K))
        if not ragged and (padding_mask is not None or T < shape.numel()):
            return cls(
                shape,
                problem="router.balance='sequence' compares sequences of one length, and padding makes them differ; "
                "set router.balance='global' or 'batch'",
            )
        if shape.numel() == T:
            return cls(shape, None, ids_OK)
        rows_T = is_padding_O.to(torch.uint8).argsort(stable=True)[:T]
        return cls(shape, rows_T, None if ids_OK is None else ids_OK.index_select(0, rows_T))

    def of_layer(self, layer: int) -> Self:
        """Returns what is given for one of several layers."""
        ids = self.expert_ids_TK
        return self if ids is None else replace(self, expert_ids_TK=ids[:, layer])

    def take(self, values: Tensor) -> Tensor:
        """Returns the rows of (O, ...) that are no padding: (T, ...)."""
        return values if self.rows_T is None else values.index_select(0, self.rows_T)

    def put(self, values: Tensor, padding: float = 0) -> Tensor:
        """Returns (O, ...) with these (T, ...) rows, and `padding` in the others. Differentiable."""
        if self.rows_T is None:
            return values
        filled = values.new_full((self.shape.numel(), *values.shape[1:]), padding)
        return filled.index_copy(0, self.rows_T, values)


NOTHING_GIVEN = GivenRouting()


def _problem_with(name: str, values: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> str | None:
    if values is None:
        return None
    if (problem := problem_with_tensor(name, values)) is not None:
        return problem
    assert isinstance(values, Tensor)
    if values.dtype not in dtypes:
        return f"{name} has dtype {values.dtype}, wanted {', '.join(map(str, dtypes))}"
    if values.shape != shape:
        return f"{name} has shape {tuple(values.shape)}, wanted {tuple(shape)} for this x"
    return f"{name} has no values on the meta device; give real ones" if values.is_meta else None


def _faults(ids_OK: Tensor | None, is_padding_O: Tensor, E: int) -> list[Tensor]:
    """Returns how many tokens that are no padding have ids out of range, -1 beside experts, and an expert twice."""
    if ids_OK is None:
        return []
    is_unset_OK, ordered_OK = ids_OK == UNSET, ids_OK.sort(-1).values
    is_outside_OK = (ids_OK < UNSET) | (ids_OK >= E)
    is_repeated_OK = (ordered_OK[..., 1:] == ordered_OK[..., :-1]) & (ordered_OK[..., 1:] != UNSET)
    return [
        (each_OK.flatten(1).any(1) & ~is_padding_O).sum() for each_OK in (is_outside_OK, is_unset_OK, is_repeated_OK)
    ]


def _described(faults: list[int], E: int, K: int) -> str:
    outside, unset, repeated = faults
    if outside:
        return (
            f"routed_experts gives {outside} tokens ids out of range; allowed are 0..{E - 1}, and {UNSET} for padding"
        )
    if unset:
        return (
            f"routed_experts gives {unset} tokens fewer than K={K} experts; a token has K experts, or is padding and "
            f"has {UNSET} alone"
        )
    return f"routed_experts gives {repeated} tokens an expert twice; the K={K} experts of a token are distinct"


@final
class RoutingRecord:
    """The experts that routers chose, by module, in the order of the calls."""

    def __init__(self) -> None:
        self._experts: dict[int, list[Tensor]] = {}

    def add(self, module: object, routed_experts: Tensor) -> None:
        """Adds what a module's router chose in one call."""
        self._experts.setdefault(id(module), []).append(routed_experts)

    def of(self, module: object) -> list[Tensor]:
        """Returns the `routed_experts` of each call of a module: int64, (T, K) or (B, L, K), -1 for padding.

        Raises RuntimeError if there was no call.
        """
        if id(module) not in self._experts:
            raise RuntimeError(
                f"this {type(module).__name__} recorded no routing; call it, uncompiled, inside of record_routing()"
            )
        return [*self._experts[id(module)]]


_RECORDS: ContextVar[tuple[RoutingRecord, ...]] = ContextVar("sonic_ep_records", default=())


@contextmanager
def record_routing() -> Iterator[RoutingRecord]:
    """A context that records which experts the layers choose for each token, before rounding.

    Give them as `routed_experts` to compute with the same experts again. A recomputation in backward records nothing.

    Example: with sonic_ep.record_routing() as record:
                 layer(x)
             layer(x, routed_experts=record.of(layer)[0])
    """
    record = RoutingRecord()
    token = _RECORDS.set((*_RECORDS.get(), record))
    try:
        yield record
    finally:
        _RECORDS.reset(token)


def recording() -> bool:
    """Returns True inside of `record_routing`, but not in a compiled graph."""
    return not torch.compiler.is_dynamo_compiling() and bool(_RECORDS.get())


def add_to_records(module: object, expert_ids_TK: Tensor, shape: torch.Size, given: GivenRouting) -> None:
    """Adds the experts of one call of a module to all records. shape: of its tokens with padding."""
    records = _RECORDS.get()
    if not records or torch._C._current_graph_task_id() != -1:
        return
    routed_experts = given.put(expert_ids_TK, UNSET).view(*shape, -1)
    for record in records:
        record.add(module, routed_experts)
