"""Hugging Face models under deepspeed.initialize: our layer trains as stock AutoEP does, at every ZeRO stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from tests.helpers.deepspeed_cpu import Step, deepspeed_world, engine, train
from tests.helpers.hugging_face import adam_of, batches, expert_parallel, loss_of, model_of

Ranks = Callable[[int], RankPool]
STEPS = 20


def trained(rank: int, preset: str, zero: int, ep_size: int, ours: bool, **config: Any) -> list[Step]:
    from sonic_ep.integrations.deepspeed import AutoEP

    AutoEP.install() if ours else AutoEP.uninstall()
    try:
        with deepspeed_world():
            # Without ZeRO, DeepSpeed's clipping depends on ep_size: it averages the norms of the ranks.
            settings = {
                "optimizer": adam_of,
                "clip": 0.5 if zero else 0.0,
                **expert_parallel(ep_size, preset),
                **config,
            }
            run = engine(model_of(preset), zero=zero, **settings)
            kinds = {type(module).__name__ for module in run.module.modules()}
            assert ("SonicEPAutoEPLayer" in kinds, "AutoEPMoELayer" in kinds) == (ours, not ours)
            return train(run, batches(rank, STEPS), loss_of)
    finally:
        AutoEP.uninstall()


def trained_each_way(rank: int, preset: str, zero: int, ep_sizes: tuple[int, ...]) -> dict[str, list[Step]]:
    """Stock at the first ep_size, ours at each of them."""
    runs = {f"ours ep_size={size}": trained(rank, preset, zero, size, True) for size in ep_sizes}
    return {"stock": trained(rank, preset, zero, ep_sizes[0], False), **runs}


def assert_alike(runs: dict[str, list[Step]]) -> None:
    stock = torch.tensor(runs.pop("stock"))
    assert stock[-1, 0] < stock[0, 0] - 0.5  # it learns, so that there is something to compare
    for name, steps in runs.items():
        losses_and_norms = torch.tensor(steps)
        torch.testing.assert_close(losses_and_norms[:, 0], stock[:, 0], rtol=0, atol=5e-6, msg=_named(name))
        torch.testing.assert_close(losses_and_norms[:, 1], stock[:, 1], rtol=2e-5, atol=0, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


@pytest.mark.parametrize(
    ("preset", "zero"),
    [
        *(("qwen3_moe", zero) for zero in range(4)),
        ("mixtral", 1),
        ("mixtral", 3),
        ("deepseek_v3", 0),
        ("deepseek_v3", 2),
        ("deepseek_v3", 3),
    ],
)
def test_two_ranks_train_as_stock_and_for_every_ep_size(ranks: Ranks, preset: str, zero: int) -> None:
    assert_alike(ranks(2).run(trained_each_way, preset, zero, (2, 1))[0])


@pytest.mark.parametrize(("zero", "ep_sizes"), [(0, (2,)), (1, (2, 4)), (2, (4,)), (3, (2,))])
def test_four_ranks_train_as_stock_and_for_every_ep_size(ranks: Ranks, zero: int, ep_sizes: tuple[int, ...]) -> None:
    assert_alike(ranks(4).run(trained_each_way, "qwen3_moe", zero, ep_sizes)[0])


def trained_across(rank: int) -> dict[str, list[Step]]:
    """With EP groups of ranks that are not neighbours."""
    config = {"use_data_before_expert_parallelism": True}
    kinds = {"stock": False, "ours": True}
    return {name: trained(rank, "qwen3_moe", 1, 2, ours, **config) for name, ours in kinds.items()}


def test_groups_that_go_across(ranks: Ranks) -> None:
    assert_alike(ranks(4).run(trained_across)[0])


def trained_from_partitions(rank: int) -> tuple[list[Step], list[Step]]:
    """Stock and ours at ZeRO 3, of a model that is partitioned as soon as it is made."""
    import deepspeed
    from transformers import Qwen3MoeForCausalLM  # noqa: F401 - torch's own imports fail inside of zero.Init

    from sonic_ep.integrations.deepspeed import AutoEP

    curves = []
    for ours in (False, True):
        AutoEP.install() if ours else AutoEP.uninstall()
        with deepspeed_world():
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = model_of("qwen3_moe")
            # Hugging Face does not initialise the experts of such a model.
            for weight in model.parameters():
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                    weight.copy_(torch.linspace(-1, 1, weight.numel()).sin().view(weight.shape) / weight.shape[-1])
            run = engine(model, zero=3, optimizer=adam_of, **expert_parallel(2, "qwen3_moe"))
            curves.append(train(run, batches(rank, 4), loss_of))
    AutoEP.uninstall()
    return curves[0], curves[1]


def test_a_model_made_under_zero_init_trains_as_stock(ranks: Ranks) -> None:
    stock, ours = ranks(2).run(trained_from_partitions)[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=0, atol=5e-6)
