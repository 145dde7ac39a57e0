"""The router as a module: plain top-K where nothing may be rounded, dtypes, bias, and the gradient of what it returns.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, N pairs this rank sends.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.route.status.reference import NO_UPDATES
from sonic_ep.routers.replay import replay_contexts
from sonic_ep.routers.router import Routed, Router

H = 5
ALONE = EPGroup.alone()
MODES = ("apportion", "nearest", "up", "down", "stochastic", "pad", "off")


def make_router(E: int = 8, K: int = 2, *, rounding: Any = None, seed: int = 0, **options: Any) -> Router:
    config = MoEConfig(
        d=H, n=4, E=E, K=K, router=RouterConfig(**options), rounding=rounding or RoundingConfig(mode="off")
    )
    router = Router(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(seed))
    return router


def identity_router(E: int, K: int = 1, *, rounding: RoundingConfig | None = None, **options: Any) -> Router:
    """Its logits are x itself."""
    options.setdefault("renormalize", K > 1)
    router = Router(
        MoEConfig(d=E, n=4, E=E, K=K, router=RouterConfig(**options), rounding=rounding or RoundingConfig())
    )
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    return router


def route(router: Router, x_TH: Tensor) -> Routed:
    return router(x_TH, group=ALONE, sequence_length=x_TH.shape[0])


def train(router: Router, x_TH: Tensor) -> Routed:
    """Routes, and a backward follows."""
    routed = route(router, x_TH)
    weights_N = routed.routing.weights_N
    router.count_in_backward(weights_N, routed.routing.counts)
    weights_N.sum().backward()
    return routed


def expert_ids(routed: Routed) -> Tensor:
    """Pairs are in expert order, as many as the counts say."""
    return torch.repeat_interleave(routed.routing.counts.pairs_SE[0])


def plain_topk(router: Router, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, expert ids and gates of plain top-K, in expert order: the textbook, in the arithmetic of x."""
    config = router.config.router
    logits_TE = F.linear(x_TH, router.weight)
    scores_TE = logits_TE.softmax(1) if config.score == "softmax" else logits_TE.sigmoid()
    scores_TK, ids_TK = scores_TE.topk(router.config.K, dim=1)
    if config.renormalize:
        scores_TK = scores_TK / scores_TK.sum(1, keepdim=True)
    pairs = sorted((int(ids_TK[t, k]), t, k) for t in range(x_TH.shape[0]) for k in range(router.config.K))
    experts, tokens, ks = torch.tensor(pairs, dtype=torch.int64).view(-1, 3).unbind(1)
    return tokens, experts, scores_TK[tokens, ks]


def assert_plain(routed: Routed, router: Router, x_TH: Tensor) -> None:
    tokens, experts, pair_weights = plain_topk(router, x_TH)
    assert torch.equal(routed.routing.token_ids_N.long(), tokens)
    assert torch.equal(expert_ids(routed), experts)
    assert torch.equal(routed.routing.weights_N, pair_weights)
    assert routed.stats().changed_share == 0


# Plain top-K, bit for bit.


