"""Chooses the implementation of every operation, and logs why. No other module chooses.

An operation has a folder with a plain torch twin (reference.py) and a kernel (triton.py, or grouped_gemm.py for the
experts). The choice depends on device, dtype, shapes, configuration and installed packages, never on data.

Logger: "sonic_ep.kernels". The experts log once per configuration which implementation runs. Experts and router log a
warning, with the reason, when a GPU runs plain torch. Operations made by `op` need only Triton and log nothing.
"""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.common.compile_process import Gemms, start
from sonic_ep.kernels.dispatch.recv_index.reference import Chunks, PairBuffer, RankPlan
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.tile_table import ReserveFor
from sonic_ep.kernels.route.interface import RouterLinear, RouterOperations
from sonic_ep.kernels.route.rounding.reference import RoundingRule

# The packages that the GPU modules import. The extra "cuda" installs them.
CUDA_MODULES = ("quack", "cutlass", "triton")

_LOG = logging.getLogger("sonic_ep.kernels")
# Major compute capabilities whose tensor cores and shared memory fit the kernels: Hopper and Blackwell.
_MAJORS = (9, 10)
# The router's kernels unroll a loop over the K experts of a token.
_MAX_K = 16
# TMA moves at least 16 bytes, so the width of half-precision rows must be a multiple of 8.
COLUMN_MULTIPLE = 8
# Triton treats rows as aligned if their width is a multiple of this.
_ROW_MULTIPLE = 16

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(values: Tensor) -> bool:
    """Returns True if operations on this tensor run as Triton kernels: on a GPU, with Triton installed."""
    return values.is_cuda and _has_triton()


def allows_spare_capacity(values: Tensor) -> bool:
    """Returns True if index lists on this tensor's device may have spare capacity.

    They can then be allocated before the host knows their true sizes.
    """
    return runs_triton(values)


@functools.cache
def _implementation(folder: str, name: str, in_triton: bool) -> Callable[..., Any]:
    module = import_module(f"sonic_ep.kernels.{folder}.{'triton' if in_triton else 'reference'}")
    return getattr(module, name)


def op(folder: str, *, on: int = 0) -> Callable[[F], F]:
    """Decorates a signature and makes it an operation, which calls the function of that name in `folder`.

    The function is the one in triton.py if positional argument number `on` is on a GPU and Triton is installed, else
    its twin in reference.py. The twin's docstring is the contract.
    """

    def decorate(signature: F) -> F:
        name = signature.__name__

        @functools.wraps(signature)
        def run(*arguments: Any, **options: Any) -> Any:
            return _implementation(folder, name, runs_triton(arguments[on]))(*arguments, **options)

        return cast(F, run)

    return decorate


@op("route.select")
def chosen_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the (token, expert) pairs of plain top-K, by expert, then token."""
    ...


@op("route.select")
def start_selection(
    scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """Starts the selection of each expert's best tokens. Call the result with the counts to finish it."""
    ...


