"""Random configurations: outputs, routes and every gradient of all ranks against the dense float64 oracle.

Of the transports those that run on CPU tensors; the others have tests of their own that they give equal bits.

Legend: T tokens on this rank, S ranks of the EP group.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig, replay_contexts
from sonic_ep.config import Activation
from sonic_ep.routing import RoutedPairs
from tests.fuzz.routing_oracle import Routes, route
from tests.helpers import oracle
from tests.helpers.launch import RankPool

TIMEOUT = 60.0
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-4}
PARTS = ("x", "experts", "router", "shared")
MODES = ("apportion", "nearest", "up", "down", "stochastic", "pad", "off")


class Case(NamedTuple):
    """A layer and what it is given.

    shapes: of x without d, by step and rank; gradients of all steps are accumulated. frozen: which of PARTS need no
    gradient. ties: small integers, so that many scores are equal. scale: of x.
    """

    config: MoEConfig
    dtype: torch.dtype
    shapes: list[list[tuple[int, ...]]]
    training: bool
    frozen: tuple[str, ...]
    checkpointed: bool
    strided: bool
    ties: bool
    scale: float
    seed: int


def random_router(rng: random.Random, E: int, K: int) -> RouterConfig:
    """K: the experts that the groups must leave."""
    groups = [g for g in (2, 3, 4) if E % g == 0 and E // g >= 2 and g > 1]
    num_groups = rng.choice([1, *groups]) if rng.random() < 0.4 else 1
    balance = rng.choice(["none", "sequence", "batch", "global"])
    return RouterConfig(
        score=rng.choice(["softmax", "sigmoid"]),
        renormalize=not (K == 1 < E) and rng.random() < 0.7,
        scale=rng.choice([1.0, 2.5]),
        linear_bias=rng.random() < 0.3,
        linear_dtype=rng.choice(["float32", "input"]),
        num_groups=num_groups,
        groups_per_token=rng.randint(-(-K * num_groups // E), num_groups),
        expert_bias=rng.random() < 0.3,
        expert_bias_rate=0.2,
        balance=balance,  # type: ignore[arg-type]
        balance_coef=0.0 if balance == "none" else 0.3,
        z_loss_coef=rng.choice([0.0, 0.05]),
        jitter=rng.choice([0.0, 0.0, 0.1]),
        check_logits=rng.random() < 0.2,
    )


def random_config(rng: random.Random, S: int) -> MoEConfig:
    E = S * rng.randint(1, 12 // S)
    K, t = rng.randint(1, min(4, E)), rng.choice([1, 2, 3, 4, 8])
    mode = rng.choice(MODES)
    # How many rows a stochastic chunk had before a cut cannot be seen from outside.
    capacity = None if mode == "stochastic" else rng.choice([None, None, 1.0, 1.25, 2.0])
    rounding = RoundingConfig(
        mode=mode,  # type: ignore[arg-type]
        t=rng.choice(["auto", t, t]),
        G=rng.choice([t, 2 * t, 4 * t, 16 * t]),
        capacity_factor=capacity,
    )
    shared_n = rng.choice([0, 0, 1, 5])
    return MoEConfig(
        d=rng.choice([1, 2, 7, 8, 12, 17]),
        n=rng.choice([1, 3, 6, 8]),
        E=E,
        K=K,
        activation=rng.choice(get_args(Activation)),
        bias=rng.random() < 0.5,
        shared_n=shared_n,
        shared_gate=shared_n > 0 and rng.random() < 0.5,
        init_std=0.5,
        save_dispatched=rng.random() < 0.5,
        router=random_router(rng, E, K),
        rounding=rounding,
        transport=random_transport(rng, S),
    )


def random_transport(rng: random.Random, S: int) -> TransportConfig:
    """The one that a CPU's ranks take, or two hops over imitated hosts."""
    per_host = rng.choice([None, None, *(size for size in range(1, S + 1) if S % size == 0)])
    return TransportConfig() if per_host is None else TransportConfig(kind="two_hop", ranks_per_host=per_host)


