"""Graphed layers against eager twins: on the CPU with replays computed eagerly, on GPUs with CUDA graphs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sonic_ep import (
    EPGroup,
    MoE,
    MoEConfig,
    MoEOutput,
    RoundingConfig,
    RouterConfig,
    cuda_graphs,
    graph_layers,
)
from sonic_ep.routers.replay import replay_contexts
from tests.helpers.changing_routing import BOUNDED, LOSSES, STATIC, leaning_tokens
from tests.helpers.launch import RankPool
from tests.helpers.replays import make_replayed_callables

SMALL = MoEConfig(d=12, n=6, E=8, K=2, shared_n=5, router=LOSSES, rounding=RoundingConfig(t=4, G=16))
LARGE = MoEConfig(d=256, n=128, E=16, K=4, shared_n=64, router=LOSSES, rounding=RoundingConfig(t=64))
TOKENS = 40
BIAS = replace(LOSSES, expert_bias=True)


def on_gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Where torch says once that gradients are accumulated on the stream of the capture, and that the first launch of a
    backward is a GEMM."""
    for text in ("The AccumulateGrad node's stream", "Attempting to run cuBLAS, but there was no current CUDA context"):
        test = pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")(test)
    return pytest.mark.gpu(test)


@contextmanager
def replays_on_cpu() -> Iterator[None]:
    on_cpu_too = patch.object(cuda_graphs, "_DEVICES", {"cuda", "cpu"})
    with on_cpu_too, patch.object(torch.cuda, "make_graphed_callables", make_replayed_callables):
        yield


@pytest.fixture
def replays() -> Iterator[None]:
    with replays_on_cpu():
        yield


def inputs(config: MoEConfig, step: int, tokens: int, device: str, dtype: torch.dtype) -> Tensor:
    return leaning_tokens(step, tokens, config.d, device, dtype)


class Residual(nn.Module):
    """Two layers, as a model holds them; the loss takes a gradient from every output that has one."""

    def __init__(self, config: MoEConfig, group: EPGroup, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = [MoE(config, group, seed=seed, device=device, dtype=dtype) for seed in range(2)]
        self.registered = nn.ModuleList(self.layers)

    def forward(self, x: Tensor) -> tuple[Tensor, list[MoEOutput]]:
        outputs = []
        for layer in self.layers:
            outputs.append(layer(x))
            x = x + outputs[-1].y
        return x.float().square().mean() + torch.stack([output.aux_loss for output in outputs]).sum(), outputs


def trained(model: Residual, batches: list[Tensor], *, to_none: bool) -> tuple[dict[str, Any], str]:
    """Everything that steps of several microbatches leave behind; and the last routing."""
    figures: list[Tensor] = []
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=1e-4), ""
    for number, x in enumerate(batches):
        leaf = x.clone().requires_grad_()
        loss, outputs = model(leaf)
        loss.backward()
        assert leaf.grad is not None
        figures += [value.clone() for value in (loss.detach(), leaf.grad, *tree_leaves([o.stats for o in outputs]))]
        rows = str(outputs[1].stats.counts.rows_SE.tolist())
        if number % 3 == 1:
            figures += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            if model.layers[0].config.router.expert_bias:
                for layer in model.layers:
                    layer.update_expert_bias()
            optimizer.zero_grad(set_to_none=to_none)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    counts = [layer.router._counts_since_update_E.clone() for layer in model.layers]
    return {"figures": figures, "counts": counts, **state}, rows


def differences(rank: int, config: MoEConfig, tokens: int, device: str, dtype: torch.dtype) -> tuple[list[str], int]:
    """Names of what differs between graphed layers and eager twins after some steps; how many routings there were."""
    group, found, routings = EPGroup() if config.transport.buffers == "static" else EPGroup.alone(), [], set()
    for to_none in (True, False):
        eager, graphed = (Residual(config, group, device, dtype) for _ in range(2))
        graph_layers(graphed.layers, inputs(config, 1, tokens, device, dtype))
        for start in (0, 6, 12):
            batches = [inputs(config, start + n + 20 * rank, tokens, device, dtype) for n in range(5)]
            (wanted, _), (got, rows) = (trained(model, batches, to_none=to_none) for model in (eager, graphed))
            found += [f"steps from {start}, {to_none}: {name}" for name in wanted if not same(wanted[name], got[name])]
            routings.add(rows)
        x = inputs(config, 3, tokens - 1, device, dtype)
        if not same(*(model.eval()(x)[0] for model in (eager, graphed))):
            found.append("evaluation")
    return found, len(routings)


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else torch.equal(a, b)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("mode", ["apportion", "nearest", "off"])
@pytest.mark.parametrize("router", [LOSSES, BIAS], ids=["losses", "bias"])
def test_replayed_layers_train_as_eager_ones(mode: Any, router: RouterConfig) -> None:
    config = SMALL.replace(rounding=replace(SMALL.rounding, mode=mode), router=router)
    found, routings = differences(0, config, TOKENS, "cpu", torch.float32)
    assert found == []
    assert routings > 2


