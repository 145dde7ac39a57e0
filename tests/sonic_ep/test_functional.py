"""What `moe` keeps for backward and puts on the wire, counted and compared with the formulas; the functional API."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoEConfig, RouterConfig, Routing
from sonic_ep.cli import plan
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.functional import moe
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import concatenate
from sonic_ep.transports import transport_for
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
T, D, E_PER_K = 96, 32, 8


def saved_bytes(run: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Bytes of distinct storages that autograd holds after `run`, the parameters' own left out."""
    held: dict[int, int] = {}
    owned = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and storage.nbytes():
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad  # the graph must be alive while its storages are counted
    return sum(held.values())


def random_routing(rank: int, K: int, E: int, group: EPGroup) -> tuple[Routing, Tensor]:
    """Plain top-K of random scores, and the (T, E) choice."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(T, E, generator=generator).topk(K).indices
    mask = torch.zeros(T, E, dtype=torch.bool).scatter_(1, ids, True)
    experts, tokens = mask.T.nonzero(as_tuple=True)
    pair_weights = torch.rand(tokens.shape[0], generator=generator)
    return Routing.from_pairs(tokens, experts, pair_weights, num_tokens=T, E=E, group=group), mask


def measured_and_formula(rank: int, granularity: int, dtype: torch.dtype, saves: bool) -> dict[str, int]:
    """Kept bytes at d/n = granularity, K*n fixed, and the terms of docs/memory.md."""
    group = EPGroup()
    n, K = D // granularity, granularity
    E = E_PER_K * K
    routing, _ = random_routing(rank, K, E, group)
    e = E // group.size
    w1 = torch.randn(e, 2 * n, D, dtype=dtype, requires_grad=True)
    w2 = torch.randn(e, D, n, dtype=dtype, requires_grad=True)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)

    def run() -> Tensor:
        return moe(x, routing, w1, w2, transport=transport_for(group), group=group, save_dispatched=saves)

    masks = [random_routing(r, K, E, EPGroup.alone())[1] for r in range(group.size)]
    own = slice(rank * e, (rank + 1) * e)
    P = sum(int(mask[:, own].sum()) for mask in masks)
    U = sum(int(mask[:, own].any(1).sum()) for mask in masks) if group.size > 1 else T
    sent = int(masks[rank].view(T, group.size, e).any(2).sum())
    lists = 16 * P + 4 * (U + 1) + 4 * (e + 1)
    if group.size > 1:
        lists += 8 * sent + 4 * (T + 1)
    config = MoEConfig(d=D, n=n, E=E, K=K, save_dispatched=saves, router=RouterConfig(renormalize=False))
    planned = plan.saved_bytes(config, plan.Sizes(T, group.size, sent, U, P, P), dtype.itemsize, "all_to_all")
    return {
        "planned": sum(planned.values()),
        "measured": saved_bytes(run, [w1, w2]),
        "x": (U if saves else T) * D * dtype.itemsize,
        "h": P * 2 * n * dtype.itemsize,
        "lists": lists,
        "P": P,
        "n": n,
    }


@pytest.mark.parametrize("saves", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_kept_bytes_match_the_formula_and_do_not_grow(
    ranks: Ranks, ep_size: int, dtype: torch.dtype, saves: bool
) -> None:
    group_totals = []
    for granularity in (1, 2, 4, 8):
        per_rank = ranks(ep_size).run(measured_and_formula, granularity, dtype, saves)
        for terms in per_rank:
            assert terms["measured"] == terms["x"] + terms["h"] + terms["lists"], (granularity, terms)
            assert terms["measured"] == terms["planned"], (granularity, terms)
            assert terms["h"] == (4 if dtype == torch.bfloat16 else 8) * terms["P"] * terms["n"]
        group_totals.append(sum(terms["h"] + (0 if saves else terms["x"]) for terms in per_rank))
    # Activations of the whole group at fixed K*n: exactly flat in granularity (lists grow with K, by 16 bytes a pair).
    assert len(set(group_totals)) == 1, group_totals


def wire_bytes(rank: int, dtype: torch.dtype, saves: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Counted by the transport, and by hand, over one forward and backward."""
    group = EPGroup()
    K, E, n = 3, 16, 8
    e = E // group.size
    routing, mask = random_routing(rank, K, E, group)
    pair_weights = routing.weights_N.requires_grad_(True)
    w1, w2 = torch.randn(e, 2 * n, D).to(dtype), torch.randn(e, D, n).to(dtype)
    x = torch.randn(T, D).to(dtype).requires_grad_(True)
    transport = AllToAllTransport(group)
    out = moe(x, routing, w1, w2, transport=transport, group=group, save_dispatched=saves)
    forward = dict(transport.wire_bytes)
    out.sum().backward()
    assert pair_weights.grad is not None

    needed = torch.stack([random_routing(r, K, E, EPGroup.alone())[1] for r in range(group.size)])
    needed = needed.view(group.size, T, group.size, e)
    rows = needed.any(3).sum(1)  # (source, owner) distinct tokens
    pairs = needed.sum((1, 3))  # (source, owner)
    sent = int(rows[rank].sum() - rows[rank, rank])
    received = int(rows[:, rank].sum() - rows[rank, rank])
    row_bytes = D * dtype.itemsize
    lists = 8 * int(pairs[rank].sum() - pairs[rank, rank])
    returned = 4 * int(pairs[:, rank].sum() - pairs[rank, rank])
    wanted_forward = {"lists": lists, "dispatch": sent * row_bytes, "combine": received * row_bytes}
    assert forward == wanted_forward, (forward, wanted_forward)
    wanted = {
        "lists": lists,
        "dispatch": (2 if saves else 3) * sent * row_bytes,  # x, dO and, unless kept, x again
        "combine": 2 * received * row_bytes,  # out, dX
        "combine_scalars": returned,
    }
    return dict(transport.wire_bytes), wanted


