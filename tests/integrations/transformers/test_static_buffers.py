"""Static buffers behind a router of transformers: the results of exact buffers, and no size is read on the host."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import EPGroup, RoundingConfig, TransportConfig
from sonic_ep.transports import transport_for
from tests.helpers.host_reads import as_if_captured, noted_step
from tests.helpers.hugging_face import TOP_K, model_of
from tests.helpers.launch import RankPool

pytest.importorskip("transformers")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

Ranks = Callable[[int], RankPool]
T = 16
STATIC = TransportConfig(kind="symmetric", buffers="static")
EVERY_PAIR = RoundingConfig(mode="off", capacity_factor=2)
LIMITS = {
    "every pair": (EVERY_PAIR, None),
    "some pairs": (RoundingConfig(mode="off", capacity_factor=1), None),
    "apportion": (None, RoundingConfig(t=4, G=8, capacity_factor=1.25)),
    "nearest": (None, RoundingConfig(mode="nearest", G=4, capacity_factor=1)),
}


def block_of(
    rank: int, transport: TransportConfig, capacity: RoundingConfig | None, rounding: RoundingConfig | None
) -> Any:
    """A block of Qwen3-MoE with this rank's experts, as `SonicEP` computes them."""
    from sonic_ep.integrations.transformers import SonicEPOptions, round_tokens
    from sonic_ep.integrations.transformers.experts import compute_experts

    group = EPGroup()
    block: Any = model_of("qwen3_moe").get_submodule("model.layers.0.mlp")
    experts = block.experts
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(experts, name).detach().chunk(group.size)[rank].clone()
        setattr(experts, name, nn.Parameter(own))
    block.transport = transport_for(group, transport)
    # Recording launches is for GPUs; whether to do it the ranks agree now and then, on the host.
    options = SonicEPOptions(rounding=capacity, record_launches=False)
    experts.forward = partial(compute_experts, experts, group=group, transport=block.transport, options=options)
    if rounding is not None:
        round_tokens(block, rounding)
    return block.train()


