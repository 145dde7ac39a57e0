"""Experts that a caller gives, and padding: against the float64 oracle, and bit for bit against what was recorded."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig, record_routing
from sonic_ep.kernels.route.topk.reference import topk_mask
from tests.helpers import oracle
from tests.helpers.errors import message_of
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
LOSSES = RouterConfig(balance="global", balance_coef=0.3, z_loss_coef=0.05)
ROUNDED = MoEConfig(d=12, n=6, E=8, K=2, init_std=0.5, router=LOSSES, rounding=RoundingConfig(t=4, G=16))
EXACT = ROUNDED.replace(rounding=RoundingConfig(mode="off"))
SIGMOID = EXACT.replace(router=RouterConfig(score="sigmoid", scale=2.5, expert_bias=True))
WHOLE = EXACT.replace(router=RouterConfig(renormalize=False), shared_n=5)


def layer_of(config: MoEConfig, group: EPGroup | None = None) -> MoE:
    return MoE(config, group, seed=3, dtype=torch.float64).double()


def rows(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drifted_ids(num_tokens: int, seed: int = 0) -> Tensor:
    """K distinct experts of each token that no router has chosen."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(num_tokens)])


def results(layer: MoE, x: Tensor, **given: Tensor) -> list[Tensor]:
    """y, the loss, and all gradients, of x first."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, loss, _ = layer(x, **given)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    ((y * dy).sum() + loss).backward()
    return [y, loss, *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("config", [EXACT, SIGMOID, WHOLE], ids=["softmax", "sigmoid", "whole"])
def test_recorded_experts_repeat_a_step_bit_for_bit(config: MoEConfig) -> None:
    layer, x = layer_of(config), rows(40).view(4, 10, 12)
    with record_routing() as record:
        wanted = results(layer, x)
    (routed_experts,) = record.of(layer)
    assert routed_experts.shape == (4, 10, 2)
    assert_same(results(layer, x, routed_experts=routed_experts), wanted)


def test_recorded_experts_hold_when_the_router_has_changed() -> None:
    layer, x = layer_of(EXACT), rows(40)
    with record_routing() as record:
        layer(x)
    (routed_experts,) = record.of(layer)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(layer.router.weight.shape, generator=torch.Generator().manual_seed(8)))
    with record_routing() as again:
        layer(x, routed_experts=routed_experts)
        layer(x)
    assert torch.equal(again.of(layer)[0], routed_experts)
    assert not torch.equal(again.of(layer)[1], routed_experts)


@pytest.mark.parametrize("config", [EXACT, SIGMOID, WHOLE, ROUNDED], ids=["softmax", "sigmoid", "whole", "rounded"])
def test_drifted_experts_against_the_oracle(config: MoEConfig) -> None:
    """The router's gradient is the one of dense weights: the scores of the given experts, over their own sum."""
    layer, x, ids_TK = layer_of(config), rows(37), drifted_ids(37)
    ours = results(layer, x, routed_experts=ids_TK)
    x = x.requires_grad_()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    shared = {name.removeprefix("shared."): p for name, p in leaves.items() if name.startswith("shared.")}
    weights = oracle.Weights(
        leaves["router.weight"], None, leaves["experts.w1"], leaves["experts.w2"], None, None, shared
    )
    chosen_TE = topk_mask(ids_TK, 8)
    y = oracle.dense_moe(x, weights, chosen_TE, chosen_TE, config)
    _, logits_TE = oracle.pair_weights(x, weights, chosen_TE, chosen_TE, config)
    loss = oracle.losses(logits_TE, chosen_TE, chosen_TE.sum(0), config)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    ((y * dy).sum() + loss).backward()
    wanted = [y, loss, *(p.grad for p in (x, *leaves.values()))]
    for one, other in zip(ours, wanted, strict=True):
        assert other is not None
        torch.testing.assert_close(one, other, atol=1e-10 * float(other.detach().abs().max()), rtol=1e-10)


def test_a_recomputation_uses_the_given_experts() -> None:
    layer, x, ids_TK = layer_of(EXACT), rows(30), drifted_ids(30)
    wanted = results(layer, x, routed_experts=ids_TK)
    for use_reentrant in (False, True):
        start = x.clone().requires_grad_()
        layer.zero_grad()
        y, loss, _ = checkpoint(layer, start, ids_TK, use_reentrant=use_reentrant)
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        ((y * dy).sum() + loss).backward()
        assert_same([y, loss, *(p.grad for p in (start, *layer.parameters()) if p.grad is not None)], wanted)


