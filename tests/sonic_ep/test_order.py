"""Two ranks that run backwards in different orders both hear of it in the next forward, over every transport."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, Routing, TransportConfig, graph_layers, replay_contexts
from sonic_ep.functional import moe
from sonic_ep.groups import order as order_module
from sonic_ep.groups.order import NO_ORDER, Forward, Order, Ran, problem_with_orders
from tests.helpers.launch import RankPool
from tests.helpers.static_buffers import compares_nothing_in_backward, static_buffers_in
from tests.helpers.triton_device import triton_device

Ranks = Callable[[int], RankPool]
T = 10


def sent(ran: list[Ran]) -> int:
    order = Order()
    for each in ran:
        order.add_ran(each)
    return order.send()


def identities(ran: list[Ran]) -> list[object]:
    """A layer counts where nothing was exchanged: elsewhere the number of the exchange says it, and it may be 0."""
    return [each if each.is_graphed else each.forward.exchange for each in ran]


FORWARD = st.builds(Forward, st.integers(0, 2**14), st.integers(0, 2**30), st.just(True))
GRAPHED = st.builds(Ran, FORWARD, is_graphed=st.just(True), is_replay=st.booleans())
RAN = st.lists(st.one_of(FORWARD.map(Ran), GRAPHED), max_size=6)


@given(one=RAN, two=RAN, seed=st.randoms())
def test_orders_differ_exactly_if_their_hashes_do(one: list[Ran], two: list[Ran], seed: Any) -> None:
    shuffled = seed.sample(one, len(one))
    for other in (two, shuffled, one[:-1]):
        assert (sent(one) == sent(other)) == (identities(one) == identities(other))


@given(ran=RAN)
def test_what_is_sent_fits_a_positive_integer(ran: list[Ran]) -> None:
    assert 0 <= sent(ran) < 2**62
    assert sent([]) == NO_ORDER


def test_a_forward_in_a_region_is_no_backward() -> None:
    order = Order()
    order.add(Forward(1, 7))
    order.add_region(2)
    assert order.last == Forward(1, 7)
    lists = [[], order.ran()[1][1:]]
    assert sent(lists[1]) not in (sent([]), sent([Ran(Forward(2))]))
    assert "checkpointed (number 1 since the last forward was nothing more on rank 0, a forward of layer 2" in (
        problem_with_orders(lists, [0, 1])
    )


def test_a_list_begins_anew_with_each_exchange() -> None:
    order = Order()
    order.add(Forward(1, 0))
    assert order.send() != NO_ORDER
    assert order.sent == [Ran(Forward(1, 0))]
    assert order.send() == NO_ORDER
    assert order.sent == []
    assert order.exchange == 2


def test_the_message_names_the_first_difference() -> None:
    a, b, replay = Ran(Forward(3, 14)), Ran(Forward(0, 15)), Ran(Forward(2, 7), is_graphed=True, is_replay=True)
    text = problem_with_orders([[a, b], [a, replay], [a]], [1, 2, 3])
    assert (
        "number 2 since the last forward was the backward of forward 15, of a layer on rank 0, replay 7 of layer 2 on "
        "rank 1, nothing more on rank 2; run the backwards" in text
    )


def test_long_lists_end() -> None:
    orders = [Order(), Order()]
    with patch.object(order_module, "_MAX_LISTED", 3):
        for rank, order in enumerate(orders):
            for number in range(4):
                order.add(Forward(1, rank if number == 3 else 0))
        hashes, lists = zip(*(order.ran() for order in orders), strict=True)
        assert hashes[0] != hashes[1]
        assert [len(ran) for ran in lists] == [3, 3]
        assert "they differ after the first 3" in problem_with_orders([*lists], hashes)
    text = problem_with_orders([[Ran(Forward(1, 0))]] * 2, [7, 0])  # which only a fault of ours can bring about
    assert "the lists are the same, 1 long, but what has arrived of them is [7, 0]" in text


Cross = Literal["", "layers", "steps"]
Finder = Literal["forward", "eval", "from_pairs", "a layer"]


class Outcome(NamedTuple):
    """message: of the first exchange after the backwards. after, twin: a later step, of these layers and of others."""

    message: str
    after: list[Tensor]
    twin: list[Tensor]


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def config_of(transport: TransportConfig, device: str = "cpu") -> MoEConfig:
    if device == "cpu":
        rounding = RoundingConfig(mode="nearest", t=2, G=2, capacity_factor=2.0)
        return MoEConfig(d=8, n=4, E=8, K=2, rounding=rounding, transport=transport)
    rounding = RoundingConfig(mode="apportion", t=64, capacity_factor=1.5)
    return MoEConfig(d=256, n=128, E=16, K=4, rounding=rounding, transport=transport)


def layers_of(config: MoEConfig, group: EPGroup, device: str = "cpu") -> list[MoE]:
    """Two layers that send as many rows each, so that no collective fails for its sizes."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [MoE(config, group, seed=0, device=device, dtype=dtype) for _ in range(2)]


def rows(layer: MoE, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number + layer.group.rank)
    tokens = T if layer.experts.w1.device.type == "cpu" else 700
    return torch.randn(tokens, layer.config.d, generator=generator).to(layer.experts.w1).requires_grad_()