@op("route.rounding")
def apply_rule(
    chosen_SE: Tensor, tokens_S: Tensor, seed: Tensor, rule: RoundingRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds the counts of all ranks. Returns rows_SE, pairs_SE, cut_S and t."""
    ...


@op("route.status")
def pack_rank_status(
    counts_E: Tensor,
    num_tokens: int,
    status: int,
    order: int,
    *,
    bad_logits: Tensor | None = None,
    seed: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """Packs a rank's token count, status word, seed, order and expert counts for the all-gather before a step."""
    ...


@op("route.status")
def zero_counts_on_error(counts_SE: Tensor, header_SF: Tensor, healthy: int) -> Tensor:
    """Returns the counts, or zeros unless every rank's status word equals `healthy`, and all orders are the same."""
    ...


@op("dispatch.plan")
def rank_plan(rows_SE: Tensor, pairs_SE: Tensor, rank: int, tile_rows: int) -> RankPlan:
    """Returns one rank's part of the plan."""
    ...


@op("dispatch.plan", on=1)
def bounded_plan(plan: RankPlan, sizes: Tensor, tokens: int, rows: int, pairs: int, least: int = 0) -> RankPlan:
    """Returns the plan, or an empty plan if the true sizes do not fit (tokens, rows, pairs)."""
    ...


@op("dispatch.split_sizes")
def pack_split_sizes(tokens_S: Tensor, rows_SE: Tensor, pairs_SE: Tensor, status_SF: Tensor | None) -> Tensor:
    """Packs the split sizes and rank statuses that the host reads."""
    ...


@op("dispatch.send_index")
def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """Numbers the rows that this rank sends."""
    ...


@op("dispatch.send_index")
def is_token_in_rank(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """Marks which tokens each destination rank needs."""
    ...


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """Lists the rows that this rank sends, by destination rank and by token.

    Not made by `op`, because the first argument is not a tensor.
    """
    return _implementation("dispatch.send_index", "token_lists", runs_triton(sent.sent_before))(sent, num_sent)


@op("dispatch.recv_index", on=1)
def row_starts(chunks: Chunks, row_in_source_V: Tensor) -> Tensor:
    """Returns the first received row of each source rank."""
    ...


@op("dispatch.recv_index", on=1)
def pair_lists(
    chunks: Chunks, row_in_source_V: Tensor, weights_V: Tensor, row_starts_S: Tensor | None, num_rows: int
) -> PairBuffer:
    """Returns the index lists of a pair buffer."""
    ...


@op("combine.gather_sum")
def gather_sum(
    values_PH: Tensor,
    items: Tensor,
    starts: Tensor,
    weights_P: Tensor | None = None,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """Sums listed rows, with or without weights."""
    ...


@op("combine.scalars")
def values_of_pairs(
    parts_PZ: Tensor,
    slot_V: Tensor,
    num_pairs: Tensor,
    capacity: int,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """Sums the partial sums of each pair's scalar and orders the results as the pairs were received."""
    ...


@op("lora")
def add_hidden_grads(
    dh_PJ: Tensor, ds_PZ: Tensor, h_PJ: Tensor, da_PI: Tensor, weights_P: Tensor, activation: Activation
) -> None:
    """Adds to dH and dS what a low-rank update of W2 gives, in place."""
    ...


def router_operations(device: torch.device, dtype: torch.dtype, K: int) -> RouterOperations | None:
    """Returns the router's fused kernels, or None where the plain torch twins of kernels/route/ run under autograd.

    device, dtype: of the logits. None on the CPU, for logits that are not fp32, for K > 16, without Triton, and under
    torch.compile, which fuses the twins itself.
    """
    if torch.compiler.is_compiling() or device.type != "cuda" or dtype != torch.float32 or K > _MAX_K:
        return None
    return _router_on_gpu()


@functools.cache
def _router_on_gpu() -> RouterOperations | None:
    if not _has_triton():
        _LOG.warning("the router runs in plain torch, which is slow on a GPU: Triton is not installed")
        return None
    return cast(RouterOperations, import_module("sonic_ep.kernels.route.fused"))


def router_linear(x_TH: Tensor) -> RouterLinear | None:
    """Returns the router's linear layer on tensor cores, or None where a GEMM of torch runs.

    The kernels need at least one bf16 row, a width that is a multiple of 16, a Hopper or Blackwell GPU, and Triton.
    """
    if not x_TH.is_cuda or x_TH.dtype != torch.bfloat16 or x_TH.shape[0] == 0 or x_TH.shape[1] % _ROW_MULTIPLE:
        return None
    return _router_linear_on_gpu(x_TH.device)


@functools.cache
def _router_linear_on_gpu(device: torch.device) -> RouterLinear | None:
    if torch.cuda.get_device_capability(device)[0] not in _MAJORS or not _has_triton():
        return None
    return cast(RouterLinear, import_module("sonic_ep.kernels.route.linear.triton"))


class SymmetricKernels(Protocol):
    """The kernels that write into the symmetric memory of other ranks; see kernels/dispatch/symmetric/."""

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
def symmetric_kernels() -> SymmetricKernels:
    """Returns the symmetric-memory kernels. They have no twin: plain torch cannot write into a peer's memory."""
    return cast(SymmetricKernels, import_module("sonic_ep.kernels.dispatch.symmetric.operations"))


class Operations(Protocol):
    """The operations on experts. The docstrings of kernels/experts/reference.py are the contract."""

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

    def accumulate_product(
        self, out_PN: Tensor, rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor
    ) -> None: ...

    def accumulate_up_projection(
        self, h_PJ: Tensor, rows_PK: Tensor, weights_eKJ: Tensor, expert_starts_e: Tensor, activation: Activation
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
        *,
        reserve_for: ReserveFor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def up_projection_backward(
        self,
        dh_PJ: Tensor,
        w1: Tensor,
        expert_starts_e: Tensor,
        up_eIH: Tensor | None = None,
        *,
        tile_aligned: bool = False,
        reserve_for: ReserveFor | None = None,
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
        reserve_for: ReserveFor | None = None,
    ) -> Tensor: ...

    def bias_grad(self, values_PB: Tensor, expert_starts_e: Tensor) -> Tensor: ...

    def gathered_bias_grad(
        self, do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor
    ) -> Tensor: ...


def operations_for(x_RH: Tensor, w2_eHI: Tensor, activation: Activation) -> Operations:
    """Returns the implementation for rows with the device and dtype of x_RH and experts with the shape of w2_eHI."""
    if not x_RH.is_cuda:
        return reference
    H, I = w2_eHI.shape[1:]  # noqa: E741
    return _on_gpu(x_RH.device, x_RH.dtype, H % COLUMN_MULTIPLE == 0 and I % COLUMN_MULTIPLE == 0, activation.name)


def start_compiling(
    w2: Tensor,
    activation: str,
    *,
    bias: bool,
    split_gate_up: bool = False,
    accumulate: bool = False,
    transposed: bool = False,
    ranks: tuple[int, int] = (0, 0),
) -> None:
    """Starts to compile the experts' kernels in other processes, unless they are cached. Returns at once.

    w2: (e, H, I), or (e, I, H) if transposed. The kernels are those for its device and dtype, see `Gemms`. To be called
    as early as these are known: the first launch of a kernel waits for it. It does nothing where no such kernels run,
    or if it was called before.
    """
    if w2.is_cuda and torch.cuda.is_initialized():  # a fake tensor may be on a GPU that is not there
        d, n = w2.shape[:0:-1] if transposed else w2.shape[1:]
        dtype = str(w2.dtype).removeprefix("torch.")
        gemms = Gemms(d, n, activation, dtype, bias, split_gate_up, accumulate, transposed, ranks)
        _start_compiling(w2.device, gemms)


@functools.cache
def _start_compiling(device: torch.device, gemms: Gemms) -> None:
    aligned = gemms.d % COLUMN_MULTIPLE == 0 and gemms.n % COLUMN_MULTIPLE == 0
    if _problem_before_import(device, getattr(torch, gemms.dtype), aligned) is None:
        start(gemms, torch.cuda.get_device_capability(device))


@functools.cache
def _on_gpu(device: torch.device, dtype: torch.dtype, aligned: bool, activation: str) -> Operations:
    reason = problem_with_expert_kernels(device, dtype, aligned, activation)
    if reason is None:
        name = torch.cuda.get_device_name(device)
        _LOG.info("experts run on quack's grouped GEMMs (%s, %s, %s)", name, dtype, activation)
        return cast(Operations, import_module("sonic_ep.kernels.experts.grouped_gemm"))
    _LOG.warning("experts run on the plain torch reference, which is slow on a GPU: %s", reason)
    return reference


def problem_with_expert_kernels(device: torch.device, dtype: torch.dtype, aligned: bool, activation: str) -> str | None:
    """Returns the reason why the experts' GPU kernels cannot run on this GPU, or None if they can.

    aligned: whether hidden size and expert width are multiples of COLUMN_MULTIPLE.
    """
    if problem := _problem_before_import(device, dtype, aligned):
        return problem
    if activation not in import_module("sonic_ep.kernels.experts.grouped_gemm").ACTIVATION_NAMES:
        return f"activation {activation} has no kernel yet"
    return None


def _problem_before_import(device: torch.device, dtype: torch.dtype, aligned: bool) -> str | None:
    """Returns the same reasons as `problem_with_expert_kernels`, as far as it takes no import of the kernels."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _MAJORS:
        return f"compute capability {major}.{minor} has no kernels here; 9.x (Hopper) and 10.x (Blackwell) do"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels compute in bfloat16 and float16, the rows are {dtype}"
    if not aligned:
        return f"hidden size and expert width must be multiples of {COLUMN_MULTIPLE}"
    if missing := missing_extra("cuda", *CUDA_MODULES):
        return missing
    return import_module("sonic_ep.kernels.common.versions").problem_with_versions()
