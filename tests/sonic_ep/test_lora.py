"""`moe(..., lora=)` equals, in float64, `moe` with W + B A as its weights, and makes no such weights."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sonic_ep import EPGroup, Routing, TransportConfig
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.functional import ExpertsLoRA, moe
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import ACTIVATIONS
from sonic_ep.transports import transport_for
from tests.helpers.launch import RankPool
from tests.helpers.poison import poisoned_empty
from tests.helpers.shared_files import shared_files
from tests.helpers.static_buffers import lists_with_spare
from tests.helpers.triton_device import triton_device
from tests.sonic_ep.test_functional import saved_bytes

Ranks = Callable[[int], RankPool]
T, H, I, E, K = 29, 16, 24, 4, 2  # noqa: E741
NAMES = ("a1_erH", "b1_eJr", "a2_erI", "b2_eHr")


def problem(
    group: EPGroup,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    r1: int | None = 3,
    r2: int | None = 8,
    **own: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of `moe` without lora, and the tensors of lora."""
    generator = torch.Generator().manual_seed(group.rank)
    J, e, dtype = (2 * I if ACTIVATIONS[activation].gated else I), E // group.size, own.get("dtype", torch.float64)
    device = own.get("device", "cpu")

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    ids = torch.rand(T, E, generator=generator).topk(K).indices.to(device)
    experts, order = ids.flatten().sort(stable=True)
    pair_weights = torch.rand(T * K, generator=generator, dtype=torch.float64)
    pair_weights = pair_weights.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
    routing = Routing.from_pairs(order // K, experts, pair_weights, num_tokens=T, E=E, group=group)
    arguments: dict[str, Any] = {
        "x_TH": drawn(T, H),
        "routing": routing,
        "w1_eJH": drawn(e, J, H),
        "w2_eHI": drawn(e, H, I),
        "transport": transport_for(group),
        "group": group,
        "activation": activation,
    }
    if bias:
        arguments |= {"b1_eJ": drawn(e, J), "b2_eH": drawn(e, H)}
    shapes = {}
    if r1 is not None:
        shapes |= {"a1_erH": (e, r1, H), "b1_eJr": (e, J, r1)}
    if r2 is not None:
        shapes |= {"a2_erI": (e, r2, I), "b2_eHr": (e, H, r2)}
    return arguments, {name: drawn(*shape) for name, shape in shapes.items()}


def materialized(arguments: dict[str, Any], lora: dict[str, Tensor]) -> dict[str, Any]:
    """W + B A as the weights."""
    w1, w2 = arguments["w1_eJH"], arguments["w2_eHI"]
    if "a1_erH" in lora:
        w1 = w1 + lora["b1_eJr"] @ lora["a1_erH"]
    if "a2_erI" in lora:
        w2 = w2 + lora["b2_eHr"] @ lora["a2_erI"]
    return {**arguments, "w1_eJH": w1, "w2_eHI": w2}


def outputs(arguments: dict[str, Any], lora: dict[str, Tensor], *, fused: bool) -> dict[str, Tensor]:
    """The result, and the gradients of all that has one."""
    leaves = {name: each for name, each in {**arguments, **lora}.items() if isinstance(each, Tensor)}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    leaves["pair_weights"] = arguments["routing"].weights_N
    y = moe(**arguments, lora=ExpertsLoRA(**lora)) if fused else moe(**materialized(arguments, lora))
    dout = torch.linspace(-1, 1, H, dtype=torch.float64).to(y.device, y.dtype)
    return {
        "y": y.detach(),
        **dict(zip(leaves, torch.autograd.grad((y * dout).sum(), [*leaves.values()]), strict=True)),
    }


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10 * float(value.norm()), msg=name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_materialized_weights(activation: str) -> None:
    for bias in (False, True):
        arguments, lora = problem(EPGroup.alone(), activation=activation, bias=bias)
        assert_equal(outputs(arguments, lora, fused=True), outputs(arguments, lora, fused=False))


@pytest.mark.parametrize(("r1", "r2"), [(None, 5), (5, None), (1, 17), (16, 1)])
def test_one_update_alone_and_ranks_of_their_own(r1: int | None, r2: int | None) -> None:
    arguments, lora = problem(EPGroup.alone(), r1=r1, r2=r2)
    assert_equal(outputs(arguments, lora, fused=True), outputs(arguments, lora, fused=False))


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks(size: int, saves: bool, ranks: Ranks) -> None:
    for got, wanted in ranks(size).run(both_saving, saves):
        assert_equal(got, wanted)


def both_saving(rank: int, saves: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    arguments, lora = problem(EPGroup())
    arguments["save_dispatched"] = saves
    return outputs(arguments, lora, fused=True), outputs(arguments, lora, fused=False)


@pytest.mark.parametrize("bias", [False, True])
def test_concatenated_rows(bias: bool) -> None:
    arguments, lora = problem(EPGroup.alone(), bias=bias)
    arguments["layout"] = "concatenated"
    assert_equal(outputs(arguments, lora, fused=True), outputs(arguments, lora, fused=False))


def test_split_gate_and_up() -> None:
    arguments, lora = problem(EPGroup.alone())
    whole = {**arguments, "layout": "concatenated"}
    wanted = outputs(whole, lora, fused=False)
    gate, up = (half.detach().clone().requires_grad_() for half in arguments["w1_eJH"].chunk(2, 1))
    got = outputs({**arguments, "w1_eJH": gate, "up_eIH": up}, lora, fused=True)
    got["w1_eJH"] = torch.cat([got["w1_eJH"], got.pop("up_eIH")], 1)
    assert_equal(got, wanted)


def test_an_expert_without_tokens_and_no_tokens_at_all() -> None:
    arguments, lora = problem(EPGroup.alone())
    tokens, experts = torch.tensor([0, 1, 5]), torch.tensor([0, 0, 2])
    for chosen in (slice(0, 3), slice(0, 0)):
        number = tokens[chosen].shape[0]
        pair_weights = torch.rand(number, dtype=torch.float64).requires_grad_()
        routing = Routing.from_pairs(
            tokens[chosen], experts[chosen], pair_weights, num_tokens=T, E=E, group=EPGroup.alone()
        )
        own = {**arguments, "routing": routing}
        got = outputs(own, lora, fused=True)
        assert_equal(got, outputs(own, lora, fused=False))
        assert not got["a1_erH"][1].any()


def assert_bfloat16_is_close_to_float64(**options: Any) -> None:
    arguments, lora = problem(EPGroup.alone(), dtype=torch.bfloat16, **options)
    # Below every activation's limit, where rounding may switch a derivative between 0 and 1.
    arguments["x_TH"] = (arguments["x_TH"].detach() / (8 * H**0.5)).requires_grad_()
    got = outputs(arguments, lora, fused=True)
    exact = {name: each.detach().double().requires_grad_() for name, each in lora.items()}
    wide = {
        name: each.detach().double().requires_grad_() if isinstance(each, Tensor) else each
        for name, each in arguments.items()
    }
    pair_weights = arguments["routing"].weights_N.detach().double().requires_grad_()
    wide["routing"] = replace(arguments["routing"], weights_N=pair_weights)
    for name, wanted in outputs(wide, exact, fused=False).items():
        error = (got[name].double() - wanted).norm() / wanted.norm()
        assert error < 0.01, name


def test_bfloat16_is_close_to_float64() -> None:
    assert_bfloat16_is_close_to_float64()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("r1", "r2"), [(3, 8), (16, 64), (None, 8), (8, None)])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu_erf", "relu2"])
def test_gpu_kernels_are_close_to_float64(activation: str, r1: int | None, r2: int | None, bias: bool) -> None:
    assert_bfloat16_is_close_to_float64(device="cuda", activation=activation, r1=r1, r2=r2, bias=bias)


def frozen(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in ("w1_eJH", "w2_eHI"):
        arguments[name].requires_grad_(False)
    return arguments


def test_frozen_weights_get_no_gradient_and_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, lora = problem(EPGroup.alone())
    made: list[tuple[int, ...]] = []
    weight_grad = reference.weight_grad

    def noted(*args: Any, **options: Any) -> Tensor:
        result = weight_grad(*args, **options)
        made.append(tuple(result.shape))
        return result

    monkeypatch.setattr(reference, "weight_grad", noted)
    outputs(frozen(arguments), lora, fused=True)
    assert sorted(made) == sorted([(E, 8, H), (E, 2 * I, 8), (E, 8, I), (E, H, 8)])  # the rank 3 is padded
    made.clear()
    for each in (*lora.values(), arguments["w1_eJH"]):
        each.requires_grad_(False)
    moe(**arguments, lora=ExpertsLoRA(**lora)).sum().backward()
    assert made == []


def test_nothing_is_saved_but_a_and_b() -> None:
    arguments, lora = problem(EPGroup.alone(), r1=8, r2=8)
    weights = [frozen(arguments)[name] for name in ("w1_eJH", "w2_eHI")]
    plain = saved_bytes(lambda: moe(**arguments), weights)
    assert saved_bytes(lambda: moe(**arguments, lora=ExpertsLoRA(**lora)), [*weights, *lora.values()]) == plain


class MadeShapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else (result,)
        self.shapes.update(tuple(each.shape) for each in found if isinstance(each, Tensor))
        return result


@pytest.mark.parametrize("fused", [True, False])
def test_no_tensor_has_the_shape_of_weights(fused: bool) -> None:
    arguments, lora = problem(EPGroup.alone())
    with MadeShapes() as made:
        outputs(frozen(arguments), lora, fused=fused)
    shapes = {tuple(arguments[name].shape) for name in ("w1_eJH", "w2_eHI")}
    assert (shapes & made.shapes == set()) == fused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b1_eJr": None}, "lora has one of A1 and B1; pass both"),
        ({"a2_erI": None}, "lora has one of A2 and B2; pass both"),
        ({"a1_erH": torch.zeros(4, 3, 15, dtype=torch.float64)}, r"A1 has shape \(4, 3, 15\), wanted \(4, 3, 16\)"),
        ({"b1_eJr": torch.zeros(4, 48, 4, dtype=torch.float64)}, r"B1 has shape \(4, 48, 4\), wanted \(4, 48, 3\)"),
        ({"b2_eHr": torch.zeros(3, 16, 8, dtype=torch.float64)}, r"B2 has shape \(3, 16, 8\), wanted \(4, 16, 8\)"),
        ({"a2_erI": torch.zeros(4, 8, 24)}, "A2 is torch.float32 on cpu, x is torch.float64"),
        ({"a2_erI": torch.zeros(4, 0, 24, dtype=torch.float64)}, "with a rank of at least 1"),
        ({"a2_erI": torch.zeros(8, dtype=torch.float64)}, "with a rank of at least 1"),
    ],
)
def test_wrong_updates_are_refused(change: dict[str, Any], message: str) -> None:
    arguments, lora = problem(EPGroup.alone())
    with pytest.raises(ValueError, match=message):
        moe(**arguments, lora=ExpertsLoRA(**{**lora, **change}))