@pytest.mark.parametrize("saves", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_wire_bytes_are_distinct_rows_and_index_lists(
    ranks: Ranks, ep_size: int, dtype: torch.dtype, saves: bool
) -> None:
    for counts, wanted in ranks(ep_size).run(wire_bytes, dtype, saves):
        assert counts == wanted


def layer_arguments(E: int = 4, n: int = 6) -> dict[str, Any]:
    routing, _ = random_routing(0, 2, E, EPGroup.alone())
    group = EPGroup.alone()
    return {
        "x_TH": torch.randn(T, D),
        "routing": routing,
        "w1_eJH": torch.randn(E, 2 * n, D),
        "w2_eHI": torch.randn(E, D, n),
        "transport": transport_for(group),
        "group": group,
    }


@pytest.mark.parametrize("bias", [False, True])
def test_both_weight_layouts_give_one_result(bias: bool) -> None:
    arguments = layer_arguments()
    if bias:
        arguments |= {"b1_eJ": torch.randn(4, 12), "b2_eH": torch.randn(4, D)}
    w1, x = (arguments[name].requires_grad_(True) for name in ("w1_eJH", "x_TH"))
    halves = concatenate(w1.detach()).requires_grad_(True)
    concatenated = {**arguments, "w1_eJH": halves, "layout": "concatenated"}
    if bias:
        concatenated["b1_eJ"] = concatenate(arguments["b1_eJ"])
    wanted, got = moe(**arguments), moe(**concatenated)
    assert torch.equal(got, wanted)
    dw1, dx = torch.autograd.grad(wanted.square().sum(), [w1, x])
    dhalves, got_dx = torch.autograd.grad(got.square().sum(), [halves, x])
    assert torch.equal(dhalves, concatenate(dw1))
    assert torch.equal(got_dx, dx)


@pytest.mark.parametrize("change", [{"activation": "relu2"}, {"up_eIH": torch.randn(4, 6, D)}], ids=["relu2", "up"])
def test_without_two_halves_concatenated_is_the_order_of_the_rows(change: dict[str, Any]) -> None:
    arguments = {**layer_arguments(), "w1_eJH": torch.randn(4, 6, D), **change}
    assert torch.equal(moe(**arguments, layout="concatenated"), moe(**arguments))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_transposed_weights_give_the_same_and_are_not_copied(bias: bool, activation: str) -> None:
    arguments = {**layer_arguments(), "activation": activation}
    if activation == "relu2":
        arguments["w1_eJH"] = torch.randn(4, 6, D)
    if bias:
        arguments |= {"b1_eJ": torch.randn(4, arguments["w1_eJH"].shape[1]), "b2_eH": torch.randn(4, D)}
    # In float64: some CPUs add up the products of transposed operands in another order.
    for name in ("x_TH", "w1_eJH", "w2_eHI", *(("b1_eJ", "b2_eH") if bias else ())):
        arguments[name] = arguments[name].double().requires_grad_(True)
    w1, w2, x = (arguments[name] for name in ("w1_eJH", "w2_eHI", "x_TH"))
    own = [weight.detach().mT.contiguous().requires_grad_(True) for weight in (w1, w2)]
    transposed = {**arguments, "w1_eJH": own[0], "w2_eHI": own[1], "layout": "transposed"}
    others = [x, *(arguments[name] for name in ("b1_eJ", "b2_eH") if bias)]
    assert saved_bytes(lambda: moe(**transposed), own) == saved_bytes(lambda: moe(**arguments), [w1, w2])
    wanted, got = moe(**arguments), moe(**transposed)
    torch.testing.assert_close(got, wanted)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [w1, w2, *others])
    got_grads = torch.autograd.grad(got.square().sum(), [*own, *others])
    assert all(each.is_contiguous() for each in got_grads)
    for got, wanted in zip((got_grads[0].mT, got_grads[1].mT, *got_grads[2:]), wanted_grads, strict=True):
        torch.testing.assert_close(got, wanted)


