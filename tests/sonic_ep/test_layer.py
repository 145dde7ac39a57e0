"""The layer against the dense float64 oracle: output and every gradient by name, on 1, 2 and 4 real ranks."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep.config import Activation
from sonic_ep.routers.replay import replay_contexts
from sonic_ep.routing import RoutedPairs
from tests.helpers import oracle
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-10
TINY = RoundingConfig(t=4, G=16)


def small(router: RouterConfig | None = None, rounding: RoundingConfig = TINY, **changes: object) -> MoEConfig:
    sizes = {"d": 12, "n": 6, "E": 8, "K": 2, "init_std": 0.5}
    return MoEConfig(router=router or RouterConfig(), rounding=rounding, **{**sizes, **changes})  # type: ignore[arg-type]


LOSSES = RouterConfig(balance="global", balance_coef=0.3, z_loss_coef=0.05)
# In float64 the same arithmetic, by the way that the kernels take: the experts' gradient of x goes through the router.
THROUGH_ROUTER = replace(LOSSES, linear_dtype="input", linear_bias=True)
THROUGH_ROUTER_ALONE = RouterConfig(score="sigmoid", linear_dtype="input", linear_bias=True)
INVARIANT: dict[str, Any] = {"d": 16, "n": 8, "E": 12, "bias": True, "shared_n": 8, "batch_invariant": True}
CASES: dict[str, tuple[MoEConfig, str]] = {
    **{
        f"mode-{mode}": (small(LOSSES, replace(TINY, mode=mode), bias=True, shared_n=5), "ragged")  # type: ignore[arg-type]
        for mode in ("apportion", "nearest", "up", "down", "stochastic", "pad", "off")
    },
    "auto": (small(LOSSES, RoundingConfig()), "ragged"),
    "capacity": (small(rounding=replace(TINY, capacity_factor=1.0)), "skewed"),
    "capacity-off": (small(rounding=RoundingConfig(mode="off", capacity_factor=1.0)), "skewed"),
    "sigmoid": (small(replace(LOSSES, score="sigmoid", scale=2.5)), "ragged"),
    "raw-scores": (small(RouterConfig(renormalize=False, linear_bias=True)), "ragged"),
    "groups-bias": (
        small(RouterConfig(score="sigmoid", num_groups=4, groups_per_token=2, expert_bias=True)),
        "ragged",
    ),
    "batch-loss": (small(replace(LOSSES, balance="batch")), "ragged"),
    "kept-rows": (small(save_dispatched=True, bias=True), "ragged"),
    "through-router": (small(THROUGH_ROUTER, shared_n=5), "ragged"),
    "through-router-kept-rows": (small(THROUGH_ROUTER, save_dispatched=True), "ragged"),
    "through-router-one-rank-empty": (small(THROUGH_ROUTER), "empty"),
    "shared-gate": (small(shared_n=5, shared_gate=True, bias=True, K=3), "ragged"),
    **{f"act-{name}": (small(activation=name, bias=True, shared_n=4), "equal") for name in get_args(Activation)},
    "one-rank-empty": (small(bias=True), "empty"),
    "all-on-one-expert": (small(RouterConfig(renormalize=False), K=1), "skewed"),
    "fewer-tokens-than-t": (small(rounding=RoundingConfig(t=16, G=16)), "few"),
    "every-expert": (small(E=4, K=4), "ragged"),
    "batch-invariant": (small(rounding=RoundingConfig(mode="off"), **INVARIANT), "ragged"),
    "batch-invariant-kept-rows": (
        small(THROUGH_ROUTER_ALONE, RoundingConfig(mode="off"), save_dispatched=True, **INVARIANT),
        "empty",
    ),
}


def tokens_of(kind: str, rank: int) -> int:
    return {"ragged": 37 + 9 * rank, "equal": 40, "skewed": 48, "empty": 0 if rank == 0 else 33, "few": 5}[kind]


def inputs(config: MoEConfig, kind: str, rank: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, of any rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens_of(kind, rank), config.d, dtype=torch.float64, generator=generator)
    dout = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    return x + 2.0 if kind == "skewed" else x, dout


def build(config: MoEConfig, group: EPGroup, kind: str, device: str = "cpu") -> MoE:
    layer = MoE(config, group, seed=3, dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        biases = (layer.router.bias, layer.router.expert_bias, *(layer.shared.parameters() if layer.shared else ()))
        for bias in biases:
            if bias is not None:
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
        for bias in (layer.experts.b1, layer.experts.b2):
            if bias is not None:
                whole = torch.randn(config.E, bias.shape[1], generator=generator)
                bias.copy_(whole[layer.experts.first : layer.experts.first + layer.experts.num_local])
        if kind == "skewed":
            layer.router.weight[3] += 0.5
    return layer.to(device)


def run(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, RoutedPairs]:
    record, _ = replay_contexts()
    with record:
        y, aux, _ = layer(x)
    return y, aux, record.recorded_pairs[id(layer.router)][0]


def whole(local: Tensor | None, group: EPGroup) -> Tensor | None:
    """All ranks' experts."""
    return None if local is None else torch.cat(group.all_gather_object(local.detach().cpu()))


