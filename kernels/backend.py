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
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.batch_invariant import experts as experts_in_blocks
from sonic_ep.kernels.combine.gather_sum import reference as sums
from sonic_ep.kernels.combine.scalars import reference as scalars
from sonic_ep.kernels.common.compile_process import Gemms, start
from sonic_ep.kernels.dispatch.gather_rows import reference as rows
from sonic_ep.kernels.dispatch.plan import reference as plan
from sonic_ep.kernels.dispatch.recv_index import reference as recv_index
from sonic_ep.kernels.dispatch.send_index import reference as send_index
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.kernels.dispatch.split_sizes import reference as split_sizes
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.lora import reference as lora
from sonic_ep.kernels.route.interface import RouterLinear, RouterOperations
from sonic_ep.kernels.route.rounding import reference as rounding
from sonic_ep.kernels.route.select import reference as select
from sonic_ep.kernels.route.status import reference as status
from sonic_ep.kernels.route.topk_pairs import reference as topk_pairs

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

Given = ParamSpec("Given")
Result = TypeVar("Result")


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
def _implementation(folder: str, name: str, in_triton: bool) -> Callable[..., object]:
    module = import_module(f"sonic_ep.kernels.{folder}.{'triton' if in_triton else 'reference'}")
    return getattr(module, name)


def op(twin: Callable[Given, Result], *, on: int = 0) -> Callable[Given, Result]:
    """Returns the operation of a function in a reference.py, whose signature and docstring are the contract.

    The operation calls the function of that name in the triton.py beside it if positional argument number `on` is on a
    GPU and Triton is installed, else the twin.
    """
    folder, name = twin.__module__.removeprefix("sonic_ep.kernels.").removesuffix(".reference"), twin.__name__

    @functools.wraps(twin)
    def run(*arguments: Given.args, **options: Given.kwargs) -> Result:
        return _implementation(folder, name, runs_triton(arguments[on]))(*arguments, **options)

    return run


chosen_pairs = op(select.chosen_pairs)
start_selection = op(select.start_selection)
pairs_with_weights = op(topk_pairs.pairs_with_weights)
in_slots = op(topk_pairs.in_slots)
count_topk = op(topk_pairs.count_topk)
weights_of_rounded = op(topk_pairs.weights_of_rounded, on=1)
in_two_tables = op(topk_pairs.in_two_tables)
apply_rule = op(rounding.apply_rule)
pack_rank_status = op(status.pack_rank_status)
zero_counts_on_error = op(status.zero_counts_on_error)
rank_plan = op(plan.rank_plan)
bounded_plan = op(plan.bounded_plan, on=1)
pack_split_sizes = op(split_sizes.pack_split_sizes)
sent_rows = op(send_index.sent_rows)
is_token_in_rank = op(send_index.is_token_in_rank)
row_starts = op(recv_index.row_starts, on=1)
pair_lists = op(recv_index.pair_lists, on=1)
gather_rows = op(rows.gather_rows)
gather_sum = op(sums.gather_sum)
values_of_pairs = op(scalars.values_of_pairs)
add_hidden_grads = op(lora.add_hidden_grads)


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """Lists the rows that this rank sends, by destination rank and by token.

    Not made by `op`, because the first argument is not a tensor.
    """
    return _implementation("dispatch.send_index", "token_lists", runs_triton(sent.sent_before))(sent, num_sent)


def router_operations(device: torch.device, dtype: torch.dtype, K: int) -> RouterOperations | None:
    """Returns the router's fused kernels, or None where the plain torch twins of kernels/route/ run under autograd.

    device, dtype: of the logits. None on the CPU, for logits that are not fp32, for K > 16, without Triton, and under
    torch.compile, which fuses the twins itself.
    """
    if torch.compiler.is_dynamo_compiling() or device.type != "cuda" or dtype != torch.float32 or K > _MAX_K:
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
    acquire_peers: Callable[[SignalPad, Stage], None]
    release_peers: Callable[[SignalPad, Stage], None]
    all_gather_start: Callable[[SignalPad, Tensor, Tensor, int], None]
    all_gather_wait: Callable[[SignalPad, Tensor, int, int], Tensor]
    push_lists: Callable[[SignalPad, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    push_scalars: Callable[[SignalPad, Tensor, Tensor, Tensor, Tensor], None]
    push_rows: Callable[[SignalPad, Tensor, Tensor, Tensor, Tensor, int], None]
    combine_push: Callable[[SignalPad, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, int], None]
    combine_reduce: Callable[[SignalPad, Tensor, Tensor, Tensor, int, int], Tensor]
    collect_scalars: Callable[[SignalPad, Tensor, Tensor, int], Tensor]


@functools.cache
def symmetric_kernels() -> SymmetricKernels:
    """Returns the symmetric-memory kernels. They have no twin: plain torch cannot write into a peer's memory."""
    return cast(SymmetricKernels, import_module("sonic_ep.kernels.dispatch.symmetric.operations"))


class Operations(Protocol):
    """The operations on experts, with the signatures and the contract of kernels/experts/reference.py."""

    up_projection = staticmethod(reference.up_projection)
    down_projection = staticmethod(reference.down_projection)
    accumulate_product = staticmethod(reference.accumulate_product)
    accumulate_up_projection = staticmethod(reference.accumulate_up_projection)
    down_projection_backward = staticmethod(reference.down_projection_backward)
    up_projection_backward = staticmethod(reference.up_projection_backward)
    weight_grad = staticmethod(reference.weight_grad)
    bias_grad = staticmethod(reference.bias_grad)
    gathered_bias_grad = staticmethod(reference.gathered_bias_grad)


def operations_for(
    x_RH: Tensor, w2_eHI: Tensor, activation: Activation, *, batch_invariant: bool = False
) -> Operations:
    """Returns the implementation for rows with the device and dtype of x_RH and experts with the shape of w2_eHI.

    Raises ValueError if batch_invariant and there is none whose rows do not depend on others.
    """
    H, I = w2_eHI.shape[1:]  # noqa: E741
    aligned, found = H % COLUMN_MULTIPLE == 0 and I % COLUMN_MULTIPLE == 0, cast(Operations, reference)
    if x_RH.is_cuda:
        found = _on_gpu(x_RH.device, x_RH.dtype, aligned, activation.name)
    if not batch_invariant or found is not reference:
        return found
    if x_RH.is_cuda or not aligned:
        raise ValueError(
            f"batch_invariant=True with rows of {x_RH.dtype} on {x_RH.device.type}, d={H} and n={I}: d and n must be "
            f"multiples of {COLUMN_MULTIPLE}, and on a GPU the experts' kernels must compute; use bf16 there"
        )
    return cast(Operations, experts_in_blocks)


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
