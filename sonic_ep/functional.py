"""`moe`: the expert-parallel MLP, a differentiable function of rows, weights and a routing.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, P rows of the pair buffer, e local experts, I
expert width, J pre-activation columns (2I if gated else I).
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.checks import (
    ROW_ALIGNMENT,
    problem_with_low_rank,
    problem_with_rows,
    problem_with_up,
    problem_with_weights,
)
from sonic_ep.dispatch.checkpoint_regions import SavingForward
from sonic_ep.dispatch.protocol import Transport
from sonic_ep.expert_parallel_mlp import NO_LORA, Call
from sonic_ep.first_order import Context, first_order
from sonic_ep.graph.operation import GraphOperation, Outputs, in_graph, lasting, like_first
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import start_compiling
from sonic_ep.kernels.experts.activations import Activation, activation_named, interleave
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.kernels.program.program import without_autocast
from sonic_ep.routing import GroupCounts, Routing
from sonic_ep.steps.experts_step import ExpertsCode, ExpertsStep, MoECall, RunsAs
from sonic_ep.steps.experts_trace import MoEWeights
from sonic_ep.transports import existing_transport, transport_type

Layout = Literal["interleaved", "concatenated", "transposed"]
_NUM_WEIGHTS = len(MoEWeights._fields)


def moe(
    x_TH: Tensor,
    routing: Routing,
    w1_eJH: Tensor,
    w2_eHI: Tensor,
    b1_eJ: Tensor | None = None,
    b2_eH: Tensor | None = None,
    *,
    up_eIH: Tensor | None = None,
    lora: ExpertsLoRA | None = None,
    transport: Transport,
    group: EPGroup,
    activation: str = "swiglu",
    layout: Layout = "interleaved",
    save_dispatched: bool = False,
    accumulate_into_main_grad: bool = False,
    runs_as: RunsAs | None = None,
) -> Tensor:
    """Returns out: out[t] is the sum of s * expert_i(x[t]) over the routing's pairs (token t, expert i, weight s).

    A collective of `group`.

    Shapes:  x_TH (T, H); w1_eJH (e, J, H), w2_eHI (e, H, I), b1_eJ (e, J), b2_eH (e, H) of this rank's e = E / ep_size
             experts, in the dtype of x; result (T, H) in the dtype of x.
    Layout:  for gated activations, the rows of w1 (and b1) alternate between gate and up ("interleaved").
             "concatenated" takes [gate; up] halves. GPU kernels read them without a copy. With b1 each call makes an
             interleaved copy. "transposed" takes w1 (e, H, J), with gate and up in turns, and w2 (e, I, H), as gpt-oss
             has them, without `up_eIH`.
    Split:   with `up_eIH` (e, I, H), w1_eJH is the gate weights alone, (e, I, H), and b1 must be None. GPU kernels read
             both without a copy if up is behind gate in memory, at a distance that is a multiple of 16 bytes. Else
             forward and backward each make an interleaved copy. The two gradients are halves of one tensor.
    LoRA:    with `lora` the weights are W1 + B1 A1 and W2 + B2 A2, which are never made: the thin products are added to
             the products with W1 and W2. Nothing more is saved for backward than A and B. B1 has the row order of
             w1, or with `up_eIH` as with "concatenated".
    Saves:   x_TH for backward, or with `save_dispatched` the received rows, which saves one dispatch in backward.
    Adds:    with `accumulate_into_main_grad`, backward adds dW1 and dW2 to `w.main_grad` of each weight (a leaf) that
             has one, and sets `w.grad_added_to_main_grad = True`, as Megatron-Core's layers do. main_grad may have any
             floating dtype, but float64 for float64 weights only. The gradient that autograd passes on is then a
             placeholder: zeros if `w.zero_out_wgrad`, else uninitialised. Not with `up_eIH`, nor with "concatenated",
             nor under torch.compile.
    Runs:    as a program where `runs_as` allows it (docs/how_a_step_runs.md); by the code under torch.compile.
    Raises:  ValueError, before any collective, for weights of the wrong shape, dtype, device or strides and for a
             routing of another number of tokens. This check is local: if only one rank makes a mistake, the others wait
             for it. `MoE` and `Routing.from_pairs` check on all ranks. Also the errors of `Routing.check`.
    Source:  SonicMoE, arXiv 2512.14080, sections 3 and 4. docs/design.md, section 3, extends it to many ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        if accumulate_into_main_grad:
            raise ValueError("accumulate_into_main_grad=True is not supported under torch.compile; set it to False")
        weights = w1_eJH, w2_eHI, b1_eJ, b2_eH, up_eIH, *(lora or NO_LORA).tensors()
        return _in_graph(x_TH, routing, weights, transport, group, activation, layout, save_dispatched)
    act = activation_named(activation)
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not one of {', '.join(get_args(Layout))}")
    if layout == "concatenated" and (up_eIH is not None or not act.gated):
        layout = "interleaved"
    problem = _problem_with(
        x_TH,
        routing,
        (w1_eJH, w2_eHI, b1_eJ, b2_eH),
        up_eIH,
        lora,
        group=group,
        act=act,
        layout=layout,
        accumulates=accumulate_into_main_grad,
    )
    if problem is not None:
        _check(routing)  # first: an error that all ranks raise has precedence, and its check may be a collective
        raise ValueError(problem)
    if lora is not None and transport.batch_invariant:
        raise ValueError("lora is not supported with batch_invariant=True; add B A to the weights, or set it to False")
    if lora is not None:
        lora = _padded(lora, halves=layout == "concatenated" or up_eIH is not None)
    if layout == "concatenated" and b1_eJ is not None:
        w1_eJH, b1_eJ, layout = interleave(w1_eJH), interleave(b1_eJ), "interleaved"
    dtype = torch.promote_types(routing.weights_N.dtype, torch.float32)
    if routing.weights_N.dtype != dtype:
        routing = replace(routing, weights_N=routing.weights_N.to(dtype))
    split, bias = layout == "concatenated" or up_eIH is not None, b1_eJ is not None
    updates = lora or NO_LORA
    start_compiling(
        w2_eHI,
        activation,
        bias=bias,
        split_gate_up=split,
        accumulate=accumulate_into_main_grad,
        transposed=layout == "transposed",
        ranks=updates.ranks,
    )
    call = Call(transport, group, act, save_dispatched, routing.tile_aligned)
    params = (w1_eJH, w2_eHI) if accumulate_into_main_grad else (None, None)
    weights = MoEWeights(w1_eJH, up_eIH, w2_eHI, b1_eJ, b2_eH, *updates.tensors())
    step = code = ExpertsCode(call, layout, routing)
    with without_autocast(x_TH.device.type):
        if runs_as is not None:
            into = main_grad_of(params[0]), main_grad_of(params[1])
            with routing.status_first():
                step = runs_as.find(MoECall(x_TH, routing, weights, into, call, layout)) or code
            code.prepared = runs_as.prepared
        tensors = x_TH, routing.weights_N, *weights
        arguments = *tensors, routing, params
        saves = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
        saving = partial(SavingForward.present, has_backward=saves, num_ranks=group.size)
        out_TH = _ExpertParallelMLP.apply(*arguments, step, saving())
        if runs_as is not None and runs_as.exceeded(routing):
            out_TH = _ExpertParallelMLP.apply(*arguments, code, saving())
    return out_TH


