"""DeepSpeed's checkpoints of engines with our AutoEP layer: resumed bit by bit, exchanged with stock, resized."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from tests.helpers.deepspeed_cpu import Step, deepspeed_world, engine, train
from tests.helpers.hugging_face import adam_of, batches, expert_parallel, loss_of, model_of

Ranks = Callable[[int], RankPool]
BEFORE, AFTER = 3, 3


@contextmanager
def fresh_engine(zero: int, ep_size: int, *, ours: bool, seed: int, **config: Any) -> Iterator[Any]:
    from sonic_ep.integrations.deepspeed import AutoEP

    AutoEP.install() if ours else AutoEP.uninstall()
    try:
        with deepspeed_world():
            # Without ZeRO, DeepSpeed's clipping depends on ep_size: it averages the norms of the ranks.
            settings = {"clip": 0.5 if zero else 0.0, **expert_parallel(ep_size, "qwen3_moe"), **config}
            yield engine(model_of("qwen3_moe", seed=seed), zero=zero, optimizer=adam_of, **settings)
    finally:
        AutoEP.uninstall()


def steps_of(run: Any, rank: int, steps: int, start: int = 0) -> list[Step]:
    return train(run, batches(rank, steps, start=start), loss_of)


def weights_of(run: Any) -> list[Tensor]:
    """Of this rank; under ZeRO 3 its shard of each."""
    return [getattr(weight, "ds_tensor", weight).detach().clone() for weight in run.module.parameters()]


def saved(rank: int, folder: str, zero: int, ep_size: int, ours: bool) -> tuple[list[Step], list[Tensor]]:
    """Train, save, train on: what a resumed run must repeat."""
    with fresh_engine(zero, ep_size, ours=ours, seed=0) as run:
        steps_of(run, rank, BEFORE)
        run.save_checkpoint(folder, tag="saved")
        return steps_of(run, rank, AFTER, BEFORE), weights_of(run)


def resumed(rank: int, folder: str, zero: int, ep_size: int, ours: bool) -> tuple[list[Step], list[Tensor]]:
    with fresh_engine(zero, ep_size, ours=ours, seed=1) as run:
        run.load_checkpoint(folder, tag="saved")
        return steps_of(run, rank, AFTER, BEFORE), weights_of(run)


def saved_and_resumed(rank: int, folder: str, zero: int, ep_size: int, saver: bool, loader: bool) -> Any:
    """saver, loader: are they ours?"""
    return saved(rank, folder, zero, ep_size, saver), resumed(rank, folder, zero, ep_size, loader)


@pytest.mark.parametrize(("zero", "world"), [(0, 2), (1, 2), (1, 4), (2, 2), (3, 2)])
def test_a_resumed_run_repeats_every_bit(ranks: Ranks, tmp_path: Path, zero: int, world: int) -> None:
    for wanted, got in ranks(world).run(saved_and_resumed, str(tmp_path), zero, 2, True, True):
        assert got[0] == wanted[0]
        assert all(map(torch.equal, got[1], wanted[1]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("loader", [True, False], ids=["stock-to-ours", "ours-to-stock"])
def test_checkpoints_go_from_stock_to_ours_and_back(ranks: Ranks, tmp_path: Path, zero: int, loader: bool) -> None:
    (wanted, _), (got, _) = ranks(2).run(saved_and_resumed, str(tmp_path), zero, 2, not loader, loader)[0]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=0, atol=5e-6)


def expert_states(run: Any) -> list[Tensor]:
    """Adam's moments and the fp32 weights of all experts, w1, w2 and w3 of each layer, whole on every rank."""
    from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state

    if run.zero_optimization_stage() < 3:
        # DeepSpeed links state to parameters once, when the experts' group has made no step yet.
        run.optimizer._hp_optimizer_states_linked = False
        run.optimizer._lazy_init_hp_params_optimizer_state()
    ep_ranks = groups._get_expert_parallel_world_size(run.module.model.layers[0].mlp.ep_group_name)
    states = []
    for layer in run.module.model.layers:
        for weight in (layer.mlp.experts.w1, layer.mlp.experts.w2, layer.mlp.experts.w3):
            moments = [safe_get_full_optimizer_state(weight, name) for name in ("exp_avg", "exp_avg_sq")]
            for value in (*moments, safe_get_full_fp32_param(weight)):
                parts: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(parts, value.cpu())
                states.append(torch.cat(parts[:ep_ranks]))
    return states


def resized(rank: int, folder: str, zero: int) -> tuple[list[list[Step]], bool]:
    """Saved at ep_size 2, converted, loaded at 1, saved and loaded there once more. The steps of the run that went on
    and of both resumed ones, and whether the experts' optimizer state came through the conversion the same."""
    from deepspeed.checkpoint import ds_to_universal

    from sonic_ep.integrations.deepspeed.optimizer_states import guard_optimizer_states

    guard_optimizer_states()  # as a MoE layer elsewhere in the process does
    with fresh_engine(zero, 2, ours=True, seed=0) as run:
        steps_of(run, rank, BEFORE)
        run.save_checkpoint(folder, tag="saved")
        before = expert_states(run)
        steps = [steps_of(run, rank, AFTER, BEFORE)]
    if rank == 0:
        arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": f"{folder}/saved", "output_folder": f"{folder}/universal"}
        ds_to_universal.main(argparse.Namespace(**arguments, **folders, inject_missing_state=False))
    dist.barrier()
    with fresh_engine(zero, 1, ours=True, seed=1, checkpoint={"load_universal": True}) as run:
        run.load_checkpoint(folder, tag="universal")
        same = all(map(torch.equal, expert_states(run), before))
        # At ZeRO 3 DeepSpeed hands one step counter, a tensor, to all groups, and each of them would count it up.
        for state in run.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
        run.save_checkpoint(folder, tag="saved")
        steps.append(steps_of(run, rank, AFTER, BEFORE))
    return [*steps, resumed(rank, folder, zero, 1, True)[0]], same


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_universal_checkpoint_goes_to_another_ep_size(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    for (wanted, universal, regular), same in ranks(2).run(resized, str(tmp_path), zero):
        assert same
        torch.testing.assert_close(torch.tensor(universal), torch.tensor(wanted), rtol=0, atol=5e-6)
        assert regular == universal


def loaded_at_another_size(rank: int, folder: str, zero: int) -> tuple[str, list[Step], list[Step]]:
    """The refusal, and the next steps of the saved run and of the weights alone at ep_size 1."""
    wanted = saved(rank, folder, zero, 2, True)[0][:1]
    with fresh_engine(zero, 1, ours=True, seed=1) as run:
        try:
            run.load_checkpoint(folder, tag="saved")
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = "none"
        if zero < 3:  # there the experts' weights are in the optimizer's files
            run.load_checkpoint(folder, tag="saved", load_module_only=True)
            return refusal, wanted, steps_of(run, rank, 1, BEFORE)
        return refusal, wanted, wanted


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizer_state_of_another_ep_size_is_refused(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    for refusal, wanted, got in ranks(2).run(loaded_at_another_size, str(tmp_path), zero):
        assert "saved at autoep_size=2, this engine has autoep_size=1" in refusal
        assert "ds_to_universal.py" in refusal
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=0, atol=5e-6)
