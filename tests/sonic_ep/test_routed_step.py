"""The step of a layer over torch.distributed: its router's programs serve many sizes, and the step is the code's.

Ranks over gloo have no GPU. There the router's traced code runs on tensors, with kernels that are interpreted, and the
code computes the experts. tests/sonic_ep/test_ranks_as_programs.py has GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import HandleSizes, PreparedDispatch, Splits
from sonic_ep.kernels.batch_invariant.linear import LinearInBlocks
from sonic_ep.kernels.route.linear import reference as linear
from sonic_ep.routers import count_exchange, router
from sonic_ep.routing import AsyncSplitSizes, Routing, SplitSizes
from sonic_ep.steps import experts_step, program_steps, router_trace
from sonic_ep.steps.experts_step import ExpertsPrograms
from sonic_ep.steps.layer_step import StepCall
from sonic_ep.steps.programs import Programs, StepPrograms
from sonic_ep.steps.routed_step import RoutedStep, traced_router
from sonic_ep.steps.router_trace import Kind, LayerWeights, traced_route, traced_route_gradients
from tests.helpers.changing_routing import LOSSES
from tests.helpers.fake_cuda import described, fake_cuda, kind_of
from tests.helpers.launch import RankPool
from tests.sonic_ep.test_layer_step import CONFIGS as TRACED
from tests.sonic_ep.test_layer_step import calls_of

Ranks = Callable[[int], RankPool]
Sizes = tuple[int, ...]
T, D = 37, 32
SHAPE = {"d": D, "n": 16, "E": 8, "K": 2}
ROUNDED = RoundingConfig(mode="apportion", t=4, G=8)
ALL_TO_ALL = TransportConfig(kind="all_to_all", timeout=20)
CONFIGS = {
    "off": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off"), transport=ALL_TO_ALL),
    "apportion": MoEConfig(**SHAPE, rounding=ROUNDED, save_dispatched=True, transport=ALL_TO_ALL),
    "losses": MoEConfig(**SHAPE, rounding=ROUNDED, router=LOSSES, transport=ALL_TO_ALL),
    "global": MoEConfig(
        **SHAPE,
        rounding=ROUNDED,
        router=RouterConfig(balance="global", balance_coef=0.01, expert_bias=True),
        transport=ALL_TO_ALL,
    ),
    "biases": MoEConfig(
        **SHAPE, rounding=ROUNDED, bias=True, router=RouterConfig(linear_bias=True), transport=ALL_TO_ALL
    ),
    "shared": MoEConfig(**SHAPE, rounding=ROUNDED, shared_n=16, transport=ALL_TO_ALL),
    "two hops": MoEConfig(
        **SHAPE, rounding=ROUNDED, transport=TransportConfig(kind="two_hop", ranks_per_host=1, timeout=20)
    ),
    "batch-invariant": MoEConfig(
        **SHAPE, rounding=RoundingConfig(mode="off"), transport=ALL_TO_ALL, batch_invariant=True
    ),
}


def traced_kind(config: MoEConfig) -> Kind:
    """The kind of a step on two imitated GPUs, over a group that exchanges nothing."""
    kind = kind_of(config, 2)
    assert kind.ranks is not None
    transport: Any = AllToAllTransport(kind.ranks.group)
    return replace(kind, ranks=replace(kind.ranks, transport=transport, symmetric=None))


@pytest.mark.parametrize("name", TRACED)
def test_a_program_of_other_sizes_is_the_one_that_these_would_give(name: str) -> None:
    with fake_cuda():
        kind, other = traced_kind(TRACED[name]), (7008, 3504, 8)
        one, two = (traced_router(kind, sizes) for sizes in ((8192, 4096, 5), other))
        assert one.forward.fits(*other)
        assert one.backward.keys() == two.backward.keys() == {False, True}
        passes = [(one.forward, two.forward), *zip(one.backward.values(), two.backward.values(), strict=True)]
        for found, wanted in passes:
            assert described(found, other) == described(wanted, other)


@pytest.mark.parametrize("name", ["nearest", "bias", "losses", "biases", "rows"])
def test_what_a_step_runs_and_returns(name: str) -> None:
    """Programs run, though nothing is computed, between exchanges that send nothing."""
    T, config = 512, TRACED[name]
    pairs, half = config.K * T, T // 2
    with fake_cuda(), ExitStack() as stack:
        kind = traced_kind(config)
        ranks = kind.ranks
        assert ranks is not None
        group: Any = ranks.group
        sizes = SplitSizes((T, T), ((pairs // 2,) * 2,) * 2, ((pairs // 2,) * 2,) * 2)
        splits = Splits((half, half), (half, half), *[(pairs // 2, pairs // 2)] * 2)
        lengths = pairs, pairs, T + 1, pairs, config.E // 2 + 1, T, T, T + 1

        def prepare(routing: Routing, plan: object) -> PreparedDispatch:
            assert routing.split_sizes is not None
            assert routing.split_sizes.read() == sizes
            handle = HandleSizes(splits=splits, num_tokens=T, num_rows=T, num_listed=len(routing.token_ids_N))
            lists = [torch.zeros(length, dtype=torch.int32) for length in lengths]
            return PreparedDispatch(handle.with_lists(lists), torch.zeros(pairs))

        def arriving() -> AsyncSplitSizes:
            return AsyncSplitSizes(torch.empty(0), 2, known=sizes)

        sent: list[str] = []

        def all_to_all(rows: Tensor, *_: object, stage: str, out: Tensor, **__: object) -> Tensor:
            sent.append(stage)
            return out

        nothing: Any = SimpleNamespace(synchronize=lambda: None)
        stack.enter_context(patch.object(group, "all_gather", lambda values, *, used, out: out, create=True))
        stack.enter_context(patch.object(group, "all_to_all", all_to_all, create=True))
        stack.enter_context(patch.object(group, "begin_backward", lambda *_: sent.append("begin"), create=True))
        stack.enter_context(patch.object(AllToAllTransport, "prepare", lambda self, *given: prepare(*given)))
        stack.enter_context(patch.object(experts_step, "_may_run", lambda *_: True))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda _: nullcontext(nothing)))
        shapes = (T, config.d), *[tuple(each.shape) for each in _weights_of(kind)]
        programs, experts = StepPrograms(traced_router), ExpertsPrograms(config.K)
        call = StepCall()
        if config.router.expert_bias:
            call.expert_bias_E, call.extra["updates"] = torch.zeros(config.E), torch.zeros((), dtype=torch.int64)
        found = programs.find(kind, (T, T, 0))
        assert found is not None
        given = [torch.empty(T, config.d, dtype=kind.dtype), *_weights_of(kind)]
        given = [each.requires_grad_() for each in given]
        step = RoutedStep(found, kind, (T, T, 0), call, experts, arriving)
        number = number_of_backward = 0
        for _ in range(2):
            outputs, grads = list[Any](), list[Tensor]()
            number = calls_of(lambda outputs=outputs: outputs.append(step.run(*given)))[0]
            y_TH, loss, statistics = outputs.pop()
            assert (y_TH.shape, loss.shape, len(statistics)) == ((T, config.d), (), 8)
            dy, dloss = torch.empty_like(y_TH), torch.empty_like(loss)
            back = partial(torch.autograd.grad, [y_TH, loss], given, [dy, dloss])
            number_of_backward = calls_of(lambda back=back, grads=grads: grads.extend(back()))[0]
            assert [tuple(each.shape) for each in grads] == [*shapes]
        assert programs.num_programs == experts.num_programs == 1
        again = [] if config.save_dispatched else ["dispatch"]
        assert sent == 2 * ["dispatch", "combine", "begin", "dispatch", *again, "combine", "combine_scalars"]
        print(f"{number} calls of Python functions in forward, {number_of_backward} in backward")  # noqa: T201
        assert 0 < number <= 250
        assert 0 < number_of_backward <= 400


def _weights_of(kind: Kind) -> list[Tensor]:
    c = kind.config
    shapes = (c.E, c.d), (c.E,), (c.E // 2, 2 * c.n, c.d), (c.E // 2, c.d, c.n), (c.E // 2, 2 * c.n), (c.E // 2, c.d)
    dtypes = torch.float32, torch.float32, *[kind.dtype] * 4
    described = zip(shapes, dtypes, kind.present, strict=True)
    return [torch.empty(shape, dtype=dtype) for shape, dtype, is_there in described if is_there]


@dataclass
class Eager:
    """In place of a router's program: runs the code that would be traced. has_loss: of a backward; None for forward."""

    kind: Kind
    has_loss: bool | None = None

    @property
    def extra(self) -> list[str]:
        return ["updates"] if self.kind.config.router.expert_bias else []

    def run(self, sizes: Sizes, inputs: list[Tensor]) -> list[Tensor]:
        with patch.object(count_exchange, "_order_to_send", lambda *_: sizes[-1]):
            return self._forward(sizes, inputs) if self.has_loss is None else self._backward(inputs)

    def _forward(self, sizes: Sizes, inputs: list[Tensor]) -> list[Tensor]:
        kind, given, ranks = self.kind, iter(inputs), self.kind.ranks
        assert ranks is not None
        x, weight, bias = next(given), next(given), next(given) if kind.present[1] else None
        weights: Any = LayerWeights(weight, bias, *[None] * 4)  # type: ignore[arg-type]
        bias_E, updates = (next(given), next(given)) if self.extra else (None, None)
        route = traced_route(kind, x, weights, bias_E, updates, sizes[1])
        assert route.routing.split_sizes is not None
        mailbox: Any = ranks.mailbox
        mailbox.values = route.routing.split_sizes.on_device
        routing, later = route.routing, route.for_backward if any(kind.needs) else []
        plan = plan_for(routing.counts, ranks.group.rank)
        outputs = route.loss, route.entropy_T, routing.token_ids_N, routing.weights_N
        return [*outputs, *plan, *routing.counts, *later]

    def _backward(self, inputs: list[Tensor]) -> list[Tensor]:
        needs, left = self.kind.all_needs, [*inputs]
        dweights = left.pop(0)
        dx = left.pop(0) if needs[0] else torch.empty(0)
        dloss = left.pop(0) if self.has_loss else None
        x, weight, *saved = left
        dx_TH, *found = traced_route_gradients(self.kind, saved, dweights, dloss, x, weight, dx, needs[:3])
        in_place = dx_TH is None or dx_TH.data_ptr() == dx.data_ptr()
        assert in_place != self.kind.config.batch_invariant
        return [each for each in ([] if in_place else [dx_TH]) + found if each is not None]