def _problem_with(
    x_TH: Tensor,
    routing: Routing,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    up_eIH: Tensor | None,
    lora: ExpertsLoRA | None,
    *,
    group: EPGroup,
    act: Activation,
    layout: Layout,
    accumulates: bool,
) -> str | None:
    """Returns what is wrong with the arguments of `moe`, or None."""
    w1, w2, b1_eJ, _ = weights
    gated, local_experts = act.gated and up_eIH is None, routing.counts.rows_SE.shape[1] // group.size
    problem = problem_with_rows(x_TH, routing.num_tokens)
    if problem is None:
        transposed = layout == "transposed"
        problem = problem_with_weights(x_TH, *weights, gated=gated, local_experts=local_experts, transposed=transposed)
    if problem is None and up_eIH is not None:
        problem = problem_with_up(w1, up_eIH, gated=act.gated, b1=b1_eJ, accumulates=accumulates)
        if layout == "transposed":
            problem = "up does not go with layout='transposed'; pass w1 (e, H, J) with gate and up in turns"
    if problem is None and lora is not None:
        w1, w2 = _by_rows(layout, w1, w2)
        J = w1.shape[1] * (1 if up_eIH is None else 2)
        problem = problem_with_low_rank(x_TH, J, w2.shape, lora.tensors())
    if problem is None and accumulates and layout == "concatenated":
        problem = (
            "accumulate_into_main_grad=True does not go with layout='concatenated'; "
            "pass w1 with gate and up interleaved"
        )
    return problem