def masks(routed_pairs: RoutedPairs, T: int, E: int) -> tuple[Tensor, Tensor]:
    selected = torch.zeros(T, E, dtype=torch.bool)
    is_pair = routed_pairs.token_ids_N >= 0  # the end of the lists may be spare
    selected[routed_pairs.token_ids_N[is_pair].long().cpu(), routed_pairs.expert_ids_N[is_pair].cpu()] = True
    topk = torch.zeros(T, E, dtype=torch.bool).scatter_(1, routed_pairs.topk_ids_TK.cpu(), True)
    return selected, topk


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().cpu(), wanted.detach().cpu()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30)) if wanted.norm() > 0 else float(got.norm())


def errors_against_oracle(rank: int, config: MoEConfig, kind: str, device: str = "cpu") -> dict[str, float]:
    """Relative error of output, loss and every gradient of this rank."""
    group = EPGroup()
    layer = build(config, group, kind, device)
    x, dout = (values.to(device) for values in inputs(config, kind, rank))
    x.requires_grad_(True)
    y, aux, routed_pairs = run(layer, x)
    ((y * dout).sum() + aux).backward()

    recorded_pairs = group.all_gather_object(replace(routed_pairs, split_sizes=None))
    experts = {n: whole(getattr(layer.experts, n), group) for n in ("w1", "w2", "b1", "b2")}
    experts = {n: w if w is None else w.requires_grad_(True) for n, w in experts.items()}
    per_rank = []
    total = torch.zeros((), dtype=torch.float64)
    counts = sum(masks(s, tokens_of(kind, r), config.E)[1].sum(0) for r, s in enumerate(recorded_pairs))
    for r in range(group.size):
        xr, gr = inputs(config, kind, r)
        leaf = lambda t: None if t is None else t.detach().cpu().clone().requires_grad_(True)  # noqa: E731
        shared = {n: leaf(p) for n, p in layer.shared.named_parameters()} if layer.shared else {}
        weights = oracle.Weights(leaf(layer.router.weight), leaf(layer.router.bias), **experts, shared=shared)  # type: ignore[arg-type]
        xr.requires_grad_(True)
        selected, topk = masks(recorded_pairs[r], xr.shape[0], config.E)
        yr = oracle.dense_moe(xr, weights, selected, topk, config)
        total = total + (yr * gr).sum()
        lr = torch.zeros((), dtype=torch.float64)
        if xr.shape[0]:
            _, logits = oracle.pair_weights(xr, weights, selected, topk, config)
            lr = oracle.losses(logits, topk, counts, config)
            total = total + lr
        per_rank.append((xr, yr, lr, weights))
    total.backward()

    xr, yr, lr, weights = per_rank[rank]
    own = slice(layer.experts.first, layer.experts.first + layer.experts.num_local)
    errors = {"y": relative(y, yr), "aux": relative(aux, lr), "dx": relative(x.grad, xr.grad)}
    for name, weight in experts.items():
        if weight is not None:
            errors["d" + name] = relative(getattr(layer.experts, name).grad, weight.grad[own])
    if xr.shape[0]:
        errors["drouter"] = relative(layer.router.weight.grad, weights.router.grad)
        if weights.router_bias is not None:
            errors["drouter_bias"] = relative(layer.router.bias.grad, weights.router_bias.grad)
    for name, weight in weights.shared.items():
        errors["dshared." + name] = relative(dict(layer.shared.named_parameters())[name].grad, weight.grad)
    return errors


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_match_the_dense_oracle(ranks: Ranks, case: str, ep_size: int) -> None:
    for rank, errors in enumerate(ranks(ep_size).run(errors_against_oracle, *CASES[case])):
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"
        assert {"y", "dx", "dw1", "dw2"} <= errors.keys()