def tokens(rank: int, step: int, length: int = T) -> Tensor:
    """More and more of them go to few experts, other ones for each rank."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    lean = torch.randn(32, generator=generator) * step
    return (torch.randn(1, length, 32, generator=generator) + lean).requires_grad_()


def results_of(block: Any, x: Tensor) -> list[Tensor]:
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def static_and_exact(rank: int, folder: str, limit: str) -> dict[str, Any]:
    """Results of exact buffers, of static ones, and of static ones as if captured; with the reads and launches."""
    from tests.helpers.static_buffers import static_buffers

    unlimited = limit == "every pair"
    exact = block_of(rank, TransportConfig(), *((None, None) if unlimited else LIMITS[limit]))
    static = block_of(rank, STATIC, *LIMITS[limit])
    found: dict[str, Any] = {"exact": [], "static": [], "captured": [], "reads": [], "captured reads": [], "ops": []}
    of_gpus = patch("sonic_ep.routers.route.allows_spare_capacity", lambda _: True)  # of lists that rounding makes
    with static_buffers(static.transport, folder), of_gpus:
        for step in range(2):  # in the first steps of rounding the host reads the router's weights
            results_of(static, tokens(rank, step))
            results_of(exact, tokens(rank, step))
        places = addresses(static)
        for step in range(3):
            found["exact"].append(results_of(exact, tokens(rank, step)))
            with noted_step() as eager:
                found["static"].append(results_of(static, tokens(rank, step)))
            with as_if_captured(), noted_step() as captured:
                found["captured"].append(results_of(static, tokens(rank, step)))
            found["reads"].append(eager.reads)
            found["captured reads"] += captured.reads
            found["ops"].append(captured.launches)
        found["moved"] = addresses(static) != places
    return found


def addresses(block: Any) -> list[int]:
    buffers = block.transport.on(torch.empty(0))._buffers
    lists, rows = buffers.list_buffers, buffers.rows(32 * 4, T)
    return [each.own.data_ptr() for each in (lists.rows, lists.weights, lists.values, *rows.buffers)]


@pytest.mark.parametrize("limit", LIMITS)
def test_static_buffers(limit: str, ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(static_and_exact, str(tmp_path), limit, timeout=600):
        for exact, static, captured in zip(found["exact"], found["static"], found["captured"], strict=True):
            torch.testing.assert_close(static, exact)
            torch.testing.assert_close(captured, static, rtol=0, atol=0)
        assert found["captured reads"] == []
        # The statuses of the ranks, when all of the forward has been launched.
        for reads in found["reads"]:
            assert len(reads) == 1, reads
            assert "sonic_ep/routing.py" in reads[0]
        assert found["ops"][0] == found["ops"][1] == found["ops"][2]
        assert not found["moved"]


def capped(rank: int, factor: float) -> dict[str, Any]:
    """A routing with a capacity, and what the router gave, which leans to experts of rank 0."""
    from sonic_ep.integrations.topk_routing import capped_routing
    from sonic_ep.routers.topk_pairs import RouterCall

    group, E = EPGroup(), 8
    generator = torch.Generator().manual_seed(rank)
    scores_TE = torch.rand(T, E, generator=generator) + torch.tensor([1.0, 0.5, 0.5, 0.3, 0, 0, 0, 0])
    weights_TK, ids_TK = scores_TE.topk(TOP_K)
    weights_TK = (weights_TK.round(decimals=1) / 4).requires_grad_()  # with ties
    capacity = RoundingConfig(mode="off", capacity_factor=factor)
    call = RouterCall(group=group, exchange=transport_for(group), dtype=torch.float32, training=True)
    routing = capped_routing(None, ids_TK, weights_TK, E=E, call=call, capacity=capacity)
    own = routing.counts.rows_SE[rank]
    expert_ids = torch.repeat_interleave(torch.arange(E), own).tolist()
    pairs = list(zip(expert_ids, routing.token_ids_N.tolist(), routing.weights_N.tolist(), strict=True))
    (grad,) = torch.autograd.grad(routing.weights_N.sum(), weights_TK)
    given = [
        (expert, token, weight, received)
        for token, row in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), grad.tolist(), strict=True))
        for expert, weight, received in zip(*row, strict=True)
    ]
    return {"pairs": pairs, "given": given, "rows_SE": routing.counts.rows_SE, "most": routing.max_received}


@pytest.mark.parametrize("factor", [1, 1.25, 1.9])
def test_a_capacity_removes_pairs_of_least_weight(factor: float, ranks: Ranks) -> None:
    found = ranks(2).run(capped, factor)
    capacity = int(T * TOP_K * factor)
    rows_SE = found[0]["rows_SE"]
    assert torch.equal(rows_SE, found[1]["rows_SE"])
    rows_Q = rows_SE.view(2, 2, 4).sum((0, 2)).tolist()
    wanted_Q = [sum(expert // 4 == rank for each in found for expert, *_ in each["given"]) for rank in range(2)]
    assert rows_Q == [min(wanted, capacity) for wanted in wanted_Q]
    assert (wanted_Q[0] > capacity) == (factor < 1.9)
    for rank, each in enumerate(found):
        assert capacity <= each["most"]
        best_pairs = []
        for expert in range(8):
            wanting = sorted((-weight, token) for e, token, weight, _ in each["given"] if e == expert)
            best = wanting[: rows_SE[rank, expert]]
            best_pairs += sorted((expert, token, -weight) for weight, token in best)
        assert [(expert, token) for expert, token, _ in best_pairs] == [
            (expert, token) for expert, token, _ in each["pairs"]
        ]
        assert [weight for *_, weight in each["pairs"]] == pytest.approx([weight for *_, weight in best_pairs])
        remaining = {(expert, token) for expert, token, _ in best_pairs}
        for expert, token, _, gradient in each["given"]:
            assert gradient == ((expert, token) in remaining)


def refused(rank: int, folder: str) -> tuple[list[str], list[Tensor]]:
    """Messages, and the outputs of evaluation and of one more step after them: of static buffers, of exact ones."""
    from sonic_ep.integrations.transformers import round_tokens
    from tests.helpers.static_buffers import static_buffers

    static, exact = (block_of(rank, transport, EVERY_PAIR, None) for transport in (STATIC, TransportConfig()))
    messages = []

    def message_of(x: Tensor) -> None:
        with pytest.raises(ValueError, match="static") as caught:
            static(x)
        messages.append(str(caught.value))

    with static_buffers(static.transport, folder):
        message_of(tokens(rank, 0, T + rank))
        results_of(static, tokens(rank, 0))
        message_of(tokens(rank, 0, T + rank))
        round_tokens(static, RoundingConfig(t=4, G=8))
        message_of(tokens(rank, 0))
        round_tokens(static, RoundingConfig(mode="off"))
        outputs = [results_of(block, tokens(rank, 1))[0].detach() for block in (static, exact)]
        static.eval()
        exact.eval()
        outputs += [results_of(block, tokens(rank, 0, T + rank))[0].detach() for block in (static, exact)]
    return messages, outputs


def test_errors_name_value_limit_and_fix(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2).run(refused, str(tmp_path), timeout=600)
    for (unequal, other, unbounded), (static, exact, static_eval, exact_eval) in found:
        assert f"wants as many tokens on every rank, not [{T}, {T + 1}]; use 'exact'" in unequal
        assert f"rank 1: T={T + 1} tokens, but transport.buffers='static' keeps to the first step's {T}" in other
        assert "transport.buffers='static' needs a bound: set rounding.capacity_factor" in unbounded
        torch.testing.assert_close(static, exact)
        torch.testing.assert_close(static_eval, exact_eval)


def test_where_a_capacity_is_set() -> None:
    from sonic_ep.integrations.transformers import SonicEPOptions, register, round_tokens

    with pytest.raises(ValueError, match=r"mode='apportion'.*RoundingConfig\(mode='off', capacity_factor=...\)"):
        register(SonicEPOptions(rounding=RoundingConfig(capacity_factor=2)))
    with pytest.raises(ValueError, match=r"capacity_factor=1.25, but mode='off' ends rounding; .* to register"):
        round_tokens(nn.Module(), RoundingConfig(mode="off", capacity_factor=1.25))
    register(SonicEPOptions(rounding=EVERY_PAIR, transport=STATIC))
    block: Any = model_of("qwen3_moe").get_submodule("model.layers.0.mlp")
    x, results = tokens(0, 0), []
    for implementation in ("sonic_ep", "eager"):
        block.experts.config._experts_implementation = implementation
        with noted_step() as step:
            results.append(results_of(block, x))
        assert (implementation == "sonic_ep") == (step.reads == [])
    register()
    torch.testing.assert_close(*results)
