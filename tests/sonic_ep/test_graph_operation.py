"""Operations of compiled graphs: what they pass on, what they hold, and torch's rules for them."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch

from sonic_ep import MoE
from sonic_ep.graph import operation
from tests.sonic_ep.test_compile import LOSSES
from tests.sonic_ep.test_layer import small


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_operations_keep_torchs_rules() -> None:
    layer = MoE(small(LOSSES, bias=True, shared_n=5), seed=0)
    router, operations = layer.router, torch.ops.sonic_ep
    x = torch.randn(30, 12, requires_grad=True)
    called = [x, *layer.parameters()], [True] * (1 + len([*layer.parameters()])), layer._key, 1, 8, None, None
    # Not test_aot_dispatch_*: they compare the tickets of two calls.
    utilities = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(operations.moe_layer, called, test_utils=utilities)
    routed = [x, *router.parameters()], [True] * (1 + len([*router.parameters()])), router._key, 1, 8, 2, True
    torch.library.opcheck(operations.route, (*routed, "", 30, None, ""), test_utils=utilities)
    (weights_N, _), (_, _, token_ids_N, _, _, *counts, _, _), _ = operations.route(*routed, "", 30, None, "")
    own = layer.experts
    w1, w2, b1, b2 = own.w1, own.w2, own.b1, own.b2
    tensors = [x, weights_N.detach().requires_grad_(), w1, w2, b1, b2]
    settings = token_ids_N, counts, [True] * 4 + [False] * 5, 30, None, None, "", "", "swiglu", "interleaved", False
    torch.library.opcheck(operations.moe, (tensors, [True] * 6, *settings), test_utils=utilities)
    (y,), _, ticket = operations.moe(tensors, [True] * 6, *settings)
    backward = [torch.randn_like(y)], [0], ticket, tensors
    torch.library.opcheck(operations.backward, backward, test_utils=utilities)


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
