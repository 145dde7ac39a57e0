"""Kernels in place of ours, for benchmarks that race them in one process.

WITHOUT: ours without one of the changes to quack's kernels in docs/gpu_kernels.md, "What differs from quack's kernels",
by the change.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from cutlass import Int32
from torch import Tensor

from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.kernels.experts import grouped_gemm as operations
from sonic_ep.kernels.experts.quack_compat import EpiMod, GemmDefaultSm90, GemmSm90
from sonic_ep.kernels.experts.sm90 import varlen_m, wgrad
from sonic_ep.kernels.experts.sm90.epilogue import OneBarrierEpilogue
from sonic_ep.kernels.experts.sm90.row_gemm import HopperMod
from sonic_ep.kernels.experts.sm90.tile_prefetch import fetch_next_tile

OURS = "ours"
Kernels = Callable[[], AbstractContextManager[None]]


def within(kernels: Kernels, call: Callable[[], object]) -> Callable[[], None]:
    """Returns a call with these kernels."""

    def run() -> None:
        with kernels():
            call()

    return run


def with_kernels(**parts: object) -> Kernels:
    """Returns what makes a context in which grouped_gemm.py has these parts, and kernels of its own, which it keeps.

    A program launches the kernels of its trace, wherever it runs.
    """
    tile = operations._down_backward_tile.__wrapped__  # without its cache
    own = {"_LAUNCHERS": {}, "_WEIGHT_GEMMS": {}, "_down_backward_tile": tile, **parts}
    return lambda: replaced(operations, **own)


def _zeroed(like: Tensor, **_: bool) -> Tensor:
    return like.new_zeros(2, dtype=torch.int32)


# quack's own kernels, which compute every tile of rows whole, and do not return their counter to zero.
whole_tiles = with_kernels(hopper_mod=lambda mod: mod, tile_counter=_zeroed)


class _Ours(OneBarrierEpilogue, varlen_m.SkipsMissingRows):
    pass


class _FetchesLast(_Ours):
    def load_AB_gather_A(
        self, pipeline: Any, state: Any, copy_A: Any, _: Any, copy_B: Any, k_tiles: Any, **__: Any
    ) -> Any:
        state = self.load_part(pipeline, state, copy_A, copy_B, k_tiles, Int32(0), k_tiles, True)
        fetch_next_tile(self, k_tiles.scheduler)  # type: ignore[arg-type]
        return state

    def load_tma(self, pipeline: Any, state: Any, copies: Any, k_tiles: Any, **_: Any) -> Any:
        state = GemmSm90.load_tma(self, pipeline, state, copies, k_tiles)
        fetch_next_tile(self, k_tiles.scheduler)  # type: ignore[arg-type]
        return state


class _LoadsMissingRows(_Ours):
    """The expert's last row in place of a missing one, where quack takes the first of all rows."""

    def load_part(self, pipeline: Any, state: Any, copy_A: Any, copy_B: Any, _: Any, *bounds: Any) -> Any:
        return self.load_k_tiles(pipeline, state, copy_A[0], copy_B, *bounds)


class _QuacksLoads(_LoadsMissingRows):
    """Its addresses are computed anew for each K tile, and missing rows are the first of all."""

    def _make_gather_A_copy(self, *arguments: Any) -> Any:
        copy, _ = GemmSm90._make_gather_A_copy(self, *arguments)
        return (copy, copy), None


class _MultipliesMissingRows(_Ours):
    def _multiply(self, pipeline: Any, state: Any, mma_fn: Any, acc: Any, k_tiles: Any, group: Any, *_: Any) -> Any:
        return GemmSm90.mma(self, pipeline, state, mma_fn, acc, None, k_tiles, group)


class _MayHaveNoK(_Ours):
    def mma(self, *arguments: Any) -> Any:
        with replaced(varlen_m.cutlass, max=lambda k_tiles, _: k_tiles):
            return varlen_m.SkipsMissingRows.mma(self, *arguments)


class _QuacksRegisters(_Ours):
    def _compute_tile_shape_or_override(self, *arguments: Any, **named: Any) -> Any:
        return GemmSm90._compute_tile_shape_or_override(*arguments, **named)


class _QuacksEpilogue(varlen_m.SkipsMissingRows):
    pass


class _WeightsFetchLast(wgrad._PrefetchesIndices):
    def load_AB_gather_A(self, *arguments: Any, **options: Any) -> Any:
        with replaced(wgrad, fetch_next_tile=lambda *_: None):
            state = wgrad._PrefetchesIndices.load_AB_gather_A(self, *arguments, **options)
        fetch_next_tile(self, arguments[5].scheduler)
        return state


def _rows(overrides: type) -> Kernels:
    @cache
    def mod_of(mod: EpiMod) -> HopperMod:
        return HopperMod(mod, overrides, overrides.__name__)

    return with_kernels(hopper_mod=mod_of)


def _weights(kernel: type, outer: Kernels) -> Kernels:
    @contextmanager
    def context() -> Iterator[None]:
        key = f"{kernel.__name__} {wgrad.sources_of(wgrad.__name__)}"
        with outer(), replaced(wgrad, _KERNELS={9: kernel}, sources_of=lambda _: key):
            yield

    return context


WITHOUT: dict[str, Kernels] = {
    OURS: with_kernels(),
    "missing rows are not loaded": _rows(_LoadsMissingRows),
    "and addresses are stepped": _rows(_QuacksLoads),
    "missing rows are not multiplied": _rows(_MultipliesMissingRows),
    "the next tile is fetched early": _rows(_FetchesLast),
    "the counter resets itself": with_kernels(tile_counter=_zeroed),
    "one barrier in the epilogue": _rows(_QuacksEpilogue),
    "the loop over K is not empty": _rows(_MayHaveNoK),
    "registers of dgated": _rows(_QuacksRegisters),
    "indices of weight gradients are read early": _weights(GemmDefaultSm90, with_kernels()),
    "tiles of weight gradients are fetched early": _weights(_WeightsFetchLast, with_kernels()),
    "all of them": _weights(GemmDefaultSm90, whole_tiles),
}
