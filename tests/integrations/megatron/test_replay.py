"""Megatron's RouterReplay under its schedules: micro-batches, stages and recomputations get their own ids."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep import RoundingConfig
from tests.helpers.errors import message_of
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
Ids = list[Tensor]  # of each layer of this rank
MICROBATCHES, K, E = 4, 2, 8
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "stored": {},
    "full": FULL,
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
GROUPS = {"EP2": {"expert": 2}, "PP2 x EP2": {"pipeline": 2, "expert": 2}}


@contextmanager
def cleared() -> Iterator[None]:
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


def recording(records: list[Ids]) -> Any:
    from tests.helpers.megatron_training import forward_step

    def step(*args: Any) -> Any:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        results = forward_step(*args)
        records.append([each.clone() for each in RouterReplay.get_recorded_data()])  # type: ignore[union-attr]
        return results

    return step


def replaying(records: list[Ids]) -> Any:
    """As a trainer does it: a forward takes the ids of its micro-batch, the backwards after it those in the queue."""
    from tests.helpers.megatron_training import forward_step

    left = iter(records)

    def step(*args: Any) -> Any:
        RouterReplay.set_replay_data(next(left))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        results = forward_step(*args)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return results

    return step


class Result(NamedTuple):
    """Of one step. parameters: after it."""

    step: Any
    parameters: Ids


def one_step(groups: dict[str, int], changes: dict[str, Any], forward: Any, ours: bool = True) -> Result:
    """ours: our layer, else stock's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    with parallel_state(**groups), cleared():
        config = gpt_config(num_layers=4, moe_enable_routing_replay=True, **changes)
        spec: Any = get_gpt_layer_local_spec(num_experts=E, normalization="RMSNorm")
        if ours:
            spec = use_sonic_ep(spec)
        run = Run(config, spec, batch=MICROBATCHES * groups["expert"])
        assert run.microbatches == MICROBATCHES
        run.forward_step = forward
        step = run.step()
        return Result(step, [each.detach().clone() for each in run.models[0].parameters()])


def drifted(records: list[Ids], rank: int) -> list[Ids]:
    """Other ids for every micro-batch and layer."""
    generator = torch.Generator().manual_seed(rank)
    return [
        [torch.rand(len(ids_TK), E, generator=generator).topk(K).indices for ids_TK in of_layers]
        for of_layers in records
    ]


def is_same(one: Result, other: Result) -> bool:
    return one.step == other.step and all(map(torch.equal, one.parameters, other.parameters))