def step(layers: list[MoE], number: int, runs: list[Callable[..., Any]] | None = None) -> list[Tensor]:
    for layer in layers:
        layer.zero_grad()
    x = rows(layers[0], 10 * number)
    outs = [run(x).y for run in runs or layers]
    torch.stack(outs).float().square().sum().backward()
    grads = [p.grad for layer in layers for p in layer.parameters()]
    return [each.detach().clone() for each in (*outs, x.grad, *grads) if each is not None]


def runs_of(layers: list[MoE], compiled: bool) -> list[Callable[..., Any]]:
    return [torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer for layer in layers]


def run_crossed(
    rank: int,
    transport: TransportConfig,
    cross: Cross,
    finder: Finder = "forward",
    folder: str | None = None,
    warm: int = 1,
    compiled: bool = False,
    device: str = "cpu",
) -> Outcome:
    """warm: steps before. Then rank 1 runs two backwards in another order, and there is one more exchange."""
    group = EPGroup()
    with ExitStack() as context:
        if folder is not None:
            context.enter_context(static_buffers_in(folder))
            context.enter_context(compares_nothing_in_backward())
        layers = layers_of(config_of(transport, device), group, device)
        torch._dynamo.reset()
        runs = runs_of(layers, compiled)
        for number in range(warm):
            step(layers, number, runs)
        if warm > 1 and transport.kind != "all_to_all":
            assert [layer.num_programs > 0 for layer in layers] == [True, True]
        x = rows(layers[0])
        outs = [runs[number if cross != "steps" else 0](x).y for number in range(2)]

        def go_back_and_find() -> None:
            for out in reversed(outs) if cross and rank == 1 else outs:
                out.float().square().sum().backward()
            find(layers[0], runs[0], x, finder)

        message = message_of(go_back_and_find)
        after = step(layers, 5, runs)
        twins = layers_of(config_of(transport, device), group, device)
        return Outcome(message, after, step(twins, 5, runs_of(twins, compiled)))


def find(layer: MoE, run: Callable[..., Any], x: Tensor, finder: Finder) -> None:
    match finder:
        case "forward":
            run(x)
        case "eval":
            with torch.no_grad():
                layer.eval()
                try:
                    run(x)
                finally:
                    layer.train()
        case "from_pairs":
            ids = torch.tensor([0], device=x.device)
            Routing.from_pairs(ids, ids, torch.ones(1, device=x.device), num_tokens=1, E=8, group=layer.group)
        case "a layer":
            MoE(layer.config, layer.group, seed=0)


def check(outcomes: list[Outcome], cross: Cross) -> None:
    first, *others = outcomes
    assert all(other.message == first.message for other in others)
    for outcome in outcomes:
        assert [torch.equal(a, b) for a, b in zip(outcome.after, outcome.twin, strict=True)] == [True] * len(
            outcome.twin
        )
    if not cross:
        assert first.message == ""
        return
    assert "ran backwards in different orders, which gives wrong gradients: number 1 since the last" in first.message
    for rank in range(2):
        assert f" on rank {rank}" in first.message
    _, *identities = first.message.split("the backward of ")
    one, two = (text.split(" on rank")[0] for text in identities[:2])
    assert one != two  # another layer, or another step of the same layer
    assert (one.split(", ")[1] == two.split(", ")[1]) == (cross == "steps" or "a layer" in one)


TRANSPORTS = {
    "all-to-all": (2, TransportConfig(kind="all_to_all", timeout=20)),
    "two hops": (4, TransportConfig(kind="two_hop", ranks_per_host=2, timeout=20)),
}
CROSSES: list[Cross] = ["", "layers", "steps"]