def test_transposed_weights_of_the_wrong_shape_or_with_up_are_refused() -> None:
    arguments = {**layer_arguments(), "layout": "transposed"}
    with pytest.raises(ValueError, match=r"w1 has shape \(4, 12, 32\), wanted \(4, 32, 32\)"):
        moe(**arguments)
    arguments["w1_eJH"] = arguments["w1_eJH"].mT.contiguous()
    with pytest.raises(ValueError, match=r"w2 has shape \(4, 32, 6\), wanted \(4, 6, 32\)"):
        moe(**arguments)
    arguments["w2_eHI"] = arguments["w2_eHI"].mT
    with pytest.raises(ValueError, match=r"w2 is not contiguous"):
        moe(**arguments)
    arguments = {**layer_arguments(), "layout": "transposed", "up_eIH": torch.zeros(4, 6, D)}
    arguments["w1_eJH"], arguments["w2_eHI"] = torch.zeros(4, D, 6), torch.zeros(4, 6, D)
    with pytest.raises(ValueError, match="up does not go with layout='transposed'; pass w1"):
        moe(**arguments)


def test_concatenated_weights_are_not_copied() -> None:
    arguments = layer_arguments()
    w1, w2 = (arguments[name].requires_grad_(True) for name in ("w1_eJH", "w2_eHI"))
    halves = concatenate(w1.detach()).requires_grad_(True)
    concatenated = {**arguments, "w1_eJH": halves, "layout": "concatenated"}
    assert saved_bytes(lambda: moe(**concatenated), [halves, w2]) == saved_bytes(lambda: moe(**arguments), [w1, w2])