def _by_rows(layout: Layout, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights as (e, J, H) and (e, H, I), without a copy."""
    return (w1.mT, w2.mT) if layout == "transposed" else (w1, w2)


def _padded(lora: ExpertsLoRA, *, halves: bool) -> ExpertsLoRA:
    """Returns the updates as the kernels read them. halves: the rows of B1 are [gate; up]."""
    b1_eJr = lora.b1_eJr
    return replace(lora, b1_eJr=interleave(b1_eJr) if b1_eJr is not None and halves else b1_eJr).padded()


def _in_graph(
    x_TH: Tensor,
    routing: Routing,
    weights: tuple[Tensor | None, ...],
    transport: Transport,
    group: EPGroup,
    *settings: str | bool,
) -> Tensor:
    """Calls `moe` as one operation of a compiled graph, which finds the transport by its text."""
    if not isinstance(transport, transport_type(group)):
        raise ValueError(f"under torch.compile the transport of ep_size={group.size} is transport_for(group)")
    if routing.split_sizes is not None:
        _check(routing)  # the router ran outside of the graph, and operations of a graph do not take split_sizes
    tensors = [each for each in (x_TH, routing.weights_N, *weights) if each is not None]
    present, limits = [each is not None for each in weights], (routing.max_rows, routing.max_received)
    lists, where = (routing.token_ids_N, list(routing.counts)), (group.name, transport.text)
    constants = *lists, present, routing.num_tokens, *limits, *where, *settings
    return in_graph(torch.ops.sonic_ep.moe, tensors, *constants)[0][0]


def _moe_in_graph(
    tensors: list[Tensor],
    token_ids_N: Tensor,
    counts: list[Tensor],
    present: list[bool],
    num_tokens: int,
    max_rows: int | None,
    max_received: int | None,
    group_name: str,
    transport: str,
    activation: str,
    layout: Layout,
    save_dispatched: bool,
) -> Outputs:
    x_TH, weights_N, *given = tensors
    group, left = EPGroup.named(group_name), iter(given)
    w1, w2, b1, b2, up, *lora = [next(left) if is_there else None for is_there in present]
    assert w1 is not None
    assert w2 is not None
    token_ids_N, *counts = [lasting(each) for each in (token_ids_N, *counts)]
    out_TH = moe(
        x_TH,
        Routing(weights_N, token_ids_N, GroupCounts(*counts), num_tokens, max_rows, max_received),
        *(w1, w2, b1, b2),
        up_eIH=up,
        lora=ExpertsLoRA(*lora) if any(present[5:]) else None,
        transport=existing_transport(group, transport),
        group=group,
        activation=activation,
        layout=layout,
        save_dispatched=save_dispatched,
    )
    return Outputs([out_TH])


# `moe` in a compiled graph. present: which weights and low-rank updates there are.
GraphOperation(
    "moe",
    "Tensor token_ids_N, Tensor[] counts, bool[] present, SymInt num_tokens, SymInt? max_rows, SymInt? max_received, "
    "str group, str transport, str activation, str layout, bool save_dispatched",
    _moe_in_graph,
    like_first,
)


@_disable_dynamo
def _check(routing: Routing) -> None:
    routing.check()


class _ExpertParallelMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context["_Others"], x_TH: Tensor, weights_N: Tensor, *arguments: object) -> Tensor:
        """arguments: the tensors of MoEWeights, each an argument of its own for autograd, then `_Others`."""
        x_TH = x_TH.contiguous()
        weights, others = MoEWeights._make(arguments[:_NUM_WEIGHTS]), _Others._make(arguments[_NUM_WEIGHTS:])
        routing, step = others.routing, others.step
        assert routing is not None
        with routing.status_first():
            out_TH, saved = step.forward(x_TH, weights_N, weights, needs_output=others.saving.needs_output)
        routing.check()  # after all launches, because it may block
        ctx.save_for_backward(*others.saving.noted([x_TH if step.saves_x else None, *weights, *saved]))
        # params are not read from saved_tensors: saved-tensor hooks may return tensors without attributes.
        ctx.call = others._replace(routing=None, saving=SavingForward())
        return out_TH

    @staticmethod
    @first_order
    def backward(ctx: Context["_Others"], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, *tensors = ctx.saved_tensors
        weights, saved = MoEWeights(*tensors[:_NUM_WEIGHTS]), tensors[_NUM_WEIGHTS:]
        # So that `saved` alone refers to H and the weights of pairs. Has no effect if the graph is retained.
        ctx.maybe_clear_saved_tensors()
        del tensors
        _, (param1, param2), step, _ = ctx.call
        needs_gate, needs_up, *needs = ctx.needs_input_grad[2:7]
        needs_lora = (any(ctx.needs_input_grad[7:9]), any(ctx.needs_input_grad[9:11]))
        needs = needs_gate or needs_up, *needs, *needs_lora
        into = main_grad_of(param1) if needs[0] else None, main_grad_of(param2) if needs[1] else None
        with without_autocast(weights.w1.device.type):
            grads = step.backward(grad_outputs[0], rows, saved, weights, into, needs)
        dw1 = grads.dw1 if into[0] is None else gradient_placeholder(param1)
        dw2 = grads.dw2 if into[1] is None else gradient_placeholder(param2)
        dup = None
        if weights.up_eIH is not None and dw1 is not None:
            dw1, dup = dw1.chunk(2, 1)
        weight_grads = dw1, dup, dw2, grads.db1_eJ, grads.db2_eH, *grads.lora.tensors()
        return grads.dx_TH, grads.dweights_N, *weight_grads, *[None] * len(_Others._fields)


class _Others(NamedTuple):
    """The arguments of `_ExpertParallelMLP` without a gradient. params: with the main_grad to which backward adds.

    routing: None in backward. step: what runs it. saving: its place in a region of activation checkpointing; empty
    in backward.
    """

    routing: Routing | None
    params: tuple[Tensor | None, Tensor | None]
    step: ExpertsStep | ExpertsCode
    saving: SavingForward


def main_grad_of(weight: Tensor | None) -> Tensor | None:
    """Returns the `main_grad` of a weight, if it has one that kernels can write to."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or weight is None:
        return None
    usable = main_grad.is_contiguous() and main_grad.data_ptr() % ROW_ALIGNMENT == 0
    return main_grad if usable and (main_grad.dtype != torch.float64 or weight.dtype == torch.float64) else None


def gradient_placeholder(weight: Tensor | None) -> Tensor:
    """Returns the gradient for autograd after main_grad was updated: Megatron's DDP hooks expect a tensor."""
    assert weight is not None
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