@on_gpus
@pytest.mark.parametrize("name", ["alone", "bias", *BOUNDED])
def test_cuda_graphs_train_as_eager_ones(gpus: Callable[[int], RankPool], name: str) -> None:
    config = LARGE
    if name != "alone":
        rounding = BOUNDED.get(name, BOUNDED["apportion"])
        config = config.replace(rounding=rounding, transport=STATIC, router=BIAS if name == "bias" else LOSSES)
    for found, routings in gpus(1 if name == "alone" else 2).run(differences, config, 700, "cuda", torch.bfloat16):
        assert found == []
        assert routings > 2


def under_ddp(rank: int, as_view: bool) -> list[str]:
    """Names of gradients that differ between eager layers and replayed ones, two microbatches of each rank a step."""
    found: list[dict[str, Tensor]] = []
    for replayed in (False, True):
        model = Residual(SMALL, EPGroup.alone(), "cpu", torch.float32)
        if replayed:
            with replays_on_cpu():
                graph_layers(model.layers, sample())
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.1), {}
        for number in range(6):
            synchronizes = number % 2 == 1
            with nullcontext() if synchronizes else wrapped.no_sync():
                wrapped(inputs(SMALL, number + 10 * rank, TOKENS, "cpu", torch.float32))[0].backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradients[f"{number}: {name}"] = parameter.grad.clone()
            if synchronizes:
                optimizer.step()
                optimizer.zero_grad()
        found.append(gradients)
    return [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_around_replayed_layers(ranks: Callable[[int], RankPool], as_view: bool) -> None:
    assert ranks(2).run(under_ddp, as_view) == [[], []]


@pytest.mark.usefixtures("replays")
def test_two_backwards_of_one_forward_are_an_error() -> None:
    """The first backward of a graph overwrites what it has read."""
    layer = graphed_layer()
    out = layer(sample())
    out.y.sum().backward(retain_graph=True)
    for loss in (out.y.square().sum(), out.aux_loss):
        with pytest.raises(RuntimeError, match=r"a second backward of one output.*run one backward, of the sum"):
            loss.backward(retain_graph=True)
    layer(sample()).y.sum().backward()


def small_layer(**changes: Any) -> MoE:
    return MoE(SMALL.replace(**changes), seed=0)


def sample(tokens: int = TOKENS) -> Tensor:
    return inputs(SMALL, 1, tokens, "cpu", torch.float32).requires_grad_()


def graphed_layer() -> MoE:
    layer = small_layer()
    graph_layers([layer], sample())
    return layer


@pytest.mark.usefixtures("replays")
def test_another_forward_before_backward_is_an_error() -> None:
    layer = graphed_layer()
    first, _ = layer(sample()), layer(sample())
    with pytest.raises(RuntimeError, match="was run again before the backward of its earlier output"):
        first.y.sum().backward()
    with pytest.raises(RuntimeError, match="was run again before the backward of its earlier output"):
        first.aux_loss.backward()
    layer(sample()).y.sum().backward()


@pytest.mark.usefixtures("replays")
def test_an_evaluation_between_forward_and_backward_is_none() -> None:
    layer = graphed_layer()
    y = layer(sample()).y
    layer.eval()(sample(3))
    layer.train()
    y.sum().backward()


@pytest.mark.usefixtures("replays")
def test_other_inputs_are_refused() -> None:
    layer = graphed_layer()
    with pytest.raises(ValueError, match=r"x is \(\(39, 12\), .* graphed for \(\(40, 12\)"):
        layer(sample(39))
    with pytest.raises(ValueError, match=r"x is \(\(40, 12\), torch.float64"):
        layer(sample().double())
    with pytest.raises(ValueError, match=r"autocast: torch.bfloat16.* graphed for .*autocast: None"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(sample())


@pytest.mark.usefixtures("replays")
def test_given_experts_and_padding_are_refused() -> None:
    layer, mask_T = graphed_layer(), torch.zeros(TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match="takes x alone, and got padding_mask; leave this layer eager"):
        layer(sample(), padding_mask=mask_T)
    layer.eval()
    layer(sample(), padding_mask=mask_T)


@pytest.mark.usefixtures("replays")
def test_moved_parameters_are_refused() -> None:
    layer = graphed_layer()
    layer.load_state_dict(small_layer().state_dict())
    layer(sample())
    layer.load_state_dict(small_layer().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="replaced or moved since the layer was graphed"):
        layer(sample())


@pytest.mark.usefixtures("replays")
def test_a_copy_is_refused() -> None:
    """It would evaluate by the original's forward as well."""
    layer = graphed_layer()
    for clone in (copy.deepcopy(layer), copy.deepcopy(layer).eval()):
        with pytest.raises(RuntimeError, match="a copy of a graphed layer"):
            clone(sample())
    layer(sample())


@pytest.mark.usefixtures("replays")
def test_stats_have_no_gradient() -> None:
    stats = graphed_layer()(sample()).stats
    assert not any(value.requires_grad for value in tree_leaves(stats))
    stats.entropy_T.numpy()


@pytest.mark.usefixtures("replays")
def test_recomputation_is_refused() -> None:
    layer = graphed_layer()
    with pytest.raises(RuntimeError, match="keep it out of activation checkpointing"):
        checkpoint(layer, sample(), use_reentrant=False, context_fn=replay_contexts)


PROBLEMS: dict[str, tuple[Callable[[], MoE], Tensor, str]] = {
    "eval": (lambda: small_layer().eval(), sample(), "the layer is in eval mode"),
    "logits": (lambda: small_layer(router=RouterConfig(check_logits=True)), sample(), "router.check_logits=True reads"),
    "width": (small_layer, torch.zeros(4, 5), "5"),
    "dtype": (small_layer, torch.zeros(4, 12, dtype=torch.float64), "torch.float64"),
}


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("name", PROBLEMS)
def test_layers_that_cannot_be_graphed_are_refused(name: str) -> None:
    make, x, message = PROBLEMS[name]
    with pytest.raises(ValueError, match=message):
        graph_layers([make()], x)


@pytest.mark.usefixtures("replays")
def test_a_graph_is_made_once_and_of_something() -> None:
    with pytest.raises(ValueError, match="has been graphed before"):
        graph_layers([graphed_layer()], sample())
    with pytest.raises(ValueError, match="layers is empty"):
        graph_layers([], sample())


def test_a_layer_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="the layer is on cpu, which has no CUDA graphs"):
        graphed_layer()


def exact_buffers(rank: int) -> str:
    with pytest.raises(ValueError, match="transport.buffers='exact' reads row counts on the host") as raised:
        graph_layers([MoE(SMALL, EPGroup(), seed=0)], sample())
    return str(raised.value)


@patch.object(cuda_graphs, "_DEVICES", {"cpu"})
def other_shapes(rank: int) -> str:
    config = SMALL.replace(rounding=replace(SMALL.rounding, capacity_factor=1.25), transport=STATIC)
    with pytest.raises(ValueError, match="disagree about shape") as raised:
        graph_layers([MoE(config, EPGroup(), seed=0)], sample(TOKENS + rank))
    return str(raised.value)


def test_what_ranks_cannot_graph_is_refused_on_all(ranks: Callable[[int], RankPool]) -> None:
    assert all("rank 0: transport.buffers='exact'" in message for message in ranks(2).run(exact_buffers))
    assert all("(40, 12) on rank 0, (41, 12) on rank 1" in message for message in ranks(2).run(other_shapes))


def orders_of_backwards(
    rank: int, config: MoEConfig, tokens: int, device: str, dtype: torch.dtype
) -> dict[str, list[str]]:
    """For each case: which layers' backwards on one x are refused, then what differs from eager twins; a step that
    differs from theirs after all cases."""
    group = EPGroup() if config.transport.buffers == "static" else EPGroup.alone()
    eager, together, singly = (
        [MoE(config, group, seed=seed, device=device, dtype=dtype) for seed in range(4)] for _ in range(3)
    )
    x = inputs(config, 1 + 20 * rank, tokens, device, dtype)
    graph_layers(together, x)
    for layer in singly:
        graph_layers([layer], x)

    def step(layers: list[MoE], backwards: str, forwards: str) -> tuple[list[str], dict[str, Tensor]]:
        leaf, refused = x.clone().requires_grad_(), []
        outs = {int(name): layers[int(name)](leaf) for name in forwards}
        for number in map(int, backwards):
            loss = outs[number].y.float().square().sum() + outs[number].aux_loss
            try:
                loss.backward()
            except RuntimeError as error:
                refused.append(f"{number} {str(error).partition(' of graph_layers')[0]}")
        grads = {
            f"{number} {name}": p.grad for number, layer in enumerate(layers) for name, p in layer.named_parameters()
        }
        found = {name: grad.clone() for name, grad in (grads | {"x": leaf.grad}).items() if grad is not None}
        for layer in layers:
            layer.zero_grad()
        return refused, found

    found = {}
    for layers, name in ((together, "together"), (singly, "singly")):
        for backwards, forwards in CASES_OF_ORDERS:
            refused, grads = step(layers, backwards, forwards)
            ran = "".join(number for number in backwards if f"{number} layer {number}" not in refused)
            _, wanted = step(eager, ran, forwards)
            differ = [name for name in wanted if not torch.equal(wanted[name], grads[name])]
            found[f"{name}: {forwards}, {backwards}"] = refused + differ
    return found


# Backwards, and the forwards before them, by the layers' positions.
CASES_OF_ORDERS = [
    ("3210", "0123"),
    ("0321", "0123"),
    ("3120", "0123"),
    ("0123", "0123"),
    ("20", "0123"),
    ("3", "0123"),
    ("0123", "3210"),
    ("3210", "3210"),
    ("3210", "0123"),
]


def check_orders(found: dict[str, list[str]]) -> None:
    assert found["together: 0123, 3210"] == []
    assert found["together: 0123, 0321"] == ["3 layer 3", "2 layer 2", "1 layer 1"]
    assert found["together: 0123, 3120"] == ["2 layer 2"]
    assert found["together: 0123, 0123"] == ["1 layer 1", "2 layer 2", "3 layer 3"]
    assert found["together: 0123, 20"] == []
    assert found["together: 0123, 3"] == []
    assert found["together: 3210, 0123"] == ["1 layer 1", "2 layer 2", "3 layer 3"]
    assert found["together: 3210, 3210"] == ["3 layer 3", "2 layer 2", "1 layer 1"]
    assert [name for name, what in found.items() if name.startswith("singly") and what] == []


@pytest.mark.usefixtures("replays")
def test_orders_of_backwards() -> None:
    check_orders(orders_of_backwards(0, SMALL, TOKENS, "cpu", torch.float32))


@on_gpus
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_orders_of_backwards_on_gpus(gpus: Callable[[int], RankPool], num_ranks: int) -> None:
    """An order that is not refused computes what eager layers do, bit for bit."""
    config = LARGE if num_ranks == 1 else LARGE.replace(rounding=BOUNDED["apportion"], transport=STATIC)
    for found in gpus(num_ranks).run(orders_of_backwards, config, 700, "cuda", torch.bfloat16):
        check_orders(found)


def replay_alone(rank: int) -> str:
    """The last rank never comes to the second step, and no host of the others looks before it has been launched."""
    group, config = EPGroup(), LARGE.replace(rounding=BOUNDED["apportion"], transport=replace(STATIC, timeout=2))
    layer = MoE(config, group, seed=1, device="cuda", dtype=torch.bfloat16)
    x = inputs(LARGE, 1, 700, "cuda", torch.bfloat16)
    graph_layers([layer], x)
    layer(x.requires_grad_()).y.sum().backward()
    torch.cuda.synchronize()
    group.all_gather_object(None)
    if rank == group.size - 1:
        return ""
    y = layer(x).y
    torch.cuda.synchronize()
    assert y.isnan().all()
    with pytest.raises(RuntimeError) as raised:
        layer(x)
    return str(raised.value)


@on_gpus
def test_a_rank_that_does_not_replay_is_named(gpus: Callable[[int], RankPool]) -> None:
    message, _ = gpus(2).run(replay_alone)
    assert message.startswith("rank 1 of the EP group did not come to counts within 2 s")