def test_gate_and_up_apart_give_the_same_and_keep_no_copy() -> None:
    arguments = layer_arguments()
    w1, w2, x = (arguments[name].requires_grad_(True) for name in ("w1_eJH", "w2_eHI", "x_TH"))
    gate, up = (half.detach().clone().requires_grad_(True) for half in w1.unflatten(1, (-1, 2)).unbind(2))
    split = {**arguments, "w1_eJH": gate, "up_eIH": up}
    assert saved_bytes(lambda: moe(**split), [gate, up, w2]) == saved_bytes(lambda: moe(**arguments), [w1, w2])
    wanted, got = moe(**arguments), moe(**split)
    assert torch.equal(got, wanted)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [w1, w2, x])
    dgate, dup, *grads = torch.autograd.grad(got.square().sum(), [gate, up, w2, x])
    assert torch.equal(torch.stack([dgate, dup], 2).flatten(1, 2), wanted_grads[0])
    assert all(map(torch.equal, grads, wanted_grads[1:]))
    moe(**{**split, "w1_eJH": gate.detach()}).sum().backward()  # a frozen gate
    assert up.grad.is_contiguous()
    assert gate.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up_eIH": torch.zeros(4, 5, D)}, r"up is \(4, 5, 32\) .*, w1 \(the gate\) is \(4, 6, 32\)"),
        ({"up_eIH": torch.zeros(4, 6, D), "activation": "gelu"}, "up goes with a gated activation, without b1"),
        ({"up_eIH": torch.zeros(4, 6, D), "b1_eJ": torch.zeros(4, 6)}, "without b1 .*; pass w1 with gate and up"),
        ({"up_eIH": torch.zeros(4, 6, D), "accumulate_into_main_grad": True}, "without accumulate_into_main_grad"),
        ({"up_eIH": torch.zeros(4, D, 6).mT}, r"up is not contiguous \(strides \(192, 1, 6\)\)"),
        ({}, r"w2 has shape \(4, 32, 6\), wanted \(4, 32, 3\)"),
    ],
)
def test_a_wrong_up_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {**layer_arguments(), "w1_eJH": torch.zeros(4, 6, D), **change}
    with pytest.raises(ValueError, match=message):
        moe(**arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w1_eJH", lambda w: w[:, :, :-1], r"w1 has shape \(4, 12, 31\), wanted \(4, 12, 32\)"),
        ("w1_eJH", lambda w: w[:, :-1], r"w1 has 11 rows an expert; a gated activation needs an even number"),
        ("w1_eJH", lambda w: w[:3], r"w1 has shape \(3, 12, 32\), wanted \(4, 12, 32\)"),
        ("w1_eJH", lambda w: w.double(), r"w1 is torch.float64 on cpu, x is torch.float32 on cpu"),
        ("w1_eJH", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), r"w1 is not contiguous"),
        ("w2_eHI", lambda w: w[:, :, :-1], r"w2 has shape \(4, 32, 5\), wanted \(4, 32, 6\)"),
        ("w2_eHI", lambda w: w[0], r"w1 and w2 must have three dimensions"),
        ("x_TH", lambda x: x[None], r"x has shape \(1, 96, 32\), wanted \(T, d\)"),
        ("x_TH", lambda x: x[:-1], r"the routing is of 96 tokens, x has 95"),
    ],
)
def test_wrong_arguments_name_value_and_limit(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    arguments = layer_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        moe(**arguments)


def test_half_precision_weights_of_pairs_count_and_are_kept_in_fp32() -> None:
    arguments = layer_arguments()
    owned = [arguments["x_TH"].requires_grad_(True)]
    leaf = arguments["routing"].weights_N.bfloat16().requires_grad_(True)
    half, full = (
        partial(moe, **{**arguments, "routing": replace(arguments["routing"], weights_N=weights_N)})
        for weights_N in (leaf, leaf.detach().float())
    )
    assert saved_bytes(half, owned) == saved_bytes(full, owned)
    got = half()
    assert torch.equal(got, full())
    got.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_unknown_layouts_are_refused_and_halves_that_a_copy_would_take_the_gradient_of() -> None:
    with pytest.raises(ValueError, match="layout='concat' is not one of interleaved, concatenated, transposed"):
        moe(**layer_arguments(), layout="concat")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not go with layout='concatenated'; pass w1 with gate"):
        moe(**layer_arguments(), layout="concatenated", accumulate_into_main_grad=True)


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="activation='swish' is not one of swiglu, swiglu_clamped, swiglu_clamped_7, geglu"
    ):
        moe(**layer_arguments(), activation="swish")


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    arguments = layer_arguments()
    arguments["w2_eHI"].requires_grad_(True)
    moe(**arguments).sum().backward()
    assert arguments["w2_eHI"].grad is not None
    assert arguments["w1_eJH"].grad is None
    assert arguments["x_TH"].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_accumulate_in_main_grad(dtype: torch.dtype, poison: None) -> None:
    arguments = layer_arguments()
    weights = [arguments[name].requires_grad_() for name in ("w1_eJH", "w2_eHI")]
    wanted = torch.autograd.grad(moe(**arguments).square().sum(), weights)
    for weight in weights:
        weight.main_grad = torch.ones_like(weight, dtype=dtype)
        weight.grad_added_to_main_grad = False
    for _ in range(2):  # microbatches
        moe(**arguments, accumulate_into_main_grad=True).square().sum().backward()
    for weight, grad in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.main_grad.float(), 1 + 2 * grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape  # DDP's hooks want one


