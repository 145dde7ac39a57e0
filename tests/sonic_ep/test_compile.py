"""torch.compile with fullgraph=True: what a compiled model computes is what the eager one does, replay included."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

from sonic_ep import (
    EPGroup,
    MoE,
    MoEConfig,
    RoundingConfig,
    RouterConfig,
    Routing,
    RoutingStats,
    TransportConfig,
    replay_contexts,
)
from sonic_ep.config import RoundingMode
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.protocol import PreparedDispatch
from sonic_ep.functional import moe
from sonic_ep.routers import router as router_module
from sonic_ep.steps import experts_step
from sonic_ep.transports import GroupTransport, transport_for
from tests.helpers.launch import RankPool
from tests.sonic_ep.test_layer import TINY, relative, small

Ranks = Callable[[int], RankPool]
Step = tuple[dict[str, Tensor], list[RoutingStats]]
LOSSES = RouterConfig(balance="global", balance_coef=0.3, z_loss_coef=0.05, expert_bias=True)
DEEPSEEK = RouterConfig(
    score="sigmoid",
    scale=2.5,
    num_groups=4,
    groups_per_token=2,
    balance="sequence",
    balance_coef=0.1,
    linear_bias=True,
    check_logits=True,
)
STOCHASTIC = replace(TINY, mode="stochastic")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """x + MoE(x + tanh(linear(x))), and the layer's loss."""

    def __init__(self, config: MoEConfig, group: EPGroup, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(config.d, config.d)
        self.moe = MoE(config, group, seed=seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, RoutingStats]:
        x = x + self.linear(x).tanh()
        y, aux, stats = self.moe(x)
        return x + y, aux, stats


class Model(nn.Module):
    """Blocks; each in a checkpoint of its own if `options` for one are given."""

    def __init__(self, config: MoEConfig, group: EPGroup | None = None, depth: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(config, group or EPGroup.alone(), seed) for seed in range(depth)])
        self.options = options

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[RoutingStats]]:
        total, all_stats = x.new_zeros(()), []
        for block in self.blocks:
            if self.options:
                x, aux, stats = checkpoint(block, x, use_reentrant=False, **self.options)  # type: ignore[misc]
            else:
                x, aux, stats = block(x)
            total = total + aux
            all_stats.append(stats)
        return x, total, all_stats


def train_step(run: Callable[[Tensor], Any], model: nn.Module, x: Tensor) -> Step:
    """Output, loss and every gradient by name, and the statistics, of one step from one state of torch's generator."""
    torch.manual_seed(2)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y, aux, stats = run(leaf)
    (y.square().mean() + aux).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"y": y.detach(), "aux": aux.detach(), "dx": leaf.grad, **gradients}, stats  # type: ignore[dict-item]


def assert_same_step(ours: Step, theirs: Step, tolerance: float) -> None:
    for name, wanted in theirs[0].items():
        assert relative(ours[0][name], wanted) < tolerance, name
    for mine, other in zip(ours[1], theirs[1], strict=True):
        N = len(other.token_ids_N)
        assert (mine.token_ids_N[N:] == -1).all()
        for name in FIGURES:
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), msg=name)
        torch.testing.assert_close(mine.token_ids_N[:N], other.token_ids_N)
        group = EPGroup() if len(mine.counts.pairs_SE) > 1 else EPGroup.alone()
        torch.testing.assert_close(mine.traffic(group), other.traffic(group), msg="traffic")


FIGURES = [
    name for name in vars(RoutingStats) if not name.startswith("_") and name not in ("token_ids_N", "counts", "traffic")
]


def counters(model: Model) -> list[list[int]]:
    return [block.moe.router._counts_since_update_E.tolist() for block in model.blocks]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "config",
    [
        small(LOSSES, bias=True, shared_n=5),
        small(DEEPSEEK, activation="relu2", save_dispatched=True),
        small(rounding=RoundingConfig(mode="off")),
    ],
    ids=["rounded", "deepseek", "off"],
)
def test_steps_of_any_batch_size_are_the_eager_ones_and_share_a_graph(config: MoEConfig) -> None:
    model = Model(config)
    eager = copy.deepcopy(model)
    backend = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for batch in (5, 3, 8):
        x = torch.randn(batch, 10, config.d)
        assert_same_step(train_step(compiled, model, x), train_step(eager, eager, x), 1e-6)
        assert counters(model) == counters(eager)
        assert (sum(counters(model)[0]) > 0) == config.router.expert_bias
        if config.router.expert_bias:
            for each in (*model.blocks, *eager.blocks):
                each.moe.update_expert_bias()  # type: ignore[union-attr]
    assert backend.frame_count == 1
    counts = counters(model)
    with torch.no_grad():
        x = torch.randn(4, 10, config.d)
        torch.testing.assert_close(compiled.eval()(x)[0], eager.eval()(x)[0], rtol=1e-6, atol=1e-6)
    assert counters(model) == counts
    assert backend.frame_count == 2


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU, and g++ is not here"
)
def test_inductor_and_a_stochastic_checkpoint() -> None:
    config = small(LOSSES, STOCHASTIC, bias=True)
    model, eager = (Model(config, depth=1, context_fn=replay_contexts).double() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(50, config.d, dtype=torch.float64)
    with inductor.patch(compile_threads=1):
        assert_same_step(train_step(compiled, model, x), train_step(eager, eager, x), 1e-10)


def test_a_compiled_layer_may_run_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, asked = MoE(small(LOSSES), seed=0), []
    monkeypatch.setattr(layer._programs, "outputs", lambda layer, x, **_: asked.append(x.requires_grad))
    torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(20, 12, requires_grad=True))
    assert asked == [True]