def test_a_recomputation_records_nothing() -> None:
    layer, x = layer_of(EXACT), rows(30).requires_grad_()
    with record_routing() as record:
        checkpoint(layer, x, use_reentrant=False)[0].sum().backward()
    assert len(record.of(layer)) == 1


def test_rounding_is_off_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    config = ROUNDED.replace(rounding=RoundingConfig(t=4, G=8))  # of no other test: what is said once is cached
    layer, ids_TK = layer_of(config), drifted_ids(37)
    with caplog.at_level(logging.WARNING, "sonic_ep"):
        stats = layer(rows(37), routed_experts=ids_TK).stats
        layer(rows(37), routed_experts=ids_TK)
    assert torch.equal(stats.counts.rows_SE[0], topk_mask(ids_TK, 8).sum(0))
    assert not torch.equal(layer(rows(37)).stats.counts.rows_SE, layer(rows(37)).stats.counts.chosen_SE)
    assert [record.getMessage() for record in caplog.records if "routed_experts" in record.getMessage()] == [
        "rounding.mode='apportion' has no effect in steps with routed_experts"
    ]


@pytest.mark.parametrize("config", [ROUNDED, EXACT, SIGMOID, WHOLE], ids=["rounded", "exact", "sigmoid", "whole"])
@pytest.mark.parametrize("marked_by", ["mask", "ids"])
def test_padding_takes_no_part(config: MoEConfig, marked_by: str) -> None:
    """Results and gradients have the bits of a batch without the padding, whatever the padding holds."""
    layer, x, is_padding_T = layer_of(config), rows(48), torch.arange(48) % 5 == 2
    real_T, ids_TK = ~is_padding_T, drifted_ids(48)
    with_ids = {} if marked_by == "mask" else {"routed_experts": ids_TK[real_T]}
    start = x[real_T].requires_grad_()
    wanted = layer(start, **with_ids)
    x[is_padding_T] = 1e9
    given = {"padding_mask": is_padding_T}
    if marked_by == "ids":
        given = {"routed_experts": torch.where(is_padding_T[:, None], -1, ids_TK)}
    x.requires_grad_()
    y, loss, stats = layer(x, **given)
    assert torch.equal(y[real_T], wanted.y)
    assert not y[is_padding_T].any()
    assert torch.equal(loss, wanted.aux_loss)
    for one, other in zip(stats.counts, wanted.stats.counts, strict=True):
        assert torch.equal(one, other)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    ((wanted.y * dy[real_T]).sum() + wanted.aux_loss).backward()
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    ((y * dy).sum() + loss).backward()
    for p, gradient in zip(layer.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert gradient is not None
        assert torch.equal(p.grad, gradient)
    assert x.grad is not None
    assert start.grad is not None
    assert torch.equal(x.grad[real_T], start.grad)
    assert not x.grad[is_padding_T].any()


def test_ids_of_padding_that_a_mask_marks_are_not_read() -> None:
    layer, ids_TK, is_padding_T = layer_of(EXACT), drifted_ids(20), torch.arange(20) >= 17
    wanted = layer(rows(20), routed_experts=ids_TK, padding_mask=is_padding_T).y
    for filler in (0, -1, 99):
        filled_TK = torch.where(is_padding_T[:, None], filler, ids_TK)
        assert torch.equal(layer(rows(20), routed_experts=filled_TK, padding_mask=is_padding_T).y, wanted)


def test_padding_is_recorded_as_unset() -> None:
    layer, is_padding_T = layer_of(EXACT), torch.arange(20) % 3 == 0
    with record_routing() as record:
        wanted = results(layer, rows(20), padding_mask=is_padding_T)
    (routed_experts,) = record.of(layer)
    assert ((routed_experts == -1).all(1) == is_padding_T).all()
    assert_same(results(layer, rows(20), routed_experts=routed_experts), wanted)


@pytest.mark.parametrize("num_padding", [0, 20])
def test_all_or_nothing_is_padding(num_padding: int) -> None:
    layer, x = layer_of(EXACT), rows(20).requires_grad_()
    y, loss, _ = layer(x, padding_mask=torch.arange(20) < num_padding)
    (y.sum() + loss).backward()
    assert bool(y.any()) == (num_padding == 0)
    assert torch.equal(y, layer(x).y) == (num_padding == 0)


def faults() -> dict[str, tuple[dict[str, Any], str]]:
    ids_TK, mask_T = drifted_ids(20), torch.zeros(20, dtype=torch.bool)

    def with_row(row: list[int]) -> Tensor:
        return torch.cat([ids_TK[:-1], torch.tensor([row])])

    return {
        "range": (
            {"routed_experts": with_row([1, 8])},
            "routed_experts gives 1 tokens ids out of range; allowed are 0..7, and -1 for padding",
        ),
        "below": ({"routed_experts": with_row([1, -2])}, "gives 1 tokens ids out of range"),
        "part": ({"routed_experts": with_row([1, -1])}, "gives 1 tokens fewer than K=2 experts"),
        "twice": ({"routed_experts": with_row([5, 5])}, "gives 1 tokens an expert twice"),
        "shape": ({"routed_experts": ids_TK[:, :1]}, r"has shape \(20, 1\), wanted \(20, 2\) for this x"),
        "dtype": ({"routed_experts": ids_TK.float()}, "has dtype torch.float32, wanted torch.int64"),
        "kind": ({"routed_experts": ids_TK.tolist()}, "routed_experts must be a torch.Tensor, got list"),
        "meta": ({"routed_experts": ids_TK.to("meta")}, "routed_experts has no values on the meta device"),
        "mask-shape": ({"padding_mask": mask_T[1:]}, r"padding_mask has shape \(19,\), wanted \(20,\)"),
        "mask-dtype": ({"padding_mask": mask_T.long()}, "padding_mask has dtype torch.int64, wanted torch.bool"),
    }


@pytest.mark.parametrize(("given", "message"), faults().values(), ids=faults())
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    layer = layer_of(EXACT)
    with pytest.raises(ValueError, match=message):
        layer(rows(20), **given)
    layer(rows(20))


def test_padding_does_not_go_with_the_loss_of_sequences() -> None:
    layer = layer_of(EXACT.replace(router=RouterConfig(balance="sequence", balance_coef=0.1)))
    x, mask_BL = rows(20).view(2, 10, 12), torch.zeros(2, 10, dtype=torch.bool)
    with pytest.raises(ValueError, match="set router.balance='global' or 'batch'"):
        layer(x, padding_mask=mask_BL)
    layer(x, routed_experts=drifted_ids(20).view(2, 10, 2))


def test_a_record_without_calls_raises() -> None:
    with record_routing() as record:
        pass
    with pytest.raises(RuntimeError, match="this MoE recorded no routing"):
        record.of(layer_of(EXACT))


# Dynamo looks at the output of what it does not trace.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_takes_both() -> None:
    layer, ids_TK, mask_T = layer_of(SIGMOID), drifted_ids(20), torch.arange(20) % 4 == 0
    compiled, given = torch.compile(layer, backend="eager"), {"routed_experts": ids_TK, "padding_mask": mask_T}
    y, wanted = compiled(rows(20), **given).y, layer(rows(20), **given).y
    assert torch.equal(y, wanted)
    layer.compile(backend="eager")
    assert torch.equal(layer(rows(20), **given).y, wanted)
    y.sum().backward()
    layer.update_expert_bias()
    assert layer.router.expert_bias is not None
    assert layer.router.expert_bias.any()


def test_a_compiled_layer_is_recorded() -> None:
    layer = layer_of(SIGMOID)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for run in (compiled, layer):
        with record_routing() as record:
            run(rows(20))
        assert len(record.of(layer)) == 1
        assert torch.equal(
            record.of(layer)[0], layer.router(rows(20), group=layer.group, sequence_length=20).topk.topk_ids_TK
        )


TRANSPORTS = {
    "all_to_all": TransportConfig(kind="all_to_all"),
    "two_hop": TransportConfig(kind="two_hop", ranks_per_host=1),
}


def given_across_ranks(rank: int, kind: str) -> dict[str, Any]:
    """Ranks of different lengths and paddings, the second one with padding alone."""
    group, seen = EPGroup(), {}
    for name, config in {"rounded": ROUNDED, "exact": EXACT}.items():
        layer = layer_of(config.replace(transport=TRANSPORTS[kind]), group)
        T = 33 + 8 * rank
        x, ids_TK = rows(T, rank), drifted_ids(T, rank)
        is_padding_T = torch.arange(T) % 4 == 1 if rank == 0 else torch.ones(T, dtype=torch.bool)
        wanted = results(layer, x[~is_padding_T])
        ours = results(layer, x, padding_mask=is_padding_T)
        # Gradients differ, because `results` weights y by its shape.
        seen[f"{name} padding"] = torch.equal(ours[0][~is_padding_T], wanted[0]) and torch.equal(ours[1], wanted[1])
        with record_routing() as record:
            wanted = results(layer, x)
        if name == "exact":
            again = results(layer, x, routed_experts=record.of(layer)[0])
            seen["replay"] = all(torch.equal(*pair) for pair in zip(again, wanted, strict=True))
        ids_TK = torch.where(is_padding_T[:, None], -1, ids_TK)
        stats = layer(x, routed_experts=ids_TK).stats
        seen[f"{name} counts"] = (
            stats.counts.rows_SE[rank].tolist() == topk_mask(ids_TK[~is_padding_T], 8).sum(0).tolist()
        )
    return seen


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_across_ranks(ranks: Ranks, kind: str) -> None:
    for seen in ranks(2).run(given_across_ranks, kind):
        assert all(seen.values()), seen


def disagreeing_ranks(rank: int) -> list[str]:
    layer, x, ids_TK = layer_of(ROUNDED, EPGroup()), rows(20, rank), drifted_ids(20, rank)
    found = [message_of(lambda: layer(x, routed_experts=ids_TK if rank else None))]
    found.append(message_of(lambda: layer(x, routed_experts=ids_TK if rank else ids_TK + 8)))
    layer(x, routed_experts=ids_TK)
    layer.eval()
    layer(x, routed_experts=ids_TK if rank else None)  # without rounding either is as good
    return found


def test_ranks_that_disagree_all_raise(ranks: Ranks) -> None:
    for disagree, outside in ranks(2).run(disagreeing_ranks):
        assert "rank 0: torch.float64 training, rank 1: torch.float64 training with routed_experts" in disagree
        assert "routed_experts gives 20 tokens ids out of range" in outside


GPU_CONFIG = MoEConfig(d=256, n=128, E=16, K=4, router=LOSSES, rounding=RoundingConfig(mode="off"))


def repeats_and_skips(rank: int, rounding: RoundingConfig) -> dict[str, bool]:
    """On GPUs, in bf16: several steps, so that programs run, each with another number of tokens that are no padding."""
    layer = MoE(GPU_CONFIG.replace(rounding=rounding), EPGroup(), seed=0, device="cuda", dtype=torch.bfloat16)

    def step(x: Tensor, dy: Tensor, **given: Tensor) -> list[Tensor]:
        layer.zero_grad()
        y, loss, _ = layer(x, **given)
        ((y * dy).float().sum() + loss).backward()
        return [y.detach(), loss.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    seen = {}
    for number in range(6):
        generator = torch.Generator("cuda").manual_seed(8 * number + rank)
        x, dy = torch.randn(2, 700 + 8 * rank, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
        is_padding_T = torch.rand(len(x), device="cuda", generator=generator) < 0.1 * number
        wanted = step(x[~is_padding_T], dy[~is_padding_T])
        y, *others = step(x, dy, padding_mask=is_padding_T)
        seen[f"padding {number}"] = (
            all(map(torch.equal, [y[~is_padding_T], *others], wanted)) and not y[is_padding_T].any()
        )
        if rounding.mode == "off":
            with record_routing() as record:
                wanted = step(x, dy, padding_mask=is_padding_T)
            again = step(x, dy, routed_experts=record.of(layer)[0])
            seen[f"replay {number}"] = all(map(torch.equal, again, wanted))
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mode", ["off", "nearest"])
def test_on_gpus(gpus: Ranks, mode: Any, size: int) -> None:
    for seen in gpus(size).run(repeats_and_skips, RoundingConfig(mode=mode)):
        assert all(seen.values()), seen
