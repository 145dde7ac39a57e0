"""Given experts in torch's pipelines: each micro-batch and recomputation of a stage has its own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, record_routing
from tests.helpers.launch import RankPool
from tests.helpers.process_groups import passing_groups

Ranks = Callable[[int], RankPool]
MICROBATCHES, B, L, D = 4, 8, 5, 12
LOSSES = RouterConfig(balance="global", balance_coef=0.3, z_loss_coef=0.05)
CONFIG = MoEConfig(d=D, n=6, E=8, K=2, init_std=0.5, router=LOSSES, rounding=RoundingConfig(mode="off"))


class Stage(nn.Module):
    def __init__(self, stage: int, group: EPGroup, recomputes: bool) -> None:
        super().__init__()
        self.layer, self._recomputes = MoE(CONFIG, group, seed=stage, dtype=torch.float64).double(), recomputes

    def forward(self, x: Tensor, routed_experts: Tensor | None = None) -> Tensor:
        if self._recomputes:
            y, loss, _ = checkpoint(self.layer, x, routed_experts, use_reentrant=False)  # type: ignore[misc]
        else:
            y, loss, _ = self.layer(x, routed_experts)
        return x + y + loss


def rows(seed: int) -> Tensor:
    return torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y * target).sum()


def step(rank: int, group: EPGroup, stages: Any, recomputes: bool, ids: Tensor | None = None) -> tuple[Any, list[Any]]:
    """What the routers recorded, by micro-batch; losses of the last stage, and all gradients."""
    number, ep_rank = divmod(rank, 2)
    module, losses = Stage(number, group, recomputes), []
    sample = rows(0)[: B // MICROBATCHES].requires_grad_()  # otherwise torch calls the stage for the shapes first
    stage = PipelineStage(module, number, 2, torch.device("cpu"), (sample,), (sample,), group=stages)
    schedule: Any = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    given = {} if ids is None else {"routed_experts": ids}
    with record_routing() as record:
        if number == 0:
            schedule.step(rows(ep_rank), **given)
        else:
            schedule.step(target=rows(2 + ep_rank), losses=losses, **given)
    assert len(record.of(module.layer)) == MICROBATCHES
    return torch.cat(record.of(module.layer)), [*losses, *(each.grad for each in module.parameters())]


def micro_batch_by_micro_batch(rank: int, groups: list[EPGroup], ids: list[Tensor]) -> list[Any]:
    """The same by autograd alone: both stages on every rank."""
    number, ep_rank = divmod(rank, 2)
    modules, losses = [Stage(each, groups[each], False) for each in range(2)], []
    for x, target, *chosen in zip(
        *(each.chunk(MICROBATCHES) for each in (rows(ep_rank), rows(2 + ep_rank), *ids)), strict=True
    ):
        y = x
        for module, each in zip(modules, chosen, strict=True):
            y = module(y, each)
        losses.append(loss_of(y, target))
        losses[-1].backward()
    return [*(losses if number else []), *(each.grad for each in modules[number].parameters())]


def is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def pipelined(rank: int) -> dict[str, bool]:
    """Stage rank // 2 of two, with two ranks of experts each."""
    number, ep_rank = divmod(rank, 2)
    with passing_groups():
        # Every rank computes with groups of its own in the comparison, hence two for a stage's ranks.
        groups = [[dist.new_group([0, 1]), dist.new_group([2, 3])][number] for _ in range(2)]
        stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][ep_rank]
        of_experts, seen = [EPGroup(each) for each in groups], {}
        recorded, wanted = step(rank, of_experts[0], stages, False)
        generator = torch.Generator().manual_seed(ep_rank)  # the same of both stages' ranks
        drifted = [torch.rand(B, L, CONFIG.E, generator=generator).topk(CONFIG.K).indices for _ in range(2)]
        alone = micro_batch_by_micro_batch(rank, of_experts, drifted)
        for recomputes in (False, True):
            again, results = step(rank, of_experts[0], stages, recomputes, recorded)
            seen[f"replay {recomputes}"] = torch.equal(again, recorded) and is_same(results, wanted)
            again, results = step(rank, of_experts[0], stages, recomputes, drifted[number])
            seen[f"drifted {recomputes}"] = torch.equal(again, drifted[number]) and is_same(results, alone)
        seen["other ids"] = not is_same(alone, wanted)
    return seen


def test_each_micro_batch_of_a_pipeline_has_its_experts(ranks: Ranks) -> None:
    """Bit for bit: recorded ids repeat the step, and drifted ones give what autograd gives without a pipeline."""
    for seen in ranks(4).run(pipelined):
        assert all(seen.values()), seen