# Every rounding mode; T = 0 on a rank; other numbers of tokens and experts a token; rows kept for backward.
TWO_HOP_CASES = [name for name in CASES if name.startswith("mode-")]
TWO_HOP_CASES += ["one-rank-empty", "shared-gate", "kept-rows", "capacity", "all-on-one-expert", "groups-bias"]


@pytest.mark.parametrize(
    ("ep_size", "ranks_per_host", "case"),
    [
        *((4, 2, case) for case in TWO_HOP_CASES),
        *((8, per_host, case) for per_host in (2, 4) for case in ("mode-apportion", "one-rank-empty")),
    ],
)
def test_two_hops_match_the_dense_oracle(ranks: Ranks, case: str, ep_size: int, ranks_per_host: int) -> None:
    config, kind = CASES[case]
    config = config.replace(transport=TransportConfig(kind="two_hop", ranks_per_host=ranks_per_host))
    for rank, errors in enumerate(ranks(ep_size).run(errors_against_oracle, config, kind)):
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"
        assert {"y", "dx", "dw1", "dw2"} <= errors.keys()


def changed_by_rounding(rank: int, config: MoEConfig) -> tuple[float, float]:
    layer = build(config, EPGroup(), "ragged")
    x, _ = inputs(config, "ragged", rank)
    training = float(layer(x).stats.changed_share)
    return training, float(layer.eval()(x).stats.changed_share)


def test_the_cases_do_round(ranks: Ranks) -> None:
    for training, evaluating in ranks(4).run(changed_by_rounding, small()):
        assert training > 0.02
        assert evaluating == 0


# --- a step of EP=4 equals a step of EP=1 given the same selection ------------------------------------------------


def merged(recorded_pairs: list[RoutedPairs], tokens: list[int]) -> RoutedPairs:
    """The selections of all ranks as one rank's over the concatenated tokens."""
    offsets = torch.tensor(tokens).cumsum(0) - torch.tensor(tokens)
    token_ids = torch.cat([s.token_ids_N.long() + o for s, o in zip(recorded_pairs, offsets, strict=True)])
    expert_ids = torch.cat([s.expert_ids_N for s in recorded_pairs])
    order = torch.argsort(expert_ids * sum(tokens) + token_ids)
    counts = recorded_pairs[0].counts
    one = counts._replace(
        chosen_SE=counts.chosen_SE.sum(0, keepdim=True),
        rows_SE=counts.pairs_SE.sum(0, keepdim=True),
        pairs_SE=counts.pairs_SE.sum(0, keepdim=True),
        tokens_S=counts.tokens_S.sum(0, keepdim=True),
        cut_S=counts.cut_S.sum(0, keepdim=True),
    )
    return RoutedPairs(
        torch.cat([s.topk_ids_TK for s in recorded_pairs]),
        token_ids[order].int(),
        expert_ids[order],
        torch.cat([s.chosen_N for s in recorded_pairs])[order],
        one,
        None,
    )