@pytest.mark.parametrize(
    "zeros",
    [
        lambda w: torch.zeros_like(w, dtype=torch.float64),  # quack's GEMMs write none for other weights
        lambda w: torch.zeros_like(w.mT, memory_format=torch.contiguous_format).mT,
        lambda w: torch.zeros(w.numel() + 1)[1:].view_as(w),
    ],
    ids=["float64", "strided", "unaligned"],
)
def test_main_grad_that_kernels_cannot_write_to_is_left_alone(zeros: Callable[[Tensor], Tensor]) -> None:
    arguments = layer_arguments()
    w1 = arguments["w1_eJH"].requires_grad_()
    w1.main_grad = zeros(w1.detach())
    moe(**arguments, accumulate_into_main_grad=True).sum().backward()
    assert w1.grad.abs().sum() > 0
    assert w1.main_grad.abs().sum() == 0


def test_main_grad_is_used_only_where_there_is_one_and_it_is_asked_for() -> None:
    arguments = layer_arguments()
    w1, w2 = (arguments[name].requires_grad_() for name in ("w1_eJH", "w2_eHI"))
    wanted = torch.autograd.grad(moe(**arguments).square().sum(), [w1, w2])
    w1.main_grad, w1.zero_out_wgrad = torch.zeros_like(w1), True
    moe(**arguments, accumulate_into_main_grad=True).square().sum().backward()
    torch.testing.assert_close([w1.main_grad, w1.grad, w2.grad], [wanted[0], torch.zeros_like(w1), wanted[1]])
    w1.grad = None
    moe(**arguments).square().sum().backward()
    torch.testing.assert_close([w1.main_grad, w1.grad], [wanted[0], wanted[0]])


@pytest.mark.parametrize("retains_graph", [False, True])
def test_backward_lets_h_go_before_it_makes_dx(monkeypatch: pytest.MonkeyPatch, retains_graph: bool) -> None:
    alive: list[bool] = []
    h: list[weakref.ref[Tensor]] = []
    up_projection, up_projection_backward = reference.up_projection, reference.up_projection_backward

    def forward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        h_PJ, a_PI = up_projection(*arguments, **options)
        h.append(weakref.ref(h_PJ))
        return h_PJ, a_PI

    def backward(*arguments: Any, **options: Any) -> Tensor:
        alive.append(h[0]() is not None)
        return up_projection_backward(*arguments, **options)

    monkeypatch.setattr(reference, "up_projection", forward)
    monkeypatch.setattr(reference, "up_projection_backward", backward)
    arguments = layer_arguments()
    inputs = [arguments[name].requires_grad_(True) for name in ("x_TH", "w1_eJH", "w2_eHI")]
    loss = moe(**arguments).square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=retains_graph)
    assert alive == [retains_graph]
    if retains_graph:
        for again, gradient in zip(torch.autograd.grad(loss, inputs), first, strict=True):
            assert torch.equal(again, gradient)


def test_outputs_are_fully_written(poison: None) -> None:
    arguments = layer_arguments(E=12)
    for name in ("x_TH", "w1_eJH", "w2_eHI"):
        arguments[name].requires_grad_(True)
    out = moe(**arguments)
    out.sum().backward()
    results = [out, *(arguments[name].grad for name in ("x_TH", "w1_eJH", "w2_eHI"))]
    assert all(result.isfinite().all() for result in results)
