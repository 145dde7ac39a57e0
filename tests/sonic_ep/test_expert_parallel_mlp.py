"""In which order things are launched: backward's GEMMs, and experts of whose rows the host knows a bound alone."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, TransportConfig
from sonic_ep.config import TransportKind
from sonic_ep.dispatch import local
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import Pending, Transport
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.functional import moe
from sonic_ep.kernels.experts import mlp
from sonic_ep.kernels.experts.tile_table import ReserveFor
from sonic_ep.routing import AsyncSplitSizes, Routing
from sonic_ep.transports import GroupTransport, transport_for
from tests.dispatch.oracle import Case
from tests.helpers.launch import RankPool
from tests.helpers.noting import noting
from tests.helpers.poison import poisoned_empty
from tests.helpers.shared_files import shared_files
from tests.helpers.static_buffers import lists_with_spare, with_spare
from tests.helpers.triton_device import triton_device

pytestmark = pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels; see test_symmetric_gpu.py")
H, I, E = 5, 3, 4  # noqa: E741


def experts_of(group: EPGroup) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    sizes = (E // group.size, 2 * I, H), (E // group.size, H, I)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def step(
    transport: Transport, group: EPGroup, routing: Routing, experts: list[Tensor], *, saved: bool = False
) -> list[Tensor]:
    """Output and gradients. saved: `save_dispatched`."""
    generator = torch.Generator().manual_seed(group.rank)
    x, dout = (torch.randn(routing.num_tokens, H, generator=generator) for _ in range(2))
    leaves = [x.requires_grad_(), *experts, routing.weights_N.clone().requires_grad_()]
    trained = replace(routing, weights_N=leaves[3])
    y = moe(x, trained, *experts, transport=transport, group=group, save_dispatched=saved)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dout)]


def bounded(rank: int, cases: list[Case], folder: str) -> list[str]:
    """Steps that were launched with bounds of their sizes, of which some are too small; what went on in each."""
    group, how = EPGroup(), []
    transport, experts = SymmetricTransport(group, shared_files(group, folder), timeout=60), experts_of(group)
    for case in cases:
        routing = case.routing(rank)
        needed = SizeBound.needed_by(split_sizes_async(routing).read())
        expected = step(AllToAllTransport(group), group, routing, experts)
        for more in ((0, 7, 5), (2, 0, 0), (0, -1, 0), (0, 5, -1), (-1, 9, 9)):
            bound = SizeBound(*(max(0, size + each) for size, each in zip(needed, more, strict=True)))
            how.append("")
            with (
                lists_with_spare(),
                poisoned_empty(),
                transport.bounded_by(bound),
                noting(how, "o", SymmetricTransport, "_launch"),
                noting(how, "r", AsyncSplitSizes, "read"),
                noting(how, "e", mlp, "forward_hidden"),
            ):
                got = step(transport, group, routing, experts)
            if not bound.holds(needed):  # its results are undefined, and nothing was sent
                got = step(transport, group, routing, experts)
            assert all(map(torch.equal, got, expected)), (case, bound)
    return how


BOUNDED = [
    Case((13, 9), H, E, "all"),
    Case((13, 9), H, E, "top2", multiple=4),
    Case((13, 14), H, E, "top2"),
    Case((12, 9), H, E, "none"),
]


def test_a_bounded_step_is_launched_without_a_look_at_sizes(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    for how in ranks(2).run(bounded, BOUNDED, str(tmp_path)):
        assert set(how) == {"oe"}


ALONE = [
    Case((13,), H, E, "top2", multiple=8),
    Case((13,), H, E, "top2", multiple=2),
    Case((13,), H, E, "all", multiple=2),
    Case((12,), H, E, "none", multiple=2),
]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_experts_of_one_rank_need_no_sizes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    group, how = EPGroup.alone(), [""]
    experts, routing = experts_of(group), case.routing(0)
    with lists_with_spare(), poisoned_empty(), noting(how, "r", AsyncSplitSizes, "read"):
        expected = step(LocalTransport(), group, routing, experts)
        assert how == ["r"]
        monkeypatch.setattr(local, "allows_spare_capacity", lambda _: True)
        assert routing.max_rows is not None
        got = step(LocalTransport(), group, with_spare(routing, 3, max_rows=routing.max_rows + 20), experts)
    assert how == ["r"]
    sizes = [values.shape[0] for values in expected]
    assert all(torch.equal(a[:size], b) for a, b, size in zip(got, expected, sizes, strict=True))


def order_of_backward(rank: int, frozen: bool) -> list[str]:
    """GEMMs, of dX whether A' takes memory then, and when its sums leave for their ranks and must have arrived."""
    group, done, a_P = EPGroup(), list[str](), list[weakref.ref[Tensor]]()
    backward_hidden, backward_pairs = mlp.backward_hidden, mlp.backward_pairs
    start = GroupTransport.combine

    def hidden(*args: Any, **options: Any) -> mlp.HiddenGrads:
        grads = backward_hidden(*args, **options)
        a_P.append(weakref.ref(grads.scaled_a_PI))
        return grads

    def pairs(*args: Any, **options: Any) -> Tensor:
        done.append("dX" if a_P[0]() is None else "dX beside A'")
        return backward_pairs(*args, **options)

    def starting(*args: Any, overlap: bool = False) -> Pending:
        combining = start(*args, overlap=overlap)
        if not overlap:
            return combining
        done.append("leave")

        def result() -> Tensor:
            done.append("arrive")
            return combining.result()

        return replace(combining, result=result)

    case = Case((13, 9)[: group.size], H, E, "top2")
    experts = [weight.requires_grad_(not frozen) for weight in experts_of(group)]
    with (
        patch.object(GroupTransport, "combine", starting),
        patch.object(mlp, "backward_hidden", hidden),
        patch.object(mlp, "backward_pairs", pairs),
        noting([done], ["dW2"], mlp, "backward_down_weights"),
        noting([done], ["dW1"], mlp, "backward_up_weights"),
    ):
        step(transport_for(group), group, case.routing(rank), experts)
    return done