def step_difference(rank: int, config: MoEConfig) -> dict[str, float]:
    """Largest relative difference of any parameter's change over one Adam step, EP=4 against EP=1."""
    group = EPGroup()
    layer, alone = build(config, group, "ragged"), build(config, EPGroup.alone(), "ragged")
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    x, dout = inputs(config, "ragged", rank)
    y, aux, routed_pairs = run(layer, x)
    ((y * dout).sum() + aux / group.size).backward()
    for parameter in layer.parameters():
        if getattr(parameter, "allreduce", True):
            dist.all_reduce(parameter.grad)
    recorded_pairs = group.all_gather_object(replace(routed_pairs, split_sizes=None))
    tokens = [tokens_of("ragged", r) for r in range(group.size)]
    record, replay = replay_contexts()
    record.recorded_pairs[id(alone.router)] = [merged(recorded_pairs, tokens)]
    everything = [inputs(config, "ragged", r) for r in range(group.size)]
    with replay:
        y1, _, _ = alone(torch.cat([x for x, _ in everything]))
    (y1 * torch.cat([g for _, g in everything])).sum().backward()
    for model in (layer, alone):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    references = dict(alone.named_parameters())
    differences = {}
    for name, parameter in layer.named_parameters():
        wanted = references[name]
        if name.startswith("experts."):
            wanted = wanted[layer.experts.first : layer.experts.first + layer.experts.num_local]
        assert not torch.equal(before[name], parameter), name
        differences[name] = relative(parameter.detach(), wanted.detach())
    return differences


def test_a_step_at_ep_4_equals_one_at_ep_1_given_the_selection(ranks: Ranks) -> None:
    for differences in ranks(4).run(step_difference, small(bias=True, shared_n=5)):
        assert max(differences.values()) < TOLERANCE, differences


# --- exact modes ---------------------------------------------------------------------------------------------------


def outputs_of_modes(rank: int, config: MoEConfig) -> dict[str, Tensor]:
    """Outputs and dx of modes that must equal plain top-K; integer data makes every GEMM sum exact."""
    results = {}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-3, 4, (45, config.d), generator=generator).double()
    dout = torch.randint(-3, 4, x.shape, generator=generator).double()
    for name, rounding, training in (
        ("off", RoundingConfig(mode="off"), True),
        ("pad", RoundingConfig(mode="pad", t=8, G=16), True),
        ("auto below every threshold", RoundingConfig(), True),
        ("eval", RoundingConfig(t=8, G=16), False),
    ):
        layer = MoE(config.replace(rounding=rounding), EPGroup(), seed=3, dtype=torch.float64).double()
        with torch.no_grad():
            for weight in (layer.experts.w1, layer.experts.w2):
                weight.copy_((weight * 4).round())
        leaf = x.clone().requires_grad_(True)
        y, _, _ = layer.train(training)(leaf)
        results[name] = y.detach()
        if training:
            (y * dout).sum().backward()
            results[name + " dw2"] = layer.experts.w2.grad
    return results


@pytest.mark.parametrize("ep_size", [1, 4])
def test_pad_off_and_eval_are_plain_top_k_bit_for_bit(ranks: Ranks, ep_size: int) -> None:
    config = small(RouterConfig(score="sigmoid", renormalize=False), activation="relu2")
    for results in ranks(ep_size).run(outputs_of_modes, config):
        for name in ("pad", "auto below every threshold", "eval"):
            assert torch.equal(results[name], results["off"]), name
        assert results["off"].abs().max() > 1


# --- half precision ------------------------------------------------------------------------------------------------


def half_error(rank: int, dtype: torch.dtype) -> tuple[float, torch.dtype, torch.dtype]:
    config = small(d=64, n=32)
    layer = MoE(config, EPGroup(), seed=1, dtype=dtype)
    exact = MoE(config, EPGroup(), seed=1, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in exact.experts.named_parameters():
            parameter.copy_(dict(layer.experts.named_parameters())[name])
    x = torch.randn(64, 64).to(dtype)
    y = layer(x).y
    return relative(y.float(), exact(x.float()).y), y.dtype, layer.router.weight.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_fp32(ranks: Ranks, dtype: torch.dtype) -> None:
    for error, out_dtype, router_dtype in ranks(2).run(half_error, dtype):
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)
        assert (out_dtype, router_dtype) == (dtype, torch.float32)


def test_autocast_casts_rows_and_expert_weights() -> None:
    layer = MoE(small(), seed=0)
    x = torch.randn(30, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x).y
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert layer.experts.w1.grad is not None
    assert (x.grad.dtype, layer.experts.w1.grad.dtype) == (torch.float32, torch.float32)