def eager_programs(kind: Kind, sizes: Sizes) -> Programs:
    backward: Any = {has_loss: Eager(kind, has_loss) for has_loss in (False, True)}
    forward: Any = Eager(kind)
    forward.fits = lambda *_: True
    return Programs(forward, backward, 0)


class _Linear:
    """The router's linear layer in plain torch, which adds to another gradient in place, as kernels do."""

    logits = staticmethod(linear.logits)

    @staticmethod
    def gradients(*given: Any, dx_others_TH: Tensor | None = None, **needs: bool) -> tuple[Tensor | None, ...]:
        dx_TH, dweight_EH = linear.gradients(*given, **needs)
        return dx_TH if dx_TH is None or dx_others_TH is None else dx_others_TH.add_(dx_TH), dweight_EH


@contextmanager
def as_programs(noted: list[str]) -> Iterator[None]:
    """A context in which rows on the CPU take the way of a GPU's. noted: gets the name of each pass."""
    own: Any = _Linear

    def kernels(_x: Tensor, _weight: Tensor, config: MoEConfig) -> tuple[Any, Any]:
        found = LinearInBlocks(own) if config.batch_invariant else own
        return found, import_module("sonic_ep.kernels.route.fused")

    def note(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *arguments: [noted.append(name), run(*arguments)][1]

    def mailbox(_: object) -> Any:
        made = SimpleNamespace(is_ready=True, is_traced=False, values=None)
        made.read = lambda: made.values
        return made

    replaced = [
        (program_steps, "_may_run", lambda x, d: x.dim() == 2 and x.shape[0] > 0),
        (program_steps, "kernels_compute", lambda *_: True),
        (program_steps, "traced_router", eager_programs),
        (import_module("sonic_ep.dispatch.bounded_steps"), "Mailbox", mailbox),
        (import_module("sonic_ep.steps.programs"), "launcher", lambda: None),
        (ExpertsPrograms, "step", lambda *_, **__: None),
        (router, "kernels_of_route", kernels),
        (router_trace, "kernels_of_route", kernels),
        (Eager, "_forward", note(Eager._forward, "forward")),
        (Eager, "_backward", note(Eager._backward, "backward")),
    ]
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(patch.object(target, name, value))
        yield


def layers(config: MoEConfig) -> tuple[MoE, MoE]:
    program, code = (MoE(replace(config, record_launches=on), EPGroup(), seed=0) for on in (True, False))
    return program, code


def inputs(step: int, rank: int, length: int = T) -> Tensor:
    return torch.randn(length, D, generator=torch.Generator().manual_seed(2 * step + rank)).requires_grad_()


def results(layer: MoE, x: Tensor, *, of: str = "both") -> list[Tensor | None]:
    layer.zero_grad()
    out = layer(x)
    total = {"both": (out.y**2).sum() + out.aux_loss, "y": (out.y**2).sum(), "loss": out.aux_loss}[of]
    total.backward()
    grads = [x.grad, *[p.grad for p in layer.parameters()]]
    return [out.y.detach(), out.aux_loss.detach(), out.stats.entropy_T, *out.stats.counts, *grads]


def assert_same(one: Sequence[Tensor | None], two: Sequence[Tensor | None]) -> None:
    pairs = enumerate(zip(one, two, strict=True))
    different = [i for i, (a, b) in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]  # type: ignore[arg-type]
    assert not different, f"numbers {different}"


def steps_of_changing_sizes(rank: int, name: str) -> None:
    noted: list[str] = []
    with as_programs(noted):
        both = layers(CONFIGS[name])
        for step, of in enumerate(("both", "both", "y", "loss", "both")):
            if of == "loss" and CONFIGS[name].router.balance == "none":
                continue
            length = T - 5 * step * rank
            assert_same(*(results(layer, inputs(step, rank, length), of=of) for layer in both))
            for layer in both:
                if layer.config.router.expert_bias:
                    layer.update_expert_bias()
    assert both[1].num_programs == 0
    assert both[0].num_programs == 1
    steps = 4 if CONFIGS[name].router.balance != "none" else 3  # the code runs the first
    assert noted == ["forward", "backward"] * steps


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_changing_sizes(ranks: Ranks, name: str) -> None:
    ranks(2).run(steps_of_changing_sizes, name)


def in_every_order(rank: int) -> None:
    """Checkpoints of both kinds, a retained graph, backwards in another order, and steps without gradients."""
    noted: list[str] = []
    with as_programs(noted):
        both = layers(CONFIGS["off"])
        for layer in both:
            results(layer, inputs(0, rank))  # by the code
        noted.clear()
        found: list[list[Tensor | None]] = [[], []]
        for layer, mine in zip(both, found, strict=True):
            layer.zero_grad()
            xs = [inputs(step, rank, T - step) for step in range(1, 6)]
            ys: Any = [
                *[checkpoint(lambda x, layer=layer: layer(x).y, xs[way], use_reentrant=bool(way)) for way in range(2)],
                *[layer(x).y for x in xs[2:]],
            ]
            with torch.no_grad():
                mine.append(layer(xs[0]).y)
            for number in (3, 0, 4, 1, 2):
                (ys[number] ** 2).sum().backward(retain_graph=number == 2)
            (ys[2] ** 2).sum().backward()
            mine.extend([*[y.detach() for y in ys], *[x.grad for x in xs], *[p.grad for p in layer.parameters()]])
        assert_same(*found)
    assert noted.count("forward") == 6 + 2
    assert noted.count("backward") == 6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checkpoints_and_backwards_in_another_order(ranks: Ranks) -> None:
    ranks(2).run(in_every_order)


def a_rank_of_its_own(rank: int) -> None:
    """A rank with hooks runs the code, beside one that runs programs; then one has rows of another width."""
    with as_programs([]):
        both = layers(CONFIGS["losses"])
        for step in range(3):
            handle = both[0].router.register_forward_hook(lambda *_: None) if step == 1 and rank else None
            assert_same(*(results(layer, inputs(step, rank)) for layer in both))
            if handle is not None:
                handle.remove()
        with pytest.raises(ValueError, match="rank 1: x has hidden size"):
            both[0](inputs(3, rank)[:, : D - 8 * rank])
        with (
            pytest.raises(ValueError, match="disagree whether this training step has a backward"),
            torch.set_grad_enabled(bool(rank)),
        ):
            both[0](inputs(3, rank))
        assert_same(*(results(layer, inputs(4, rank)) for layer in both))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranks_may_differ_and_errors_are_raised_on_all(ranks: Ranks) -> None:
    ranks(2).run(a_rank_of_its_own)
