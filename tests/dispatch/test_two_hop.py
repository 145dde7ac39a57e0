"""The two-hop transport on imitated hosts: against all-to-all, against loops over tokens, and byte by byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from tests.dispatch import oracle
from tests.dispatch.oracle import Case, Outcome
from tests.helpers.launch import RankError, RankPool

Ranks = Callable[[int], RankPool]
# Ranks of a host, and what they exchange. With one host, or one rank on each, a hop has nothing to send.
CASES = [
    (1, Case((13, 9), 5, 6, multiple=4)),
    (2, Case((0, 11), 7, 4)),
    (2, Case((13, 1, 0, 22), 5, 8)),
    (2, Case((13, 1, 0, 22), 5, 8, multiple=4)),
    (2, Case((0, 0, 0, 9), 3, 4, "all", multiple=2)),
    (2, Case((7, 8, 9, 10), 4, 12, "last")),
    (2, Case((5, 6, 7, 8), 4, 4, "none")),
    (1, Case((40, 33, 27, 38), 6, 16, "top2", multiple=16, tile=16)),
    (4, Case((3, 1, 2, 4), 2, 4, "any", tile=128)),
]
LARGE = [
    (4, Case((9, 0, 7, 5, 3, 8, 1, 12), 4, 16, "top2", multiple=4, tile=8)),
    (2, Case((9, 0, 7, 5, 3, 8, 1, 12), 3, 8, "any")),
]


def both(rank: int, on_a_host: int, case: Case, dtype: torch.dtype, pair_weights: torch.dtype) -> list[Outcome]:
    """Worker: what each transport does with the same plan."""
    group = EPGroup()
    transports = [AllToAllTransport(group), TwoHopTransport(group, on_a_host)]
    return [oracle.use(transport, rank, case, dtype, pair_weights) for transport in transports]


def equal_bits(first: Tensor, second: Tensor) -> bool:
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def check(ranks: Ranks, on_a_host: int, case: Case, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    """Rows of any bits, sums of small integers, weights of any value."""
    for of_rank in ranks(case.size).run(both, on_a_host, case, dtype, pair_weights):
        wanted, got = of_rank
        for name in ("rows", "weights_P", "roundtrip", "returned"):
            assert equal_bits(getattr(got, name), getattr(wanted, name)), name
        assert got.lists.keys() == wanted.lists.keys()
        for name, values in wanted.lists.items():
            assert equal_bits(got.lists[name], values), name
        assert (got.num_tokens, got.num_rows) == (wanted.num_tokens, wanted.num_rows)
        assert (got.received_dot, got.sent_dot) == (wanted.received_dot, wanted.sent_dot)


@pytest.mark.parametrize(("on_a_host", "case"), CASES, ids=str)
def test_equals_all_to_all(ranks: Ranks, on_a_host: int, case: Case) -> None:
    check(ranks, on_a_host, case, torch.float32, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("on_a_host", "case"), LARGE, ids=str)
def test_eight_ranks_equal_all_to_all(ranks: Ranks, on_a_host: int, case: Case) -> None:
    check(ranks, on_a_host, case, torch.float32, torch.float32)


@pytest.mark.parametrize("pair_weights", [torch.float32, torch.float64, torch.bfloat16], ids="weights-{}".format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids="rows-{}".format)
def test_any_dtype(ranks: Ranks, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    check(ranks, *CASES[3], dtype, pair_weights)


@settings(max_examples=15)
@given(
    st.builds(
        Case,
        tokens=st.tuples(*[st.one_of(st.just(0), st.integers(0, 24)) for _ in range(4)]),
        H=st.integers(1, 6),
        E=st.integers(1, 4).map(lambda e: e * 4),
        picks=st.sampled_from(["any", "any", "all", "last", "none"]),
        multiple=st.integers(1, 9),
        tile=st.integers(1, 9),
        seed=st.integers(0, 99),
    )
)
def test_any_routing(ranks: Ranks, case: Case) -> None:
    check(ranks, 2, case, torch.float64, torch.float32)


def crossings(case: Case, rank: int, on_a_host: int) -> int:
    """Rows that a rank sends to other hosts: one for each token and host with one of its experts."""
    hosts = {(token, case.dst(expert) // on_a_host) for expert, token in case.pairs(rank)}
    return sum(host != rank // on_a_host for _, host in hosts)


@pytest.mark.parametrize(("on_a_host", "case"), CASES, ids=str)
def test_a_row_crosses_once_for_each_host(ranks: Ranks, on_a_host: int, case: Case) -> None:
    dtype = torch.bfloat16
    outcomes = ranks(case.size).run(both, on_a_host, case, dtype, torch.float32)
    row_bytes = case.H * dtype.itemsize
    for rank, (_, got) in enumerate(outcomes):
        # `use` dispatches and combines twice.
        assert got.wire_bytes["dispatch across hosts"] == 2 * crossings(case, rank, on_a_host) * row_bytes
        arriving = sum(
            crossings_to(case, source, rank // on_a_host, on_a_host)
            for source in range(rank % on_a_host, case.size, on_a_host)
            if source // on_a_host != rank // on_a_host
        )
        assert got.wire_bytes["combine across hosts"] == 2 * arriving * row_bytes
        pairs = [case.dst(expert) // on_a_host != rank // on_a_host for expert, _ in case.pairs(rank)]
        assert got.wire_bytes["lists across hosts"] == sum(pairs) * 8


def crossings_to(case: Case, source: int, host: int, on_a_host: int) -> int:
    return len({token for expert, token in case.pairs(source) if case.dst(expert) // on_a_host == host})


def layer_gradients(rank: int, kind: str, mode: str, tokens: tuple[int, ...], save_dispatched: bool) -> list[Tensor]:
    """Worker: y, aux_loss and every gradient of a layer in float64, and the same in evaluation."""
    config = MoEConfig(
        d=6,
        n=4,
        E=8,
        K=3,
        bias=True,
        save_dispatched=save_dispatched,
        rounding=RoundingConfig(mode=mode, t=4, G=4),  # type: ignore[arg-type]
        transport=TransportConfig(kind=kind, ranks_per_host=2 if kind == "two_hop" else None),  # type: ignore[arg-type]
    )
    layer = MoE(config, EPGroup(), seed=5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rank)
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.randn(tokens[rank], 6, generator=generator, dtype=torch.float64, requires_grad=True)
        y, aux_loss, _ = layer(x)
        dout = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        found += [y, aux_loss, *torch.autograd.grad([y, aux_loss], [x, *layer.parameters()], [dout, None])]
    layer.eval()
    found.append(layer(torch.randn(tokens[rank], 6, generator=generator, dtype=torch.float64))[0])
    return [each.detach() for each in found]


@pytest.mark.parametrize("save_dispatched", [False, True])
@pytest.mark.parametrize("tokens", [(9, 9, 9, 9), (0, 13, 1, 7)], ids=str)
@pytest.mark.parametrize("mode", ["off", "nearest", "up", "down", "stochastic", "apportion"])
def test_a_layer_equals_that_over_all_to_all(
    ranks: Ranks, mode: str, tokens: tuple[int, ...], save_dispatched: bool
) -> None:
    """But for the order in which a token's sums over ranks are added."""
    wanted, got = (
        ranks(4).run(layer_gradients, kind, mode, tokens, save_dispatched) for kind in ("all_to_all", "two_hop")
    )
    for of_wanted, of_got in zip(wanted, got, strict=True):
        for one, other in zip(of_got, of_wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def built(rank: int, config: dict[str, Any]) -> str:
    """Worker: the transport of a layer, by name."""
    layer = MoE(MoEConfig(d=4, n=4, E=4, K=2, transport=TransportConfig(**config)), EPGroup(), seed=0)
    layer(torch.randn(3, 4))
    return type(layer.transport.on(torch.zeros(1))).__name__  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "AllToAllTransport"),
        ({"ranks_per_host": 2}, "TwoHopTransport"),
        ({"ranks_per_host": 1}, "AllToAllTransport"),
        ({"ranks_per_host": 4}, "AllToAllTransport"),
        ({"kind": "two_hop"}, "TwoHopTransport"),  # one host
        ({"kind": "two_hop", "ranks_per_host": 1}, "TwoHopTransport"),
    ],
    ids=str,
)
def test_what_is_chosen(ranks: Ranks, config: dict[str, Any], wanted: str) -> None:
    assert ranks(4).run(built, config) == [wanted] * 4