def random_case(seed: int, S: int, number: int) -> Case:
    rng = random.Random(f"configuration {seed} {S} {number}")
    config, ties = random_config(rng, S), rng.random() < 0.15
    dtype = torch.float64 if ties or rng.random() < 0.7 else torch.float32
    if ties:
        config = config.replace(router=replace(config.router, jitter=0.0))
    if dtype == torch.float32 and config.activation == "reglu":  # its derivative jumps where fp32 changes a sign
        config = config.replace(activation="geglu")
    sequences = config.router.balance == "sequence" or rng.random() < 0.3
    most = rng.choice([1, 3, 20, 60])

    def shape() -> tuple[int, ...]:
        T = rng.choice([0, rng.randint(0, most), rng.randint(1, most), most])
        return (rng.randint(0, 3), T) if sequences else (T,)

    return Case(
        config,
        dtype,
        [[shape() for _ in range(S)] for _ in range(rng.choice([1, 1, 2]))],
        training=rng.random() < 0.85,
        frozen=tuple(rng.sample(PARTS, rng.randint(1, 2))) if rng.random() < 0.25 else (),
        checkpointed=rng.random() < 0.2,
        strided=rng.random() < 0.2,
        ties=ties,
        # Sigmoids near 1 have few digits of their derivative in fp32.
        scale=rng.choice([1.0, 1.0, 1.0, 10.0 if dtype == torch.float64 else 1.0, 1e-3, 0.0]),
        seed=rng.randrange(2**31),
    )


