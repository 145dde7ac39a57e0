"""Operations of compiled graphs: what they pass on, what they hold, and torch's rules for them."""

import copy
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend

from sonic_ep import EPGroup, MoE
from sonic_ep.functional import moe
from sonic_ep.graph import operation
from sonic_ep.routers.router import Router
from tests.sonic_ep.test_compile import LOSSES, STOCHASTIC
from tests.sonic_ep.test_layer import TINY, small


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_operations_keep_torchs_rules() -> None:
    layer = MoE(small(LOSSES, bias=True, shared_n=5), seed=0)
    router, operations = layer.router, torch.ops.sonic_ep
    x = torch.randn(30, 12, requires_grad=True)
    call = torch.empty(0)

    def arguments(module: MoE | Router) -> tuple[list[Tensor], list[bool], Tensor, Tensor, list[Tensor]]:
        tensors = [x, *module.parameters()]
        return tensors, [True] * len(tensors), call, module._key, [*module.buffers()]

    called = *arguments(layer), None, None
    # Not test_aot_dispatch_*: they compare the tickets of two calls.
    utilities = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(operations.moe_layer, called, test_utils=utilities)
    *_, ticket = operations.moe_layer(*called)
    filled_up = ticket, 1, x.detach(), torch.int32, (200,)
    torch.library.opcheck(operations.output, filled_up, test_utils=("test_schema", "test_faketensor"))
    routed = *arguments(router), 1, 8, 2, True
    torch.library.opcheck(operations.route, (*routed, "", 30, None, ""), test_utils=utilities)
    (weights_N, _), (_, _, token_ids_N, _, _, *counts, _, _), _ = operations.route(*routed, "", 30, None, "")
    own = layer.experts
    w1, w2, b1, b2 = own.w1, own.w2, own.b1, own.b2
    tensors = [x, weights_N.detach().requires_grad_(), w1, w2, b1, b2]
    settings = token_ids_N, counts, [True] * 4 + [False] * 5, 30, None, None, "", "", "swiglu", "interleaved", False
    torch.library.opcheck(operations.moe, (tensors, [True] * 6, call, *settings), test_utils=utilities)
    (y,), _, ticket = operations.moe(tensors, [True] * 6, call, *settings)
    backward = [torch.randn_like(y)], [0], ticket, tensors
    torch.library.opcheck(operations.backward, backward, test_utils=utilities)


def test_a_graph_takes_the_statistics_that_it_uses() -> None:
    layer, operations = MoE(small(LOSSES), seed=0), torch.ops.sonic_ep
    for outputs, expected in (
        (lambda out: out.y, [operations.moe_layer.default]),
        (lambda out: (out.y, out.stats.counts.rows_SE), [operations.moe_layer.default, operations.output.default]),
    ):
        backend = AotEagerAndRecordGraphs()
        run = torch.compile(lambda x, outputs=outputs: outputs(layer(x)), fullgraph=True, backend=backend)
        run(torch.randn(30, 12))
        nodes = backend.fw_graphs[0].graph.find_nodes(op="call_function", target=operations.moe_layer.default)
        nodes += backend.fw_graphs[0].graph.find_nodes(op="call_function", target=operations.output.default)
        assert [node.target for node in nodes] == expected


def test_backward_of_a_copied_ticket_names_the_cause() -> None:
    layer = MoE(small(LOSSES), seed=0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda each: each):
        y = compiled(torch.randn(30, 12)).y
    with pytest.raises(RuntimeError, match="saved-tensor hooks copied its ticket"):
        y.sum().backward()


def test_an_input_that_was_written_to_is_noticed() -> None:
    layer, x = MoE(small(LOSSES), seed=0), torch.randn(30, 12, requires_grad=True)
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y = run(x).y
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_backward_again() -> None:
    layer = MoE(small(LOSSES), seed=0)
    y, aux_loss, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(30, 12))
    (y.sum() + aux_loss).backward(retain_graph=True)
    once = [each.grad.clone() for each in layer.parameters() if each.grad is not None]
    (y.sum() + aux_loss).backward()
    twice = [each.grad for each in layer.parameters() if each.grad is not None]
    assert len(once) == 3
    torch.testing.assert_close(twice, [2 * each for each in once], rtol=1e-6, atol=0)


def test_a_call_leaves_nothing_behind() -> None:
    layer = MoE(small(LOSSES), seed=0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gc.collect()
    before = len(operation._GRAPHS)
    for _ in range(2):
        y = compiled(torch.randn(30, 12)).y
        assert len(operation._GRAPHS) == before + 1
        y.sum().backward()
        compiled(torch.randn(30, 12))  # without backward
        del y
        gc.collect()
        assert len(operation._GRAPHS) == before


def test_hooks_of_parameters_run_once() -> None:
    layer = MoE(small(LOSSES), seed=0)
    calls: list[str] = []
    layer.experts.w1.register_hook(lambda grad: calls.append("w1"))
    torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(30, 12)).y.sum().backward()
    assert calls == ["w1"]