def test_ranks_that_do_not_divide(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="transport.ranks_per_host=3 does not divide ep_size=4; set it to a divisor"):
        ranks(4).run(built, {"kind": "two_hop", "ranks_per_host": 3})


def on_uneven_hosts(rank: int, kind: str) -> str:
    """Worker: `built`, with three ranks on one host."""
    from sonic_ep.groups import hosts

    found = hosts.host_name
    hosts.host_name = lambda: "a 1" if rank < 3 else "b 2"
    try:
        return built(rank, {"kind": kind})
    finally:
        hosts.host_name = found


def test_uneven_hosts(ranks: Ranks) -> None:
    assert ranks(4).run(on_uneven_hosts, "auto") == ["AllToAllTransport"] * 4
    with pytest.raises(RankError, match=r"not spread evenly over the hosts: a \[0, 1, 2\], b \[3\]; give each host"):
        ranks(4).run(on_uneven_hosts, "two_hop")


def compiled(rank: int) -> None:
    config = MoEConfig(d=12, n=8, E=4, K=2, transport=TransportConfig(kind="two_hop", ranks_per_host=1))
    torch.compile(MoE(config, EPGroup(), seed=0), fullgraph=True)(torch.randn(6, 12))


def test_a_compiled_graph_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="two hops .* are not supported under torch.compile; set transport.kind"):
        ranks(2).run(compiled)