def inputs(case: Case, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """x, and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.seed + 100 * step + rank)
    *lead, d = *case.shapes[step][rank], case.config.d
    if case.ties:
        x = torch.randint(-1, 2, (*lead, d), generator=generator).double()
    else:
        x = torch.randn(*lead, d, dtype=torch.float64, generator=generator) * case.scale
    dout = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    x, dout = x.to(case.dtype), dout.to(case.dtype)
    return (x.transpose(0, -1).contiguous().transpose(0, -1) if case.strided else x), dout


def build(case: Case) -> MoE:
    layer = MoE(case.config, EPGroup(), seed=case.seed, dtype=case.dtype).to(case.dtype).train(case.training)
    generator, router, experts = torch.Generator().manual_seed(case.seed), layer.router, layer.experts
    with torch.no_grad():
        shared_biases = [p for name, p in layer.named_parameters() if name.startswith("shared.") and "bias" in name]
        for bias in (router.bias, router.expert_bias, *shared_biases):
            if bias is not None:
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
        for bias in (experts.b1, experts.b2):
            if bias is not None:
                whole = torch.randn(case.config.E, bias.shape[1], generator=generator)
                bias.copy_(whole[experts.first : experts.first + experts.num_local])
        if case.ties:
            router.weight.copy_(0.5 * torch.randint(-2, 3, router.weight.shape, generator=generator))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in case.frozen)
    return layer


def run(case: Case, layer: MoE, step: int, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, RoutedPairs]:
    """Forward and backward of one step."""
    records: list[Any] = []

    def contexts() -> tuple[Any, Any]:
        record, again = replay_contexts()
        records.append(record)
        return record, again

    torch.manual_seed(case.seed + step)  # of jitter
    if case.checkpointed:
        y, aux = checkpoint(lambda x: layer(x)[:2], x, use_reentrant=False, context_fn=contexts)
    else:
        with contexts()[0]:
            y, aux, _ = layer(x)
    if y.requires_grad:
        ((y * dout).sum() + aux).backward()
    return y.detach(), aux.detach(), records[0].recorded_pairs[id(layer.router)][0]


class Reference:
    """The oracle's weights: float64 leaves of all experts, and of every rank's router and shared expert."""

    def __init__(self, layer: MoE) -> None:
        self.layer, group = layer, layer.group
        of_ranks = [_leaves(each) for each in group.all_gather_object(_values(layer.experts))]
        self.experts = of_ranks[0] if group.size == 1 else {
            name: torch.cat([each[name].detach() for each in of_ranks]).requires_grad_() for name in of_ranks[0]
        }  # fmt: skip
        self.of_rank = []
        for _ in range(group.size):
            router, shared = _leaves(_values(layer.router)), {} if layer.shared is None else _values(layer.shared)
            experts = [self.experts.get(name) for name in ("w1", "w2", "b1", "b2")]
            self.of_rank.append(oracle.Weights(router["weight"], router.get("bias"), *experts, _leaves(shared)))  # type: ignore[arg-type]

    def gradients(self) -> dict[str, Tensor]:
        """By the names of the layer's parameters, for this rank."""
        own, experts = self.of_rank[self.layer.group.rank], self.layer.experts
        held = slice(experts.first, experts.first + experts.num_local)
        found = {f"experts.{name}": _grad(weight)[held] for name, weight in self.experts.items()}
        found |= {f"shared.{name}": _grad(weight) for name, weight in own.shared.items()}
        found["router.weight"] = _grad(own.router)
        return found if own.router_bias is None else {**found, "router.bias": _grad(own.router_bias)}


def _values(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def _leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double().clone().requires_grad_() for name, value in values.items()}


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class Step(NamedTuple):
    """What the oracle gives for one step of all ranks: by rank but for `routes`."""

    x: list[Tensor]
    y: list[Tensor]
    aux: list[Tensor]
    routes: Routes


def reference_step(case: Case, reference: Reference, step: int, drawn: list[list[int]]) -> Step:
    config, layer, data = case.config, reference.layer, []
    for rank, weights in enumerate(reference.of_rank):
        x, dout = inputs(case, step, rank)
        xr = x.double().reshape(-1, config.d).contiguous().requires_grad_()
        torch.manual_seed(case.seed + step)
        noise = torch.ones((), dtype=torch.float64)
        if case.training and config.router.jitter:
            jitter = config.router.jitter
            # In the order of the values, whatever the strides of x.
            noise = torch.empty(xr.shape, dtype=x.dtype).uniform_(1 - jitter, 1 + jitter).double()
        bias = 0.0 if weights.router_bias is None else weights.router_bias
        data.append((xr, xr * noise, (xr * noise) @ weights.router.T + bias, dout.double().reshape(xr.shape)))
    probabilities = torch.sigmoid if config.router.score == "sigmoid" else lambda logits: torch.softmax(logits, 1)
    scores = [probabilities(logits.detach()) for _, _, logits, _ in data]
    routes = route(scores, layer.router.expert_bias, config, training=case.training, drawn=drawn)
    counts, ys, losses = sum(mask.sum(0) for mask in routes.by_score), [], []
    for rank, (xr, noisy, logits, dout) in enumerate(data):
        masks = routes.selected[rank], routes.topk[rank]
        y = oracle.dense_moe(xr, reference.of_rank[rank], *masks, config, routed_x=noisy)
        length, counted = max(len(xr), 1), config
        if config.router.balance == "sequence":  # the mean of the losses of each sequence alone
            length = max(case.shapes[step][rank][-1], 1)
            counted = config.replace(router=replace(config.router, balance="batch"))
        pieces = zip(logits.split(length), routes.by_score[rank].split(length), strict=True)
        parts = [oracle.losses(each, mask, counts, counted) for each, mask in pieces if len(each)]
        loss = sum(parts, torch.zeros((), dtype=torch.float64)) / max(len(parts), 1)
        ((y * dout).sum() + loss).backward()
        ys.append(y.detach())
        losses.append(loss.detach())
    return Step([xr for xr, *_ in data], ys, losses, routes)


def differences(rank: int, case: Case) -> list[str] | None:
    """What differs on this rank; None, on every rank, where fp32 could decide either way. A worker."""
    layer = build(case)
    reference, found = Reference(layer), []
    bias, chosen_E = layer.router.expert_bias, torch.zeros(case.config.E)
    bias = None if bias is None else bias.clone()
    unclear, scale = False, 0.0
    for step in range(len(case.shapes)):
        x, dout = inputs(case, step, rank)
        x.requires_grad_("x" not in case.frozen)
        y, aux, pairs = run(case, layer, step, x, dout)
        wanted = reference_step(case, reference, step, pairs.counts.rows_SE.tolist())
        # Of two scores that are as good as equal fp32 may take the other; then all that follows differs.
        largest = max([1.0, *(float(each.detach().abs().max()) for each in wanted.x if each.numel())])
        unclear |= case.dtype == torch.float32 and wanted.routes.margin < 1e-4 * largest
        # Gradients of experts come from other ranks' tokens too.
        scale = max(scale, *(1e-2 * float(inputs(case, step, r)[1].norm()) for r in range(layer.group.size)))
        report = _reporter(found, f"step {step}: ", case.dtype, scale)
        found += _differing_routes(pairs, wanted.routes, rank)
        report("y", y.reshape(-1, case.config.d), wanted.y[rank])
        report("aux_loss", aux, wanted.aux[rank])
        if "x" not in case.frozen:
            report("dx", x.grad.reshape(-1, case.config.d), wanted.x[rank].grad)
        chosen_E += sum(mask.sum(0) for mask in wanted.routes.topk)
    report = _reporter(found, "", case.dtype, scale)
    for name, gradient in reference.gradients().items():
        parameter = layer.get_parameter(name)
        if name.split(".")[0] in case.frozen:
            found += [f"{name} is frozen and has a gradient"] if parameter.grad is not None else []
        else:
            report(f"gradient of {name}", parameter.grad, gradient)
    if bias is not None:
        layer.update_expert_bias()
        added = case.config.router.expert_bias_rate * torch.sign(chosen_E.double().mean() - chosen_E) * case.training
        report("expert_bias", layer.router.expert_bias, (bias + added.float()).double())
    return None if unclear else found


def _reporter(found: list[str], prefix: str, dtype: torch.dtype, scale: float) -> Callable[..., None]:
    """Adds to `found` what is further from the oracle than rounding explains. scale: below it errors are absolute."""

    def report(name: str, got: Tensor | None, wanted: Tensor) -> None:
        got = torch.zeros_like(wanted) if got is None else got.detach().double()
        error = float((got - wanted.detach()).norm() / max(float(wanted.detach().norm()), scale, 1e-6))
        if not error < TOLERANCES[dtype]:
            found.append(f"{prefix}{name} differs by {error:.2g}")

    return report


def _differing_routes(pairs: RoutedPairs, wanted: Routes, rank: int) -> list[str]:
    got: dict[str, object] = {
        "top-K counts": pairs.counts.chosen_SE.tolist(),
        "rows": pairs.counts.rows_SE.tolist(),
        "pairs": pairs.counts.pairs_SE.tolist(),
        "selected": list(zip(pairs.expert_ids_N.tolist(), pairs.token_ids_N.tolist(), strict=True)),
    }
    selected = [tuple(pair) for pair in wanted.selected[rank].T.nonzero().tolist()]
    should = dict(zip(got, (wanted.counts, wanted.rows, wanted.pairs, selected), strict=True))
    return [f"{name} are {got[name]}, the oracle's {should[name]}" for name in got if got[name] != should[name]]


def check(pool: RankPool, seed: int, number: int) -> None:
    """Raises AssertionError for a difference; RankError or RankTimeoutError if ranks fail or hang."""
    case = random_case(seed, pool.world_size, number)
    found = pool.run(differences, case, timeout=TIMEOUT)
    if None in found:
        case = case._replace(dtype=torch.float64)
        found = pool.run(differences, case, timeout=TIMEOUT)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts or []]
    assert not wrong, "\n".join([*wrong, str(case)])