def test_a_copy_of_a_layer_is_another() -> None:
    layer = MoE(small(LOSSES), seed=0)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.router.expert_bias.copy_(torch.randn(8))  # type: ignore[union-attr]
    x = torch.randn(30, 12)
    for each in (layer, other):
        compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x).stats.counts.chosen_SE, each(x).stats.counts.chosen_SE)
    assert not torch.equal(layer(x).stats.counts.chosen_SE, other(x).stats.counts.chosen_SE)


def test_two_calls_on_one_input_are_two() -> None:
    found = []
    for compiles in (True, False):
        layer = MoE(small(LOSSES, STOCHASTIC), seed=0)

        def run(x: Tensor, layer: MoE = layer) -> tuple[Tensor, Tensor]:
            return layer(x).y, layer(x).y

        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
        torch.manual_seed(1)
        one, other = run(torch.randn(30, 12, generator=torch.Generator().manual_seed(2)))
        assert not torch.equal(one, other)  # each call draws
        (one.square().sum() + 3 * other.square().sum()).backward()
        gradients = [each.grad for each in layer.parameters()]
        found.append((one, other, layer.router._counts_since_update_E, *gradients))
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rounding", ["apportion", "off"])
def test_a_router_and_moe_of_any_length_share_a_graph(rounding: str) -> None:
    alone, layer = EPGroup.alone(), MoE(small(LOSSES, replace(TINY, mode=rounding)), seed=0)  # type: ignore[arg-type]
    backend = CompileCounterWithBackend("aot_eager")
    weights = layer.experts.w1, layer.experts.w2

    def run(x: Tensor) -> Tensor:
        routing = layer.router(x, group=alone, sequence_length=x.shape[0]).routing
        return moe(x, routing, *weights, transport=layer.transport, group=alone)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for T in (30, 17, 41):
        x = torch.randn(T, 12)
        torch.testing.assert_close(compiled(x), run(x), rtol=1e-6, atol=0)
    assert backend.frame_count == 1


def test_one_weight_under_two_names() -> None:
    found = []
    for compiles in (True, False):
        layer = MoE(small(LOSSES, shared_n=12, activation="relu2"), seed=0)
        layer.shared.down.weight = layer.shared.up.weight  # type: ignore[union-attr]
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
        run(torch.randn(30, 12, generator=torch.Generator().manual_seed(2))).y.sum().backward()
        found.append([each.grad for each in layer.parameters()])
    assert len(found[0]) == 4
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def test_a_graph_takes_the_buffers_that_it_is_given() -> None:
    layer, x = MoE(small(LOSSES), seed=0), torch.randn(30, 12)
    states = [{**layer.state_dict(), "router.expert_bias": torch.randn(8)} for _ in range(2)]

    def run(state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, state, (x,)).stats.counts.chosen_SE

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    one, other = (run(state) for state in states)
    assert not torch.equal(one, other)
    assert [*map(torch.equal, map(compiled, states), (one, other))] == [True, True]


def test_other_threads_do_not_notice_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = MoE(small(LOSSES), seed=0), []
    layer.experts.w2.register_hook(lambda _: None)  # such a parameter is replaced
    layer.router.register_forward_hook(lambda *_: seen.append({id(each) for each in tensors()}))

    def tensors() -> list[Tensor]:
        return [layer.router.weight, layer.experts.w1, layer.router.expert_bias]  # type: ignore[list-item]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = compiled(torch.ones(30, 12)).y
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as while another thread compiles
    for run in (compiled, layer):
        assert torch.equal(run(torch.ones(30, 12)).y, wanted)
    assert seen == [{id(each) for each in tensors()}] * 3
    assert layer(torch.ones(30, 12)).y.grad_fn.name() == "UnsafeViewBackward0"  # type: ignore[union-attr]


def test_threads_may_share_a_layer() -> None:
    layer, x = MoE(small(LOSSES, shared_n=5), seed=0), torch.randn(30, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = compiled(x).y
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: compiled(x).y, range(40)))
    assert all(torch.equal(y, wanted) for y in found)
    assert {type(each) for each in layer.parameters()} == {nn.Parameter}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_has_no_graph_operation_says_so() -> None:
    layer, x = MoE(small(LOSSES), seed=0), torch.randn(30, 12)
    with pytest.raises(Exception, match=r"torch\.export cannot export an MoE layer"):
        torch.export.export(layer, (x,), strict=True)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: layer(x).y, (x,), (x,))[1]

    with pytest.raises(Exception, match="an MoE layer has no forward-mode derivatives"):
        torch.compile(tangent, fullgraph=True, backend="aot_eager")(x)