def test_autocast_is_the_arithmetic_of_a_half_precision_layer() -> None:
    layer, half = MoE(small(), seed=0), MoE(small(), seed=0)
    half.experts.bfloat16()
    x = torch.randn(40, 12)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x).y
        y.float().square().sum().backward()  # in it, as some trainers do
    wanted = half(x.bfloat16()).y
    wanted.float().square().sum().backward()
    assert torch.equal(y, wanted)
    assert layer.experts.w1.grad is not None
    assert half.experts.w1.grad is not None
    assert torch.equal(layer.experts.w1.grad, half.experts.w1.grad.float())


def a_copy_of_a_layer(rank: int) -> bool:
    """Does it compute what the layer does, among the same ranks?"""
    layer = MoE(small(), EPGroup(), seed=0)
    other = copy.deepcopy(layer)
    x = torch.randn(20 + rank, 12)
    return torch.equal(layer(x).y, other(x).y) and other.experts.w1.data_ptr() != layer.experts.w1.data_ptr()


def test_a_layer_of_several_ranks_can_be_copied(ranks: Ranks) -> None:
    assert ranks(2).run(a_copy_of_a_layer) == [True, True]


def test_sequences_keep_their_shape_and_balance_per_sequence() -> None:
    layer = MoE(small(RouterConfig(balance="sequence", balance_coef=1.0)), seed=0)
    x = torch.randn(3, 10, 12)
    y, aux, _ = layer(x)
    assert y.shape == x.shape
    each = [layer(x[i : i + 1]).aux_loss for i in range(3)]
    torch.testing.assert_close(aux, torch.stack(each).mean())


def test_an_evaluation_in_inference_mode_leaves_a_layer_that_trains() -> None:
    """Also where it is the first to bring the router's counts to a device."""
    config = small(RouterConfig(expert_bias=True))
    layer, x = MoE(config, device="meta"), torch.randn(6, config.d)
    layer.load_state_dict(MoE(config, seed=0).state_dict(), assign=True)
    with torch.inference_mode():
        layer.eval()(x)
    layer.train()(x).y.sum().backward()
    layer.update_expert_bias()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_values_give_equal_bits_whatever_their_strides(dtype: torch.dtype) -> None:
    layer = MoE(small(RouterConfig(balance="batch", balance_coef=0.1)), seed=0, dtype=dtype)
    values = torch.randn(40, layer.config.d, dtype=dtype)
    strided = torch.empty(layer.config.d, 80, dtype=dtype).T[::2].copy_(values)
    results = []
    for x in (values, strided):
        x = x.detach().requires_grad_()
        out = layer(x)
        results.append(
            [out.y, out.aux_loss, *torch.autograd.grad(out.y.sum() + out.aux_loss, [x, *layer.parameters()])]
        )
    assert not strided.is_contiguous()
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_stats_count_tokens_with_bad_logits(score: str, bad: float) -> None:
    layer = MoE(small(RouterConfig(score=score)), seed=0)  # type: ignore[arg-type]
    x = torch.randn(6, layer.config.d)
    assert layer(x).stats.tokens_with_bad_logits == 0
    x[[1, 4], 2] = bad
    assert layer(x).stats.tokens_with_bad_logits == 2


def test_all_that_a_layer_gives_are_tensors() -> None:
    """To torch, which graphs nothing else."""
    layer = MoE(small(), seed=0)
    assert all(isinstance(leaf, Tensor) for leaf in tree_leaves(layer(torch.randn(6, layer.config.d))))


def test_hooks_of_experts_are_called() -> None:
    """By which torch's pruning makes the weights anew in every step."""
    config = small(rounding=RoundingConfig(mode="off"))
    layer, x = MoE(config, seed=0), torch.randn(6, config.d)
    with torch.no_grad():
        prune.l1_unstructured(layer.experts, "w1", amount=0.5)
    original: Any = layer.experts.w1_orig
    for _ in range(2):
        layer(x).y.square().sum().backward()
        assert original.grad.abs().sum() > 0
        with torch.no_grad():
            original -= 1e-3 * original.grad
    layer(x)
    assert torch.equal(layer.experts.w1, original * layer.experts.w1_mask)