def test_not_with_batch_invariance() -> None:
    arguments, lora = problem(EPGroup.alone())
    arguments["transport"] = transport_for(EPGroup.alone(), TransportConfig(batch_invariant=True))
    with pytest.raises(ValueError, match=r"^lora is not supported with batch_invariant=True; add B A"):
        moe(**arguments, lora=ExpertsLoRA(**lora))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_graph_has_the_gradients_of_updates() -> None:
    arguments, lora = problem(EPGroup.alone())
    routing = arguments["routing"]
    arguments["routing"] = replace(routing, weights_N=routing.weights_N.detach())
    leaves = [each.detach().requires_grad_() for each in lora.values()]

    def run(*updates: Tensor) -> Tensor:
        return moe(**arguments, lora=ExpertsLoRA(**dict(zip(lora, updates, strict=True))))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    ours, theirs = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, run))
    for mine, other in zip(ours, theirs, strict=True):
        assert other.any()
        assert torch.equal(mine, other)


def with_spare_capacity(rank: int, folder: str) -> None:
    """Over symmetric memory lists have rows behind the last pair, with NaN in all that nobody writes."""
    group = EPGroup()
    arguments, lora = problem(group, dtype=torch.float32)
    wanted = outputs(arguments, lora, fused=True)
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60)
    rows: list[int] = []
    down_projection = reference.down_projection

    def noted(a_PI: Tensor, *args: Any, **options: Any) -> Tensor:
        rows.append(a_PI.shape[0])
        return down_projection(a_PI, *args, **options)

    tokens, *needed = SizeBound.needed_by(split_sizes_async(arguments["routing"]).read())
    bound = SizeBound(tokens, *(size + 9 for size in needed))
    for bounds in (nullcontext(), transport.bounded_by(bound)):
        noting_rows = patch.object(reference, "down_projection", noted)
        with lists_with_spare(), poisoned_empty(), bounds, noting_rows:
            got = outputs({**arguments, "transport": transport}, lora, fused=True)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, msg=name)
    assert len(set(rows)) > 1  # more rows than pairs in the second step


def test_spare_rows_reach_no_result(ranks: Ranks, tmp_path: Path) -> None:
    if triton_device() != "cpu":
        pytest.skip("interprets its kernels")
    ranks(2).run(with_spare_capacity, str(tmp_path))
