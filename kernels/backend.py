"""Which implementation runs: the GPU's where it can, else the reference, with one log line that says which and why.

The choice depends on device, dtype, row width and installed packages, never on data. Logger: "sonic_ep.kernels". Index
lists and `gather_sum` need Triton alone, and say nothing.
"""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.dispatch.recv_index.reference import Chunks, PairBuffer, RankPlan
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.route.interface import RouterLinear, RouterOperations
from sonic_ep.kernels.route.rounding.interface import RoundingKernel

# What the GPU's modules import; the extra "cuda" installs them.
CUDA_MODULES = ("quack", "cutlass", "triton")

_LOG = logging.getLogger("sonic_ep.kernels")
# Major compute capabilities with tensor cores and shared memory as the kernels want them: Hopper and Blackwell.
_MAJORS = (9, 10)
# The router's kernels unroll a loop over a token's experts.
_MAX_K = 16
# TMA moves 16 bytes at least: rows of half-precision values must be multiples of 8 wide.
COLUMN_MULTIPLE = 8
# Triton takes rows for aligned if they are a multiple of this wide.
_ROW_MULTIPLE = 16


class Operations(Protocol):
    """The operations of kernels/experts/reference.py, whose docstrings are the contract."""

    def up_projection(
        self,
        x_RH: Tensor,
        w1: Tensor,
        b1_eJ: Tensor | None,
        row_of_pair_P: Tensor,
        expert_starts_e: Tensor,
        activation: Activation,
        up_eIH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def down_projection(
        self, a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
    ) -> Tensor: ...

    def down_projection_backward(
        self,
        do_RH: Tensor,
        w2_eHI: Tensor,
        b2_eH: Tensor | None,
        h_PJ: Tensor,
        weights_P: Tensor,
        row_of_pair_P: Tensor,
        expert_starts_e: Tensor,
        activation: Activation,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def up_projection_backward(
        self,
        dh_PJ: Tensor,
        w1: Tensor,
        expert_starts_e: Tensor,
        up_eIH: Tensor | None = None,
        *,
        tile_aligned: bool = False,
    ) -> Tensor: ...

    def weight_grad(
        self,
        left_PA: Tensor,
        right_RB: Tensor,
        row_of_pair_P: Tensor,
        expert_starts_e: Tensor,
        *,
        transposed: bool = False,
        split_gate_up: bool = False,
        out_eAB: Tensor | None = None,
        reserve_sms: bool = False,
    ) -> Tensor: ...

    def bias_grad(self, values_PB: Tensor, expert_starts_e: Tensor) -> Tensor: ...

    def gathered_bias_grad(
        self, do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor
    ) -> Tensor: ...


def operations_for(x_RH: Tensor, w2_eHI: Tensor, activation: Activation) -> Operations:
    """The operations for rows like x_RH and experts like w2_eHI."""
    if not x_RH.is_cuda:
        return reference
    H, I = w2_eHI.shape[1:]  # noqa: E741
    return _on_gpu(x_RH.device, x_RH.dtype, H % COLUMN_MULTIPLE == 0 and I % COLUMN_MULTIPLE == 0, activation.name)


def gather_sum(
    values_PH: Tensor,
    items: Tensor,
    starts: Tensor,
    weights_P: Tensor | None = None,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """`gather_sum` of kernels/experts/reference.py, by the GPU kernel where Triton is installed."""
    chosen = _gather_sum_on_gpu() if values_PH.is_cuda else reference.gather_sum
    return chosen(values_PH, items, starts, weights_P, into=into, overlap_previous=overlap_previous)


@functools.cache
def _gather_sum_on_gpu() -> Callable[..., Tensor]:
    if not _has_triton():
        return reference.gather_sum
    return import_module("sonic_ep.kernels.combine.gather_sum.triton").gather_sum


def row_starts(chunks: Chunks, row_in_source_V: Tensor) -> Tensor:
    """`row_starts` of kernels/dispatch/recv_index/reference.py, by the GPU kernel where Triton is installed."""
    return _lists("dispatch.recv_index", row_in_source_V.is_cuda).row_starts(chunks, row_in_source_V)


def pair_lists(
    chunks: Chunks, row_in_source_V: Tensor, weights_V: Tensor, row_starts_S: Tensor | None, num_rows: int
) -> PairBuffer:
    """`pair_lists` of kernels/dispatch/recv_index/reference.py, likewise."""
    module = _lists("dispatch.recv_index", weights_V.is_cuda)
    return module.pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, num_rows)


def values_of_pairs(
    parts_PZ: Tensor,
    slot_V: Tensor,
    num_pairs: Tensor,
    capacity: int,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """`values_of_pairs` of kernels/dispatch/recv_index/reference.py, likewise."""
    module = _lists("dispatch.recv_index", parts_PZ.is_cuda)
    return module.values_of_pairs(parts_PZ, slot_V, num_pairs, capacity, into=into, overlap_previous=overlap_previous)


def allows_spare_capacity(device: torch.device) -> bool:
    """May lists be longer than what they hold? Then they can be made before the host knows their sizes."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """`sent_rows` of kernels/dispatch/send_index/reference.py, likewise."""
    return _lists("dispatch.send_index", token_ids_N.is_cuda).sent_rows(token_ids_N, pair_starts_Q, num_tokens)


def is_token_in_rank(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """`is_token_in_rank` of kernels/dispatch/send_index/reference.py, likewise."""
    return _lists("dispatch.send_index", token_ids_N.is_cuda).is_token_in_rank(token_ids_N, pair_starts_Q, num_tokens)


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """`token_lists` of kernels/dispatch/send_index/reference.py, likewise."""
    return _lists("dispatch.send_index", sent.sent_before.is_cuda).token_lists(sent, num_sent)


def pack_split_sizes(tokens_S: Tensor, rows_SE: Tensor, pairs_SE: Tensor, status_SF: Tensor | None) -> Tensor:
    """`pack_split_sizes` of kernels/dispatch/split_sizes/reference.py, likewise."""
    return _lists("dispatch.split_sizes", rows_SE.is_cuda).pack_split_sizes(tokens_S, rows_SE, pairs_SE, status_SF)


def pack_rank_status(
    counts_E: Tensor, num_tokens: int, status: int, *, bad_logits: Tensor | None = None, seed: Tensor | None = None
) -> Tensor:
    """`pack_rank_status` of kernels/route/status/reference.py, likewise."""
    module = _lists("route.status", counts_E.is_cuda)
    return module.pack_rank_status(counts_E, num_tokens, status, bad_logits=bad_logits, seed=seed)


def zero_counts_on_error(counts_SE: Tensor, status_S: Tensor, healthy: int) -> None:
    """`zero_counts_on_error` of kernels/route/status/reference.py, likewise."""
    _lists("route.status", counts_SE.is_cuda).zero_counts_on_error(counts_SE, status_S, healthy)


@functools.cache
def _lists(operation: str, on_gpu: bool) -> Any:
    """The module of an operation's folder: plain torch, or the same functions in Triton."""
    return import_module(f"sonic_ep.kernels.{operation}.{'triton' if on_gpu and _has_triton() else 'reference'}")


def router_operations(logits_TE: Tensor, K: int) -> RouterOperations | None:
    """The router's fused kernels, or None where plain torch has to do: in a graph that is compiled, torch fuses it."""
    if torch.compiler.is_compiling() or not logits_TE.is_cuda or logits_TE.dtype != torch.float32 or K > _MAX_K:
        return None
    return _router_on_gpu()


@functools.cache
def _router_on_gpu() -> RouterOperations | None:
    if not _has_triton():
        _LOG.warning("the router runs in plain torch, which is slow on a GPU: Triton is not installed")
        return None
    return cast(RouterOperations, import_module("sonic_ep.kernels.route.fused"))


def router_linear(x_TH: Tensor) -> RouterLinear | None:
    """The router's linear layer on tensor cores, or None where fp32 arithmetic has to do."""
    if not x_TH.is_cuda or x_TH.dtype != torch.bfloat16 or x_TH.shape[0] == 0 or x_TH.shape[1] % _ROW_MULTIPLE:
        return None
    return _router_linear_on_gpu(x_TH.device)


@functools.cache
def _router_linear_on_gpu(device: torch.device) -> RouterLinear | None:
    if torch.cuda.get_device_capability(device)[0] not in _MAJORS or not _has_triton():
        return None
    return cast(RouterLinear, import_module("sonic_ep.kernels.route.linear.triton"))


class PlanKernel(Protocol):
    """One rank's part of the plan, with the contracts of `plan_for` and `bounded_plan` of dispatch/{plan,room}.py."""

    def rank_plan(self, rows_SE: Tensor, pairs_SE: Tensor, rank: int, tile_rows: int) -> RankPlan: ...

    def bounded_plan(self, plan: RankPlan, sizes: Tensor, tokens: int, rows: int, pairs: int) -> RankPlan: ...


def plan_kernel(device: torch.device) -> PlanKernel | None:
    """The GPU's plan where Triton is installed; None where dispatch's plain torch must do."""
    return cast(PlanKernel, _lists("dispatch.plan", on_gpu=True)) if allows_spare_capacity(device) else None


def rounding_kernel(device: torch.device) -> RoundingKernel | None:
    """The GPU's rounding decision where Triton is installed; None where the router's plain torch must do."""
    return cast(RoundingKernel, _lists("route.rounding", on_gpu=True)) if allows_spare_capacity(device) else None


class PeerKernels(Protocol):
    """Kernels that write into the memory of other ranks; see kernels/dispatch/symmetric/."""

    NUM_SLOTS: int
    all_gather_start: Callable[..., None]
    all_gather_wait: Callable[..., Tensor]
    push_lists: Callable[..., None]
    push_scalars: Callable[..., None]
    push_rows: Callable[..., None]
    acquire_peers: Callable[..., None]
    release_peers: Callable[..., None]
    combine_push: Callable[..., None]
    combine_reduce: Callable[..., Tensor]
    collect_scalars: Callable[..., Tensor]


@functools.cache
def peer_kernels() -> PeerKernels:
    return cast(PeerKernels, import_module("sonic_ep.kernels.dispatch.symmetric.operations"))


class SelectKernels(Protocol):
    """The lists of a selection, with the contract of the functions of the same names in routers/select.py."""

    def chosen_pairs(self, topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def start_selection(
        self, scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
    ) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]: ...


def select_kernels(device: torch.device) -> SelectKernels | None:
    """The GPU's selection where Triton is installed; None where the router's plain torch must do."""
    return _select_on_gpu() if device.type == "cuda" else None


@functools.cache
def _select_on_gpu() -> SelectKernels | None:
    if not _has_triton():
        return None
    return cast(SelectKernels, import_module("sonic_ep.kernels.route.select.triton"))


@functools.cache
def _on_gpu(device: torch.device, dtype: torch.dtype, aligned: bool, activation: str) -> Operations:
    reason = _obstacle(device, dtype, aligned, activation)
    if reason is None:
        name = torch.cuda.get_device_name(device)
        _LOG.info("experts run on quack's grouped GEMMs (%s, %s, %s)", name, dtype, activation)
        return cast(Operations, import_module("sonic_ep.kernels.experts.grouped_gemm"))
    _LOG.warning("experts run on the plain torch reference, which is slow on a GPU: %s", reason)
    return reference


def _obstacle(device: torch.device, dtype: torch.dtype, aligned: bool, activation: str) -> str | None:
    """Why the GPU kernels cannot run, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _MAJORS:
        return f"compute capability {major}.{minor} has no kernels here; 9.x (Hopper) and 10.x (Blackwell) do"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels compute in bfloat16 and float16, the rows are {dtype}"
    if not aligned:
        return f"hidden size and expert width must be multiples of {COLUMN_MULTIPLE}"
    if lost_peer := missing_extra("cuda", *CUDA_MODULES):
        return lost_peer
    if wrong := import_module("sonic_ep.kernels.common.versions").problem_with_versions():
        return wrong
    if activation not in import_module("sonic_ep.kernels.experts.grouped_gemm").ACTIVATION_NAMES:
        return f"activation {activation} has no kernel yet"
    return None