@given(
    T=st.integers(0, 40),
    shape=st.sampled_from([(1, 1), (4, 1), (8, 2), (8, 8), (33, 5)]),
    score=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_off_pad_and_eval_are_plain_topk_bit_for_bit(
    T: int, shape: tuple[int, int], score: str, renormalize: bool, seed: int
) -> None:
    x_TH = torch.randn(T, H, generator=torch.Generator().manual_seed(seed))
    for mode in MODES:
        rounding = RoundingConfig(mode=mode, t=4, G=8)  # type: ignore[arg-type]
        weights = {"score": score, "renormalize": renormalize and shape[1] > 1}
        router = make_router(*shape, rounding=rounding, seed=seed, **weights)
        if mode in ("off", "pad"):
            assert_plain(route(router, x_TH), router, x_TH)
        assert_plain(route(router.eval(), x_TH), router, x_TH)


@pytest.mark.parametrize("mode", MODES)
def test_eval_never_rounds_never_cuts_and_never_jitters(mode: str) -> None:
    rounding = RoundingConfig(mode=mode, t=16, G=16, capacity_factor=1.0)  # type: ignore[arg-type]
    router = make_router(rounding=rounding, jitter=0.5).eval()
    x_TH = torch.randn(50, H) + 1
    routed = route(router, x_TH)
    assert_plain(routed, router, x_TH)
    counts = routed.routing.counts
    assert counts.t == 1
    assert torch.equal(counts.rows_SE, counts.chosen_SE)
    assert counts.cut_S.tolist() == [0]


def test_pad_fills_its_chunks_with_rows_that_are_no_pairs() -> None:
    routed = route(make_router(rounding=RoundingConfig(mode="pad", t=16)), torch.randn(50, H))
    counts = routed.routing.counts
    assert torch.equal(counts.pairs_SE, counts.chosen_SE)
    assert torch.equal(counts.rows_SE, (counts.chosen_SE + 15) // 16 * 16)
    assert routed.stats().pad_share.item() == pytest.approx(1 - 100 / int(counts.rows_SE.sum()))


# Rounding.


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("T", [0, 3, 50])
@pytest.mark.parametrize("mode", MODES)
def test_what_comes_out_is_what_the_counts_say(mode: str, T: int, groups: int) -> None:
    rounding = RoundingConfig(mode=mode, t=8, G=16)  # type: ignore[arg-type]
    router = make_router(rounding=rounding, num_groups=groups, groups_per_token=max(1, groups // 2))
    routed = route(router, torch.randn(T, H))
    routing, counts = routed.routing, routed.routing.counts
    assert routing.num_tokens == T
    assert routing.token_ids_N.dtype == torch.int32
    assert routing.weights_N.shape == routing.token_ids_N.shape == (int(counts.pairs_SE.sum()),)
    for ids in routing.token_ids_N.split(counts.pairs_SE[0].tolist()):
        assert ids.tolist() == sorted(set(ids.tolist())), "tokens of an expert: ascending, none twice"
        assert all(0 <= token < T for token in ids.tolist())
    assert (routing.weights_N > 0).all()


@pytest.mark.parametrize(
    ("mode", "pairs"), [("apportion", 96), ("nearest", 96), ("up", 100), ("down", 96), ("pad", 100)]
)
def test_all_tokens_on_one_expert(mode: str, pairs: int) -> None:
    router = identity_router(4, rounding=RoundingConfig(mode=mode, t=32, G=32))  # type: ignore[arg-type]
    x_TH = torch.zeros(100, 4)
    x_TH[:, 2] = torch.linspace(0.1, 1, 100)
    routed = route(router, x_TH)
    assert routed.routing.counts.chosen_SE.tolist() == [[0, 0, 100, 0]]
    assert routed.routing.counts.pairs_SE.tolist() == [[0, 0, pairs, 0]]
    # The lowest scores are the first to go.
    assert routed.routing.token_ids_N.tolist() == list(range(100 - pairs, 100))


def test_a_seed_fixes_the_stochastic_selection() -> None:
    router = make_router(rounding=RoundingConfig(mode="stochastic", t=8, G=8))
    x_TH = torch.randn(50, H)
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rows.append(route(router, x_TH).routing.counts.rows_SE.tolist())
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("mode", MODES)
def test_only_stochastic_rounding_in_training_draws_random_numbers(mode: str) -> None:
    router = make_router(rounding=RoundingConfig(mode=mode, t=8, G=8))  # type: ignore[arg-type]
    for training in (True, False):
        before = torch.get_rng_state()
        route(router.train(training), torch.randn(9, H, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(torch.get_rng_state(), before) == (mode != "stochastic" or not training)


# Logits.


def test_jitter_scales_the_input_within_its_bounds_in_training_only() -> None:
    router = identity_router(64, jitter=0.25)
    logits_TE = router.logits(torch.ones(50, 64))[0]
    assert 0.75 <= logits_TE.min() < 0.76
    assert 1.24 < logits_TE.max() <= 1.25
    assert torch.equal(router.eval().logits(torch.ones(50, 64))[0], torch.ones(50, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_fp32_whatever_the_input_and_autocast(dtype: torch.dtype) -> None:
    router = make_router(E=16, linear_bias=True).to(dtype)
    x_TH = torch.randn(9, H, dtype=dtype)
    expected = F.linear(x_TH.float(), router.weight.float(), router.bias.float())  # type: ignore[union-attr]
    assert torch.equal(router.logits(x_TH)[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router.logits(x_TH)[0], expected)


def test_linear_bias_is_a_bias_of_the_logits() -> None:
    router = make_router(linear_bias=True)
    assert router.bias is not None
    with torch.no_grad():
        router.bias.copy_(torch.arange(8.0))
    x_TH = torch.randn(3, H, dtype=torch.float64)
    expected = x_TH @ router.weight.double().T + torch.arange(8.0, dtype=torch.float64)
    torch.testing.assert_close(router.logits(x_TH)[0], expected)
    assert router.logits(x_TH)[0].dtype == torch.float64


def test_gradient_of_gates_and_losses_is_the_dense_formulas() -> None:
    options: dict[str, Any] = {"balance": "batch", "balance_coef": 0.2, "z_loss_coef": 0.1, "scale": 1.5}
    router = make_router(rounding=RoundingConfig(mode="nearest", t=8, G=8), linear_bias=True, **options).double()
    parameters = dict(router.named_parameters())
    x_TH = torch.randn(20, H, dtype=torch.float64, requires_grad=True)
    routed = route(router, x_TH)
    weight_N = torch.randn(routed.routing.weights_N.shape, dtype=torch.float64)
    given_ids, experts = routed.routing.token_ids_N.long(), expert_ids(routed)
    ours = torch.autograd.grad(routed.routing.weights_N @ weight_N + routed.aux_loss, [x_TH, *parameters.values()])

    logits_TE = x_TH @ parameters["weight"].T + parameters["bias"]
    exponentials_TE = logits_TE.exp()
    scores_TE = exponentials_TE / exponentials_TE.sum(1, keepdim=True)
    chosen_TE = torch.zeros(20, 8, dtype=torch.float64).scatter_(1, logits_TE.topk(2, 1).indices, 1.0)
    remaining_TE = scores_TE * chosen_TE
    weights_TE = torch.where(chosen_TE > 0, remaining_TE / remaining_TE.sum(1, keepdim=True), scores_TE) * 1.5
    loss = weights_TE[given_ids, experts] @ weight_N
    loss = loss + 0.2 * 8 * (chosen_TE.mean(0) / 2 * scores_TE.mean(0)).sum()
    loss = loss + 0.1 * exponentials_TE.sum(1).log().square().mean()
    theirs = torch.autograd.grad(loss, [x_TH, *parameters.values()])
    for name, mine, expected in zip(("x", *parameters), ours, theirs, strict=True):
        torch.testing.assert_close(
            mine, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("mode", ["off", "apportion"])
def test_what_is_to_be_done_meanwhile_is_done_once(mode: str) -> None:
    """In training, in eval, and again where the decision is replayed; with gradients, whatever the router needs."""
    router, x_TH = make_router(rounding=RoundingConfig(mode=mode)), torch.randn(9, H, requires_grad=True)  # type: ignore[arg-type]
    done: list[bool] = []

    def run(x_TH: Tensor) -> Tensor:
        routed = router(x_TH, group=ALONE, sequence_length=9, meanwhile=lambda: done.append((2 * x_TH).requires_grad))
        return routed.routing.weights_N

    run(x_TH)
    router.eval()
    run(x_TH)
    assert done == [True, True]
    router.train()
    checkpoint(run, x_TH, use_reentrant=False, context_fn=replay_contexts).sum().backward()
    assert done == [True] * 4


def test_no_tokens_give_a_gradient_of_zero() -> None:
    router = make_router(rounding=RoundingConfig(), balance="global", balance_coef=0.1, z_loss_coef=0.1)
    routed = route(router, torch.empty(0, H))
    assert routed.aux_loss.item() == 0
    (routed.routing.weights_N.sum() + routed.aux_loss).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))  # type: ignore[arg-type]


# The bias of auxiliary-loss-free balancing.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_expert_bias_stays_fp32_when_the_model_is_cast(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(make_router(expert_bias=True))
    router = model[0]
    assert isinstance(router, Router)
    assert router.expert_bias is not None
    router.expert_bias.fill_(0.001)
    model.to(dtype)
    assert router.weight.dtype == dtype
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias.tolist() == torch.full((8,), 0.001).tolist()
    assert router.state_dict()["expert_bias"].dtype == torch.float32
    assert copy.deepcopy(router).expert_bias.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["argument", "context"])
def test_a_router_on_meta_can_be_given_memory(by: str, dtype: torch.dtype) -> None:
    config = MoEConfig(d=H, n=4, E=8, K=2, router=RouterConfig(expert_bias=True))
    if by == "argument":
        router = Router(config, device="meta")
    else:
        with torch.device("meta"):
            router = Router(config)
    router.to(dtype).to_empty(device="cpu")
    assert router.expert_bias is not None
    assert router.expert_bias.device == router.weight.device == torch.device("cpu")
    assert router.weight.dtype == dtype
    assert router.expert_bias.dtype == torch.float32
    torch.nn.init.normal_(router.weight)
    router.expert_bias.zero_()
    train(router, torch.randn(4, H))
    router.update_expert_bias()
    assert router.expert_bias.abs().sum() > 0


def test_what_is_read_into_a_router_is_fp32_and_starts_to_count_anew() -> None:
    router = make_router(expert_bias=True)
    saved = {name: value.bfloat16() for name, value in router.state_dict().items()}
    train(router, torch.randn(4, H))
    assert router._counts_since_update_E.any()
    torch.nn.ModuleList([router]).load_state_dict({f"0.{name}": value for name, value in saved.items()}, assign=True)
    assert router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32
    assert not router._counts_since_update_E.any()
    train(router, torch.randn(4, H))
    router.initialize(0.02, torch.Generator())
    assert not router._counts_since_update_E.any()


def test_an_initialised_router_has_a_drawn_weight_and_no_biases() -> None:
    router = make_router(E=64, linear_bias=True, expert_bias=True)
    assert router.bias is not None
    assert router.expert_bias is not None
    for bias in (router.bias.data, router.expert_bias):
        bias.fill_(1.0)
    router.initialize(0.3, torch.Generator().manual_seed(1))
    assert 0.27 < router.weight.std() < 0.33
    assert not router.bias.any()
    assert not router.expert_bias.any()


def test_update_counts_plain_choices_since_the_last_update_in_training_only() -> None:
    # Every pair is dropped by `down`; the bias must move by what the tokens chose.
    router = identity_router(4, rounding=RoundingConfig(mode="down", t=64), expert_bias=True, expert_bias_rate=0.125)
    ones = torch.eye(4)
    train(router, ones[[0, 0, 1, 2]])
    train(router, ones[[0, 1, 1, 2]])  # with the first: 3, 3, 2, 0 tokens
    train(router.eval(), ones[[3, 3, 3, 3]])
    router.train().update_expert_bias()
    assert router.expert_bias is not None
    assert router.expert_bias.tolist() == [-0.125, -0.125, 0.0, 0.125]
    assert int(router._bias_updates) == NO_UPDATES + 1
    # Counting starts anew.
    router.update_expert_bias()
    assert router.expert_bias.tolist() == [-0.125, -0.125, 0.0, 0.125]
    train(router, ones[[2, 2, 2, 3]])
    router.update_expert_bias()
    assert router.expert_bias.tolist() == [0.0, 0.0, -0.125, 0.125]


def test_within_an_expert_tokens_are_ranked_by_score_alone() -> None:
    """A large bias takes the last bits of score + bias: then all tokens of an expert would rank alike, by their ids."""
    rounding = RoundingConfig(mode="down", t=2, G=2)
    router = identity_router(2, rounding=rounding, expert_bias=True, score="sigmoid")
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor([1000.0, 0.0]))
    logits = torch.tensor([0.0, 3e-6, 2e-6, 1e-6, 4e-6])
    x_TH = torch.stack([logits, torch.zeros(5)], 1)
    assert len({float(score + 1000) for score in logits.sigmoid()}) == 1
    routed = route(router, x_TH)
    assert routed.routing.counts.pairs_SE.tolist() == [[4, 0]]
    assert routed.routing.token_ids_N[:4].tolist() == [1, 2, 3, 4]  # all but the lowest score, which has the first id


def test_update_spreads_a_stuck_router() -> None:
    router = identity_router(4, expert_bias=True, expert_bias_rate=0.01, score="sigmoid")
    x_TH = torch.randn(200, 4) + torch.tensor([4.0, 0.0, 0.0, 0.0])
    loads = []
    for _ in range(100):
        loads.append(train(router, x_TH).stats().expert_load_max_over_mean)
        router.update_expert_bias()
    assert loads[0] > 3
    assert loads[-1] < 1.3


def test_update_without_a_bias_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"router\.expert_bias=False.*true"):
        make_router().update_expert_bias()


# Errors.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_logits_raise_with_their_number_where_asked_for(bad: float) -> None:
    x_TH = torch.randn(6, H)
    x_TH[1, 3] = x_TH[4, 0] = bad
    routed = route(make_router(check_logits=True), x_TH)
    with pytest.raises(ValueError, match=r"NaN or inf.*rank 0: 16.*check_logits"):
        routed.routing.check()
    assert route(make_router(), x_TH).routing.num_tokens == 6


def test_a_problem_is_raised() -> None:
    with pytest.raises(ValueError, match="x has 3 legs"):
        make_router()(torch.randn(6, H), group=ALONE, sequence_length=6, problem="x has 3 legs")