ORDERS = {
    (1, False): ["dW2", "dX", "dW1"],
    (2, False): ["dX beside A'", "leave", "dW2", "dW1", "arrive"],
    (2, True): ["dX beside A'"],
}


@pytest.mark.parametrize(("size", "frozen"), ORDERS)
def test_other_ranks_get_their_gradients_first(ranks: Callable[[int], RankPool], size: int, frozen: bool) -> None:
    assert ranks(size).run(order_of_backward, frozen) == [ORDERS[size, frozen]] * size


BACKWARD = ("backward_hidden", "backward_pairs", "backward_down_weights", "backward_up_weights")


def reserved_by_gemm(rank: int, kind: TransportKind, saved: bool) -> dict[str, ReserveFor | None]:
    """What each GEMM of a backward leaves SMs to, if exchanges over torch.distributed overlap it, as on a GPU."""
    group, reserved = EPGroup(), dict[str, ReserveFor | None]()

    def start(
        transport: CollectiveTransport, exchange: Callable[[Tensor], Tensor], values: Tensor, *, overlap: bool
    ) -> Pending:
        return replace(Pending.done(exchange(values)), reserve_for="exchange" if overlap else None)

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(mlp, name)

        def gemm(*args: Any, **options: Any) -> Any:
            reserved[name] = options["reserve_for"]
            return call(*args, **options)

        return gemm

    case = Case((13, 9), H, E, "top2")
    transport = transport_for(group, TransportConfig(kind=kind, ranks_per_host=1 if kind == "two_hop" else None))
    with ExitStack() as patches:
        patches.enter_context(patch.object(CollectiveTransport, "_start", start))
        for name in BACKWARD:
            patches.enter_context(patch.object(mlp, name, noted(name)))
        step(transport, group, case.routing(rank), experts_of(group), saved=saved)
    return reserved


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", ["all_to_all", "two_hop"])
def test_gemms_leave_sms_to_the_exchange_that_they_hide(
    ranks: Callable[[int], RankPool], kind: TransportKind, saved: bool
) -> None:
    of_x = None if saved else "exchange"  # then x does not travel again
    wanted = dict(zip(BACKWARD, (of_x, of_x, "exchange", "exchange"), strict=True))
    assert ranks(2).run(reserved_by_gemm, kind, saved) == [wanted] * 2