def test_layers_of_one_config_share_a_graph() -> None:
    backend = CompileCounterWithBackend("aot_eager")
    for seed in range(3):
        layer = torch.compile(MoE(small(LOSSES), seed=seed), fullgraph=True, backend=backend)
        layer(torch.randn(20, 12))
    assert backend.frame_count == 1


@pytest.mark.parametrize("mode", ["apportion", "off"])
def test_without_fullgraph_no_graph_breaks(mode: RoundingMode) -> None:
    torch._dynamo.utils.counters.clear()  # of other tests of this process
    model, eager = (Model(small(LOSSES, replace(TINY, mode=mode))) for _ in range(2))
    x = torch.randn(5, 10, 12)
    ours = train_step(torch.compile(model, backend="aot_eager"), model, x)  # type: ignore[arg-type]
    assert_same_step(ours, train_step(eager, eager, x), 1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_functional_layer() -> None:
    alone = EPGroup.alone()
    E, w1, w2 = 4, torch.randn(4, 12, 8, requires_grad=True), torch.randn(4, 8, 6, requires_grad=True)
    tokens, experts = torch.tensor([0, 1, 2, 2, 4]), torch.tensor([3, 0, 0, 1, 3])
    pair_weights, x = torch.rand(5, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    routing = Routing.from_pairs(tokens, experts, torch.rand(5), num_tokens=5, E=E, group=alone)
    routing = replace(routing, weights_N=pair_weights)

    def run(x: Tensor) -> Tensor:
        return moe(x, routing, w1, w2, transport=transport_for(alone), group=alone, layout="concatenated")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), [x, w1, w2, pair_weights]) for f in (compiled, run))
    torch.testing.assert_close(ours, theirs)