def replayed(rank: int, groups: dict[str, int]) -> dict[str, Any]:
    """By recomputation: whether recorded ids repeat the step; steps with drifted ids, ours and stock's."""
    records: list[Ids] = []
    recorded = one_step(groups, {}, recording(records))
    assert [len(each) for each in records] == [4 // groups.get("pipeline", 1)] * MICROBATCHES
    others, found = drifted(records, rank), {}
    stored = one_step(groups, {}, replaying(others))
    assert stored.step != recorded.step
    for name, changes in RECOMPUTED.items():
        repeated = one_step(groups, changes, replaying(records))
        ours, stock = (one_step(groups, changes, replaying(others), each) for each in (True, False))
        found[name] = is_same(repeated, recorded), is_same(ours, stored), ours.step, stock.step
    return found


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_recorded_ids_repeat_a_step_and_drifted_ones_train_as_megatrons(ranks: Ranks, groups: dict[str, int]) -> None:
    """Recorded ids: bit for bit. Drifted ids: recomputations change no bit, and Megatron's layer has the same step."""
    for found in ranks(math.prod(groups.values())).run(replayed, groups, timeout=900):
        assert list(found) == list(RECOMPUTED)
        for repeats, recomputes, ours, stock in found.values():
            assert repeats
            assert recomputes
            assert ours[:2] == pytest.approx(stock[:2], rel=1e-5)
            assert ours.aux == pytest.approx(stock.aux, rel=1e-5)


SCORES: dict[str, dict[str, Any]] = {
    "softmax": {"moe_router_topk_scaling_factor": 2.5},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


def a_layer(config: Any, rounding: Any = None, scale: float = 20) -> Any:
    """scale: of the router's weights."""
    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec

    torch.manual_seed(3)
    layer: Any = get_sonic_ep_moe_spec(E, options=SonicEPOptions(rounding=rounding))(config=config)
    layer.set_layer_number(1)
    layer.router.weight.data *= scale
    return layer


def replay(layer: Any, ids_TK: Tensor | None) -> None:
    layer.router.router_replay.target_topk_idx = ids_TK
    layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def some_ids(tokens: int, seed: int = 0) -> Tensor:
    return torch.rand(tokens, E, generator=torch.Generator().manual_seed(seed)).topk(K).indices


def dense(name: str, x_TH: Tensor, ids_TK: Tensor, router_EH: Tensor, w1_eJH: Tensor, w2_eHI: Tensor) -> Tensor:
    """The layer in float64. Gate and up rows alternate."""
    logits_TE = x_TH @ router_EH.T
    chosen_TK = logits_TE.gather(1, ids_TK)
    if name == "softmax":
        weights_TK = 2.5 * chosen_TK.softmax(1)
    elif name == "pre-softmax":
        weights_TK = logits_TE.softmax(1).gather(1, ids_TK)
    else:
        weights_TK = chosen_TK.sigmoid() / chosen_TK.sigmoid().sum(1, keepdim=True)
    h_TEJ = torch.einsum("nh,ejh->nej", x_TH, w1_eJH)
    a_TEI = F.silu(h_TEJ[..., ::2]) * h_TEJ[..., 1::2]
    y_TEH = torch.einsum("nei,ehi->neh", a_TEI, w2_eHI)
    y_TKH = y_TEH.gather(1, ids_TK[:, :, None].expand(-1, -1, x_TH.shape[1]))
    return (weights_TK[:, :, None] * y_TKH).sum(1)


def with_the_oracle(rank: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Output and gradients of x, router and experts, and those of the oracle."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    found = {}
    for name, changes in SCORES.items():
        with parallel_state(), cleared():
            changes = {"moe_router_load_balancing_type": "none", "init_method_std": 0.2, **changes}
            config = gpt_config(moe_enable_routing_replay=True, **changes)
            layer, generator = a_layer(config, scale=2), torch.Generator().manual_seed(1)
            x = torch.randn(12, 2, config.hidden_size, generator=generator)
            direction = torch.randn(24, config.hidden_size, generator=generator)
            ids_TK = some_ids(24)
            replay(layer, ids_TK)
            given = [x, layer.router.weight, layer.experts.weight1, layer.experts.weight2]
            doubles = [each.detach().double().requires_grad_() for each in given]
            y, _ = layer(x.requires_grad_())
            (y.flatten(0, 1) * direction).sum().backward()
            wanted = dense(name, doubles[0].flatten(0, 1), ids_TK, *doubles[1:])
            (wanted * direction).sum().backward()
            found[name] = [(y.detach().flatten(0, 1), wanted.detach())]
            found[name] += [(each.grad, double.grad) for each, double in zip(given, doubles, strict=True)]
    return found


def test_drifted_ids_against_a_dense_oracle(ranks: Ranks) -> None:
    for pairs in ranks(1).run(with_the_oracle)[0].values():
        for got, wanted in pairs:
            assert_near(got.double(), wanted, share=1e-5)


def with_padding(rank: int) -> list[list[Tensor]]:
    """Output, gradient of x, and rows of the exchange: ids of -1, and a mask beside ids that are not read."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    found = []
    is_padding = torch.rand(3, 6, generator=torch.Generator().manual_seed(rank)) < (0.4, 1.0)[rank]
    for marked_by in ("ids", "mask"):
        with parallel_state(expert=2), cleared():
            config = gpt_config(moe_enable_routing_replay=True, moe_router_load_balancing_type="none")
            layer, ids_TK = a_layer(config), some_ids(18, rank)
            rows_T = is_padding.T.flatten().nonzero().flatten()
            replay(layer, ids_TK.index_fill(0, rows_T, -1 if marked_by == "ids" else 0))
            x = torch.randn(6, 3, config.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            y, _ = layer(x, padding_mask=is_padding if marked_by == "mask" else None)
            y.square().sum().backward()
            assert not y[is_padding.T].any()
            assert bool(y[~is_padding.T].any()) == (rank == 0)
            found.append([y.detach(), x.grad, layer.router.weight.grad])
    return found


def test_ids_of_padding(ranks: Ranks) -> None:
    for by_ids, by_mask in ranks(2).run(with_padding):
        for one, other in zip(by_ids, by_mask, strict=True):
            assert torch.equal(one, other)


def rounded(rank: int) -> list[bool]:
    """Whether a layer with rounding computes without it, and whether its own top-K is rounded."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    outputs = []
    for rounding in (None, RoundingConfig(mode="up", t=8, G=16)):
        with parallel_state(expert=2), cleared():
            config = gpt_config(moe_enable_routing_replay=True)
            layer, ids_TK = a_layer(config, rounding), some_ids(18, rank)
            x = torch.randn(6, 3, config.hidden_size, generator=torch.Generator().manual_seed(rank))
            own = layer(x)[0].detach()
            replay(layer, ids_TK)
            outputs.append((layer(x)[0].detach(), own))
    return [torch.equal(one, other) for one, other in zip(*outputs, strict=True)]


def test_rounding_is_off_in_a_replay(ranks: Ranks) -> None:
    for replay_is_same, own_is_same in ranks(2).run(rounded):
        assert replay_is_same
        assert not own_is_same


NO_IDS = "there are no ids for RouterReplayAction.REPLAY_FORWARD; call set_replay_data"
BAD_MASK = "padding_mask has shape (3, 7), wanted (b=3, s=6) of this rank's hidden states"


def misuses(rank: int, rounding: Any) -> dict[str, str]:
    from tests.helpers.megatron_training import gpt_config, parallel_state

    ids_TK = some_ids(18)
    wrong: dict[str, Tensor | None] = {
        "out of range": ids_TK + E,
        "an expert twice": ids_TK[:, :1].repeat(1, K),
        "shape (17, 2), wanted (18, 2)": ids_TK[1:],
        NO_IDS: None,
    }
    with parallel_state(expert=2), cleared():
        layer = a_layer(gpt_config(moe_enable_routing_replay=True), rounding)
        x = torch.randn(6, 3, layer.config.hidden_size)

        def said_of(ids_TK: Tensor | None, padding_mask: Tensor | None = None) -> str:
            replay(layer, ids_TK)
            return message_of(lambda: layer(x, padding_mask=padding_mask))

        said = {name: said_of(ids_TK if rank == 0 else ids) for name, ids in wrong.items()}
        said[BAD_MASK] = said_of(ids_TK, torch.zeros(3, 6 + rank, dtype=torch.bool))
        assert said_of(ids_TK) == "no error"
        if rounding is not None:
            replay(layer, ids_TK)
            if rank == 1:
                layer.router.router_replay.set_router_replay_action(None)
            said["training with routed_experts"] = message_of(lambda: layer(x))
    return said


@pytest.mark.parametrize("rounding", [None, RoundingConfig(t=8, G=16)], ids=["top-k", "rounded"])
def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Ranks, rounding: Any) -> None:
    for said in ranks(2).run(misuses, rounding):
        assert len(said) == (5 if rounding is None else 6)
        for name, message in said.items():
            assert name in message
            assert "rank 1" in message


def ignored(rank: int) -> str:
    from tests.helpers.megatron_training import gpt_config, parallel_state

    with parallel_state(), cleared():
        changes = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
        layer = a_layer(gpt_config(moe_enable_routing_replay=True, **changes))
        replay(layer, some_ids(18))
        return message_of(lambda: layer(torch.randn(6, 3, layer.config.hidden_size)))


def test_a_replay_that_the_router_ignores_is_an_error(ranks: Ranks) -> None:
    assert "RouterReplay has no effect on this router; set moe_router_fusion=False" in ranks(1).run(ignored)[0]
