"""Given experts in models of torchtitan: beside its own experts with the same choice, and by its Trainer on ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

# isort: off
from tests.helpers.poison import compiler_forgets
from tests.helpers.torchtitan_cpu import (  # before torchtitan
    BATCH,
    EXPERTS,
    LENGTH,
    MODELS,
    ROUNDED,
    VOCABULARY,
    config_of,
    draw_weights,
    experts_in_own_dtype,
    trainer,
)

# isort: on

from torch.distributed.tensor import DTensor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from sonic_ep import record_routing
from sonic_ep.integrations.torchtitan.replay import recorded_experts, replay_routing
from tests.helpers.launch import run_ranks
from tests.helpers.tolerances import assert_near

# Autocast of the gate; what torch and torchtitan say of each other and of CPUs, on every rank.
pytestmark = pytest.mark.filterwarnings("ignore")
E, K, LAYERS, STEPS = 8, 2, 2, 3


def build(model: str, *imports: Any, recompute: Any = None) -> Any:
    config: Any = MODELS[model]().model
    if imports:
        apply_overrides(OverrideConfig(imports=[*imports]), config)
    made = config.build().double()
    draw_weights(made)
    if recompute is not None:
        recompute.build().apply(made)
    return made.train()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and experts that no router chose."""
    torch.manual_seed(seed)
    tokens_BL = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return tokens_BL, torch.rand(BATCH, LENGTH, LAYERS, E).topk(K).indices


def moes(model: Any) -> list[Any]:
    return [block.moe for block in model.layers.values() if block.moe_enabled]


@contextmanager
def choosing(ids_BLNK: Tensor) -> Iterator[None]:
    """Within it torchtitan's routers, one after the other, find these experts to be their top-K."""
    topk, calls = torch.topk, iter([each.contiguous() for each in ids_BLNK.unbind(2)])

    def chosen(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, ids = topk(scores, *args, **kwargs)
        return values, next(calls) if scores.shape[-1] == E else ids

    with compiler_forgets(), patch.object(torch, "topk", chosen):
        yield


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", [None, FullAC.Config(), SelectiveAC.Config()], ids=["saved", "full", "selective"])
def test_steps_equal_torchtitans_with_these_experts(model: str, recompute: Any) -> None:
    theirs, ours = build(model), build(model, EXPERTS, recompute=recompute)
    replay_routing(ours)
    batches, wanted = [batch(1), batch(2)], []
    with experts_in_own_dtype():
        for tokens_BL, ids_BLNK in batches:
            with choosing(ids_BLNK):
                wanted.append(theirs(tokens_BL))
        torch.cat(wanted).square().sum().backward()
    # Both forwards come first, as in a pipeline.
    found = [ours(tokens_BL, routed_experts=ids_BLNK) for tokens_BL, ids_BLNK in batches]
    torch.cat(found).square().sum().backward()
    assert_near(torch.cat(found).detach(), torch.cat(wanted).detach(), share=1e-6)
    grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted_grad = grads[name.replace("_checkpoint_wrapped_module.", "")].grad
        assert (parameter.grad is None) == (wanted_grad is None)
        if wanted_grad is not None:
            assert_near(parameter.grad, wanted_grad, share=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    if recompute is None:  # torchtitan counts a recomputation, too
        for ours_moe, their_moe in zip(moes(ours), moes(theirs), strict=True):
            assert torch.equal(ours_moe.tokens_per_expert_E, their_moe.tokens_per_expert_E)


def test_a_token_without_experts_is_routed_as_ever() -> None:
    model = build("deepseek_v3", EXPERTS)
    assert replay_routing(model) == ["layers.1.moe", "layers.2.moe"]
    tokens_BL, ids_BLNK = batch(1)
    with record_routing() as record:
        model(tokens_BL)
    own_BLNK = recorded_experts(model, record)
    ids_BLNK[:, ::2] = -1
    with record_routing() as record:
        out = model(tokens_BL, routed_experts=ids_BLNK)
    used_BLNK = recorded_experts(model, record)
    assert torch.equal(used_BLNK[:, 1::2], ids_BLNK[:, 1::2])
    assert torch.equal(used_BLNK[:, ::2, 0], own_BLNK[:, ::2, 0])
    assert torch.equal(model(tokens_BL, routed_experts=used_BLNK), out)
    assert not torch.equal(model(tokens_BL), out)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"add sonic_ep\.integrations\.torchtitan\.moe\.routed_experts to override"):
        replay_routing(build("qwen3"))
    with pytest.raises(ValueError, match=r"replace rounded_moe by routed_experts in override\.imports"):
        replay_routing(build("qwen3", ROUNDED))
    mixed = build("qwen3", EXPERTS)
    moes(mixed)[1].routed_experts.top_k = 3
    with pytest.raises(ValueError, match="replay needs one num_experts and top_k"):
        replay_routing(mixed)
    model = build("qwen3", EXPERTS)
    replay_routing(model)
    tokens_BL, ids_BLNK = batch(1)
    with pytest.raises(ValueError, match=r"ids out of range; allowed are 0\.\.7"):
        model(tokens_BL, routed_experts=ids_BLNK + E)
    with pytest.raises(ValueError, match=r"routed_experts has shape \(2, 16, 1, 2\), wanted \(2, 16, 2, 2\)"):
        model(tokens_BL, routed_experts=ids_BLNK[:, :, :1])
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"set compile\.enable=False"):
        model(tokens_BL, routed_experts=ids_BLNK)