@pytest.mark.parametrize("cross", CROSSES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_over_gloo(ranks: Ranks, name: str, cross: Cross) -> None:
    size, transport = TRANSPORTS[name]
    check(ranks(size).run(run_crossed, transport, cross), cross)


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("cross", CROSSES)
@pytest.mark.parametrize("buffers", ["static", "exact"])
@pytest.mark.parametrize("compiled", [False, True])
def test_over_shared_memory(ranks: Ranks, buffers: Any, compiled: bool, cross: Cross, tmp_path: Path) -> None:
    transport = TransportConfig(buffers=buffers, timeout=20)
    check(ranks(2).run(run_crossed, transport, cross, "forward", str(tmp_path), 1, compiled), cross)


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("finder", ["eval", "from_pairs", "a layer"])
@pytest.mark.parametrize("cross", ["", "layers"])
def test_every_exchange_finds_it(ranks: Ranks, finder: Finder, cross: Cross, tmp_path: Path) -> None:
    """Over shared memory. Over gloo, the backward itself does."""
    check(ranks(2).run(run_crossed, TransportConfig(timeout=20), cross, finder, str(tmp_path)), cross)


def other_sizes(rank: int) -> list[str]:
    """Messages of two backwards that send other numbers of rows, crossed on rank 1, which would end a process of gloo;
    and of a step then."""
    config, group = config_of(TransportConfig(kind="all_to_all", timeout=20)), EPGroup()
    config = config.replace(rounding=RoundingConfig(mode="off"))
    layers = [MoE(config, group, seed=seed) for seed in range(2)]
    sums = [layer(rows(layer)).y.sum() for layer in layers]
    crossed = message_of(lambda: [each.backward() for each in (reversed(sums) if rank == 1 else sums)])
    return [crossed, message_of(lambda: step(layers, 1))]


def test_over_gloo_nothing_is_sent_then(ranks: Ranks) -> None:
    for crossed, after in ranks(2).run(other_sizes):
        assert "number 1 since the last forward was the backward of forward" in crossed
        assert after == ""


@pytest.mark.gpu
@pytest.mark.parametrize("cross", CROSSES)
@pytest.mark.parametrize(
    "transport",
    [
        TransportConfig(kind="all_to_all", timeout=20),
        TransportConfig(kind="symmetric", timeout=20),
        TransportConfig(kind="symmetric", buffers="static", timeout=20),
    ],
    ids=["NCCL", "exact", "static"],
)
@pytest.mark.parametrize("warm", [1, 5])
def test_on_gpus(gpus: Ranks, transport: TransportConfig, cross: Cross, warm: int) -> None:
    """After five steps launches are repeated."""
    check(gpus(2).run(run_crossed, transport, cross, "forward", None, warm, False, "cuda"), cross)


@pytest.mark.gpu
@pytest.mark.parametrize("cross", CROSSES)
def test_compiled_on_gpus(gpus: Ranks, cross: Cross) -> None:
    transport = TransportConfig(kind="symmetric", timeout=20)
    check(gpus(2).run(run_crossed, transport, cross, "forward", None, 1, True, "cuda"), cross)


def graphed(rank: int, cross: bool) -> str:
    """What evaluation finds after replays of two layers. Rank 1 may run their backwards in another order."""
    group = EPGroup()
    layers = layers_of(
        config_of(TransportConfig(kind="symmetric", buffers="static", timeout=20), "cuda"), group, "cuda"
    )
    x = rows(layers[0])
    for layer in layers:
        layer(x).y.sum().backward()  # buffers must exist
    for layer in layers:
        graph_layers([layer], x)  # together they would refuse the other order
    outs = [layer(rows(layer)).y for layer in layers]
    for out in outs if cross and rank == 1 else reversed(outs):
        out.sum().backward()
    layers[0].eval()
    return message_of(lambda: layers[0](x.detach()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("cross", [False, True])
def test_replays_of_graphs(gpus: Ranks, cross: bool) -> None:
    for message in gpus(2).run(graphed, cross):
        assert ("since the last forward was the backward of forward 1, of layer" in message) == cross


def in_order(rank: int) -> list[str]:
    """Messages after steps in which ranks agree, and nothing is usual: they run the backwards in reversed order, twice,
    recomputed, of a routing of their own, and of layers that are not trained."""
    group, messages = EPGroup(), []
    layers = layers_of(config_of(TransportConfig(kind="all_to_all", timeout=20)), group)
    first, x = layers[0], rows(layers[0])
    recomputing = {"use_reentrant": False, "context_fn": replay_contexts}

    def by_pairs() -> Tensor:
        ids, weights = torch.arange(2), first.experts()
        routing = Routing.from_pairs(ids, ids, torch.ones(2), num_tokens=T, E=8, group=group)
        return moe(x, routing, weights.w1, weights.w2_eHI, transport=first.transport, group=group)

    makes: list[Callable[[], list[Tensor]]] = [
        lambda: [layer(x).y for layer in reversed(layers)],
        lambda: [torch.stack([layer(x).y for layer in layers])],
        lambda: [checkpoint(lambda x, layer=layer: layer(x).y, x, **recomputing) for layer in layers],  # pyright: ignore[reportArgumentType,reportReturnType]
        lambda: [by_pairs(), by_pairs()],
        lambda: [first.requires_grad_(False)(x).y, first.requires_grad_(True)(x).y],
    ]
    for make in makes:
        outs = make()
        for _ in range(2):
            for out in reversed(outs):
                out.sum().backward(retain_graph=True)
        messages.append(message_of(lambda: first(x)))
    return messages


def test_the_same_order_is_no_error(ranks: Ranks) -> None:
    assert ranks(2).run(in_order) == [[""] * 5] * 2


def pairs_crossed(rank: int) -> str:
    group = EPGroup()
    first, _ = layers_of(config_of(TransportConfig(kind="all_to_all", timeout=20)), group)
    x, ids, weights = rows(first), torch.arange(2), first.experts()
    routings = [Routing.from_pairs(ids, ids, torch.ones(2), num_tokens=T, E=8, group=group) for _ in range(2)]
    outs = [moe(x, routing, weights.w1, weights.w2_eHI, transport=first.transport, group=group) for routing in routings]
    return message_of(lambda: [out.sum().backward() for out in (reversed(outs) if rank == 1 else outs)])


def test_routings_of_pairs_are_told_apart(ranks: Ranks) -> None:
    for message in ranks(2).run(pairs_crossed):
        assert "number 1 since the last forward was the backward of forward" in message
