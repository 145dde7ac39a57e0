"""`moe` is traced once for a kind of step, and its programs serve many sizes; on a CPU that imitates a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.steps.experts_trace import ExpertsKind, PreparedKind, traced
from sonic_ep.steps.programs import Ranks
from tests.helpers.fake_cuda import CUDA, Memory, described, fake_cuda, ranks_of

E, H, I, K = 16, 256, 128, 4  # noqa: E741
Shapes = tuple[torch.Size | None, ...]
SIZES = {  # of the traced step and of another; see ExpertsKind.usual_sizes
    "T": (4096, 5120),
    "N": (16_384, 20_480),
    "R": (18_432, 22_528),
    "M": (4096, 6144),
    "P": (18_432, 20_608),
    "V": (18_432, 20_608),
    "C": (36_864, 45_056),
    "D": (2**26, 2**27),
}


@pytest.fixture(autouse=True)
def memory() -> Iterator[Memory]:
    with fake_cuda() as memory:
        yield memory


def shapes_of(e: int, *, bias: bool = False, layout: str = "interleaved", split: bool = False, r: int = 0) -> Shapes:
    w1, w2 = ((e, H, 2 * I), (e, I, H)) if layout == "transposed" else ((e, 2 * I, H), (e, H, I))
    w1, up = ((e, I, H), (e, I, H)) if split else (w1, None)
    biases = ((e, 2 * I), (e, H)) if bias else (None, None)
    lora = ((e, r, H), (e, 2 * I, r), (e, r, I), (e, H, r)) if r else (None,) * 4
    return tuple(None if shape is None else torch.Size(shape) for shape in (w1, up, w2, *biases, *lora))


def kind_of(num_ranks: int = 1, **changes: Any) -> ExpertsKind:
    layout = changes.get("layout", "interleaved")
    options = {name: changes.pop(name) for name in ("bias", "split", "r") if name in changes}
    static, hosts = changes.pop("static", False), changes.pop("hosts", 0)
    batch_invariant = changes.pop("batch_invariant", False)
    shapes = shapes_of(E // num_ranks, layout=layout, **options)
    ranks = None if num_ranks == 1 else ranks_of(num_ranks, H, E, K, is_static=static)
    needs = True, True, *(each is not None for each in shapes[3:5]), shapes[5] is not None, shapes[7] is not None
    kind = ExpertsKind(
        activation="swiglu",
        layout=layout,
        save_dispatched=False,
        rounded=False,
        same_counts=True,
        E=E,
        H=H,
        K=K,
        dtype=torch.bfloat16,
        weights_dtype=torch.float32,
        shapes=shapes,
        needs=needs,
        into=(None, None),
        has_backward=True,
        device=CUDA,
        ranks=ranks,
    )
    if hosts:
        ranks, prepared = prepared_by_code(num_ranks, hosts, batch_invariant=batch_invariant)
        kind = kind._replace(ranks=ranks, prepared=prepared)
    return kind._replace(**changes)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rounded": {"rounded": True, "same_counts": False},
    "bias": {"bias": True},
    "main_grad": {"into": (torch.float32, torch.bfloat16)},
    "concatenated": {"layout": "concatenated"},
    "transposed": {"layout": "transposed", "bias": True},
    "split": {"split": True},
    "lora": {"r": 8},
    "frozen": {"needs": (False, True, False, False, False, False)},
    "evaluation": {"has_backward": False},
}
OF_RANKS: dict[str, dict[str, Any]] = {
    "rows": {"save_dispatched": True},
    "static": {"static": True, "rounded": True},
    "all-to-all": {"hosts": 1},
    "all-to-all, rounded": {"hosts": 1, "rounded": True},
    "two hops": {"hosts": 2, "save_dispatched": True},
    "all-to-all, batch-invariant": {"hosts": 1, "batch_invariant": True},
    "two hops, batch-invariant": {"hosts": 2, "batch_invariant": True},
}


def prepared_by_code(num_ranks: int, hosts: int, *, batch_invariant: bool) -> tuple[Ranks, PreparedKind]:
    """Transports over torch.distributed. Nothing is exchanged here."""
    group: Any = ranks_of(num_ranks, H, E, K).group
    transport: Any = AllToAllTransport(group, batch_invariant=batch_invariant)
    if hosts > 1:
        transport = TwoHopTransport(group, num_ranks // hosts, batch_invariant=batch_invariant)
    lengths = num_ranks, num_ranks, num_ranks, num_ranks, *([num_ranks] * 4 if hosts > 1 else [0] * 4)
    return Ranks(group, transport, None), PreparedKind(lengths, (8 if hosts == 1 else 11) + 2 * batch_invariant)


def sizes_of(kind: ExpertsKind, step: int) -> tuple[int, ...]:
    """Of what the code has prepared, each rank sends and gets as many rows."""
    T, N = SIZES["T"][step], SIZES["N"][step]
    rows = 2 * T
    lengths = N, N, rows + 1, N, E // 2 + 1, rows, rows, T + 1
    sizes = {**{name: each[step] for name, each in SIZES.items()}, "A": rows, "w": N}
    if kind.prepared is not None:
        two_hops, ranks = kind.prepared.splits[4] > 0, kind.ranks
        lengths = (*lengths, *((rows, rows, rows + 1) if two_hops else ()))
        if ranks is not None and ranks.transport.batch_invariant:
            lengths = (*lengths, N, T + 1)
        sizes |= {f"l{number}": length for number, length in enumerate(lengths)}
        splits = [rows // 2] * 4 + [N // 2] * 4 + [rows // 2] * 8
        sizes |= {f"s{number}": size for number, size in enumerate(splits)}
    return tuple(sizes[name] for name in kind.usual_sizes)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [*[(name, size) for name in KINDS for size in (1, 2)], *[(name, 2) for name in OF_RANKS]]
)
def test_a_program_of_other_sizes_is_the_one_that_these_would_give(name: str, num_ranks: int) -> None:
    kind = kind_of(num_ranks, **{**KINDS, **OF_RANKS}[name])
    sizes, other = sizes_of(kind, 0), sizes_of(kind, 1)
    one = traced(kind, sizes)
    if name == "static":  # its number of tokens does not change
        assert not one.forward.fits(*other)
        return
    two = traced(kind, other)
    assert one.forward.fits(*other)
    assert one.backward.keys() == two.backward.keys() == ({kind.into} if kind.has_backward else set())
    for found, wanted in [(one.forward, two.forward), *zip(one.backward.values(), two.backward.values(), strict=True)]:
        assert described(found, other) == described(wanted, other)