def test_experts_that_reach_no_router_are_an_error() -> None:
    model = build("qwen3", EXPERTS)
    replay_routing(model)
    tokens_BL, ids_BLNK = batch(1)
    moes(model)[1].router = build("qwen3", EXPERTS).layers["1"].moe.router
    with pytest.raises(RuntimeError, match="routed_experts reached 1 of 2 MoEs"):
        model(tokens_BL, routed_experts=ids_BLNK)
    model(tokens_BL)


class WithExperts:
    """A data loader's batches, with experts for each step."""

    def __init__(self, batches: Any, ids: Any) -> None:
        self._batches, self._ids = batches, ids

    def __iter__(self) -> Iterator[Any]:
        for (fields, labels), ids_BLNK in zip(self._batches, self._ids, strict=False):
            yield {**fields, "routed_experts": ids_BLNK}, labels


def recorded_and_replayed(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of a run, and of one whose routers would choose the last experts, with the experts of the first."""
    config = config_of("deepseek_v3", str(folder), overrides=[EXPERTS], steps=STEPS, **settings)
    with trainer(config, rank) as made, record_routing() as record:
        replay_routing(made.model_parts[0])
        made.train()
        ids = recorded_experts(made.model_parts[0], record).chunk(STEPS)
        losses = made.losses
    config = config_of("deepseek_v3", str(folder), overrides=[EXPERTS], steps=STEPS, **settings)
    with trainer(config, rank) as made:
        for moe in moes(made.model_parts[0]):
            bias_E = moe.expert_bias_E
            (bias_E.to_local() if isinstance(bias_E, DTensor) else bias_E).copy_(torch.arange(E))
        replay_routing(made.model_parts[0])
        made.dataloader = WithExperts(made.dataloader, ids)
        made.train()
        return losses, made.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"expert_parallel_degree": 2, "recompute": SelectiveAC.Config()}),
        (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "recompute": FullAC.Config()}),
    ],
    ids=["fsdp-ep", "tp-ep"],
)
def test_a_trainer_repeats_the_losses_of_recorded_experts(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    recorded, replayed = run_ranks(recorded_and_replayed, ranks, tmp_path, settings, timeout=600)[0]
    assert len(recorded) == STEPS
    assert replayed == recorded


def wrong_on_one_rank(rank: int, folder: Path) -> str:
    config = config_of("qwen3", str(folder), overrides=[EXPERTS], steps=1, expert_parallel_degree=2)
    with trainer(config, rank) as made:
        replay_routing(made.model_parts[0])
        made.dataloader = WithExperts(made.dataloader, [batch(1)[1] + 100 * rank])
        with pytest.raises(ValueError, match="routed_experts") as raised:
            made.train()
    return str(raised.value)


@pytest.mark.slow
def test_wrong_experts_of_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(wrong_on_one_rank, 2, tmp_path):
        assert "rank 1: routed_experts gives 32 tokens ids out of range; allowed are 0..7" in text