# --- activation checkpointing --------------------------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What compiled graphs do, call by call."""
    calls: list[str] = []

    def spy(module: ModuleType, name: str) -> None:
        wrapped = getattr(module, name)

        def called(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return wrapped(*arguments, **options)

        monkeypatch.setattr(module, name, called)

    spy(router_module, "decide_pairs")
    spy(experts_step, "forward")
    spy(experts_step, "backward")
    return calls


def test_a_checkpoint_in_the_graph_with_replay_recomputes_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(replace(LOSSES, jitter=0.1), STOCHASTIC)
    model, plain = Model(config, context_fn=replay_contexts), Model(config)
    calls = watch(monkeypatch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(50, config.d)
    ours, calls = train_step(compiled, model, x), [*calls]
    assert_same_step(ours, train_step(plain, plain, x), 1e-6)
    assert calls == ["decide_pairs", "forward"] * 2 + ["backward"] * 2
    assert counters(model) == counters(plain)


def test_a_checkpoint_in_the_graph_recomputes_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(LOSSES)
    model, plain = Model(config, preserve_rng_state=True), Model(config)
    calls = watch(monkeypatch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(50, config.d)
    ours, calls = train_step(compiled, model, x), [*calls]
    assert_same_step(ours, train_step(plain, plain, x), 1e-6)
    assert calls[:4] == ["decide_pairs", "forward"] * 2
    assert sorted(calls[4:]) == sorted(["decide_pairs", "forward", "backward"] * 2)
    assert counters(model) == counters(plain)


def test_a_router_that_draws_numbers_needs_replay_in_the_graph() -> None:
    config = small(LOSSES, STOCHASTIC)
    model = Model(config, preserve_rng_state=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y, aux, _ = compiled(torch.randn(50, config.d))
    with pytest.raises(RuntimeError, match=r"context_fn=sonic_ep\.replay_contexts"):
        (y.sum() + aux).backward()


def test_a_checkpoint_around_compiled_blocks_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(LOSSES, STOCHASTIC)
    model, plain = Model(config), Model(config)
    calls = watch(monkeypatch)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(50, config.d)

    def run(x: Tensor) -> Any:
        # The generator is not put back: what is drawn in backward must not matter.
        return checkpoint(model, x, use_reentrant=False, context_fn=replay_contexts, preserve_rng_state=False)

    ours, calls = train_step(run, model, x), [*calls]
    assert_same_step(ours, train_step(plain, plain, x), 1e-6)
    assert calls == ["decide_pairs", "forward"] * 4 + ["backward"] * 2
    assert counters(model) == counters(plain)
    y, _, _ = checkpoint(model, x.requires_grad_(), use_reentrant=False)  # type: ignore[misc]
    with pytest.raises(RuntimeError, match=r"context_fn=sonic_ep\.replay_contexts"):
        y.sum().backward()


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.randn(10, 11), r"x has hidden size 11 \(shape \(10, 11\)\), the layer has d=12"),
        (torch.randn(10, 12).double(), "x has dtype torch.float64, the experts compute in torch.float32"),
        ([1.0], "x must be a torch.Tensor, got list"),
        (torch.full((10, 12), float("nan")), r"router logits hold NaN or inf \(rank 0: 80\)"),
    ],
    ids=["width", "dtype", "type", "nan"],
)
def test_errors_are_the_eager_ones(bad: Any, message: str) -> None:
    layer = torch.compile(MoE(small(RouterConfig(check_logits=True)), seed=0), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=message):
        layer(bad)
    assert layer(torch.randn(10, 12)).y.isfinite().all()


def test_a_transport_that_is_not_the_groups_own_is_refused() -> None:
    alone, pairs = EPGroup.alone(), torch.arange(4)
    routing = Routing.from_pairs(pairs, pairs, torch.rand(4), num_tokens=4, E=4, group=alone)
    other = AllToAllTransport(alone)

    def run(x: Tensor) -> Tensor:
        return moe(x, routing, torch.randn(4, 12, 8), torch.randn(4, 8, 6), transport=other, group=alone)

    with pytest.raises(Exception, match="the transport of ep_size=1 is transport_for"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(torch.randn(4, 8))


# --- real ranks ----------------------------------------------------------------------------------------------------


def ranks_step(rank: int, config: MoEConfig, options: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Largest error of a compiled step against an eager one, for two token numbers that differ between ranks."""
    torch._dynamo.reset()
    group = EPGroup()
    model, eager = (Model(config, group, **options).to(device) for _ in range(2))
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    errors: dict[str, float] = {}
    for tokens in (37 + 9 * rank, 20 - 3 * rank):
        x = torch.randn(tokens, config.d, generator=torch.Generator().manual_seed(rank)).to(device)
        ours, theirs = train_step(compiled, model, x), train_step(eager, eager, x)
        for name, wanted in theirs[0].items():
            errors[name] = max(errors.get(name, 0.0), relative(ours[0][name], wanted))
        assert counters(model) == counters(eager)
    with torch.no_grad():
        errors["eval"] = relative(compiled.eval()(x)[0], eager.eval()(x)[0])
    return errors


RANK_CASES: dict[str, tuple[MoEConfig, dict[str, Any]]] = {
    "resend": (small(LOSSES, bias=True, transport=TransportConfig(kind="all_to_all")), {}),
    "two-hop": (small(LOSSES, transport=TransportConfig(kind="two_hop", ranks_per_host=2)), {}),
    "keep-and-checkpoint": (small(LOSSES, STOCHASTIC, save_dispatched=True), {"context_fn": replay_contexts}),
}


@pytest.mark.parametrize("case", RANK_CASES)
def test_steps_across_ranks_are_the_eager_ones(ranks: Ranks, case: str) -> None:
    for rank, errors in enumerate(ranks(4 if case == "two-hop" else 2).run(ranks_step, *RANK_CASES[case])):
        assert max(errors.values()) < 1e-6, (rank, errors)
        assert {"y", "dx", "eval"} <= errors.keys()


def ranks_static(rank: int, folder: str) -> tuple[list[float], list[bool], str]:
    """Errors of compiled steps through static buffers against eager ones through exact ones; does a routing tell what
    no rank exceeds, wherever one is opened; and what is raised for another number of tokens on rank 1."""
    from tests.helpers.static_buffers import static_buffers

    torch._dynamo.reset()
    group, rounding = EPGroup(), replace(TINY, mode="nearest", capacity_factor=1.5)
    config = small(LOSSES, rounding, transport=TransportConfig(kind="symmetric", buffers="static"))
    model, eager = Model(config, group), Model(config.replace(transport=TransportConfig(kind="all_to_all")), group)
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    transport = transport_for(group, config.transport)
    assert isinstance(transport, GroupTransport)
    errors, bounded, stock = [], [], transport.prepare

    def opening(routing: Routing, *arguments: Any) -> PreparedDispatch:
        bounded.append(routing.max_received is not None)
        return stock(routing, *arguments)

    transport.prepare = opening  # type: ignore[method-assign]
    with static_buffers(transport, folder):
        for seed in range(3):
            x = torch.randn(24, config.d, generator=torch.Generator().manual_seed(10 * seed + rank))
            ours, theirs = train_step(compiled, model, x), train_step(eager, eager, x)
            errors += [relative(ours[0][name], wanted) for name, wanted in theirs[0].items()]
        with pytest.raises(ValueError, match="static") as caught:
            compiled(torch.randn(24 + rank, config.d))
    return errors, bounded, str(caught.value)


def test_static_buffers_across_ranks(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for rank, (errors, bounded, message) in enumerate(ranks(2).run(ranks_static, str(tmp_path), timeout=600)):
        assert max(errors) < 1e-6
        assert len(bounded) == 6 + (rank == 0)  # which is told at the end of the step that rank 1 refuses
        assert all(bounded)
        assert "rank 1: T=25 tokens, but transport.buffers='static' keeps to the first step's 24" in message


def ranks_errors(rank: int) -> list[str]:
    """What every rank raises when rank 1 spoils its input, and before and after, when it is healthy."""
    torch._dynamo.reset()
    layer = MoE(small(RouterConfig(check_logits=True)), EPGroup(), seed=0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, messages = torch.randn(10, 12), []
    for bad in (x, x[:, :-1], x.new_full(x.shape, float("nan")), x[:7, 0], x):
        try:
            compiled(bad if rank == 1 else x)
            messages.append("none")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_one_ranks_bad_input_raises_on_all(ranks: Ranks) -> None:
    for messages in ranks(2).run(ranks_errors):
        assert messages[0] == messages[4] == "none"
        assert "rank 1: x has hidden size 11 (shape (10, 11))" in messages[1]
        assert "NaN or inf (rank 1: 80)" in messages[2]
        assert "rank 1: x has shape (7,), wanted (T, d) or (B, L, d)" in messages[3]


def test_the_routers_linear_layer_in_the_dtype_of_x() -> None:
    config = small(replace(LOSSES, linear_dtype="input", linear_bias=True, jitter=0.1))
    layer, x = MoE(config, seed=0, dtype=torch.bfloat16), torch.randn(50, config.d).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def step(run: Callable[[Tensor], Any]) -> Step:
        return train_step(lambda x: (*run(x)[:2], []), layer, x)

    assert_same_step(step(compiled), step(layer), 1e-6)
    router = layer.router.eval()
    with torch.autocast("cpu", dtype=torch.float16):
        cast, _ = torch.compile(router.logits, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(cast, router.logits(x)[0])


# --- GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_inductor_on_a_gpu_with_a_checkpoint() -> None:
    config = small(LOSSES, STOCHASTIC, bias=True, shared_n=5)
    model, eager = (Model(config, context_fn=replay_contexts).cuda() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (50, 31):
        x = torch.randn(tokens, config.d, device="cuda")
        assert_same_step(train_step(compiled, model, x), train_step(eager, eager, x), 1e-4)
    assert counters(model) == counters(eager)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_half_precision_kernels_in_a_graph() -> None:
    # The layer alone: before it, inductor would round otherwise than eager mode, and tokens would choose otherwise.
    config = small(LOSSES, RoundingConfig(t=16, G=32), d=64, n=32)
    layer = MoE(config, seed=0, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(500, config.d, device="cuda", dtype=torch.bfloat16)
    ours, theirs = (train_step(lambda x, run=run: (*run(x)[:2], []), layer, x) for run in (compiled, layer))
    assert_same_step(ours, theirs, 1e-2)


@pytest.mark.gpu
def test_a_compiled_layer_runs_as_a_program_on_a_gpu() -> None:
    config = small(LOSSES, RoundingConfig(t=16, G=32), d=64, n=32)
    layer = MoE(config, seed=0, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (512, 384):
        x = torch.randn(tokens, config.d, device="cuda", dtype=torch.bfloat16)
        ours = train_step(lambda x: (*compiled(x)[:2], []), layer, x)
        assert layer.num_programs
        assert_same_step(ours, train_step(lambda x: (*layer(x)[:2], []), layer, x), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RANK_CASES)
def test_steps_across_gpus_are_the_eager_ones(case: str) -> None:
    with RankPool(min(2, torch.cuda.device_count()), backend="cpu:gloo,cuda:nccl") as pool:
        for rank, errors in enumerate(pool.run(ranks_step, *RANK_CASES[case], "cuda")):
            assert max(errors.values()) < 1e-5, (rank, errors)
