"""The launcher that the multi-process tests stand on: results, failures, hangs and clean-up of its ranks."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import launch
from tests.helpers.launch import RankError, RankPool, RankTimeoutError, run_ranks

Ranks = Callable[[int], RankPool]


@dataclass(frozen=True)
class Case:
    """A class of a test file, to travel both ways."""

    start: int
    x_T: Tensor


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of our own: these tests break it on purpose."""
    with RankPool(2) as pool:
        yield pool


def summed(rank: int, case: Case, factor: int = 1) -> Case:
    total = case.x_T * rank
    dist.all_reduce(total)
    return Case(case.start + rank, total * factor)


def fails_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("E=7 is not divisible by ep_size=2")
    dist.barrier()


def fails_everywhere(rank: int) -> None:
    pytest.fail(f"no luck on rank {rank}")


def dies_on_rank_0(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    time.sleep(60)


def hangs_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def sums_in_pairs(rank: int) -> tuple[int, float]:
    """Sums over {0, 1} and {2, 3}; also counts the groups that earlier calls left behind."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor(float(rank))
    dist.all_reduce(x, group=groups[rank // 2])
    return len(dist.distributed_c10d._world.pg_map) - 2, x.item()


def surroundings(rank: int) -> tuple[int, int, int, float]:
    return os.getpid(), dist.get_world_size(), torch.get_num_threads(), torch.rand(()).item()


def warns(rank: int) -> None:
    warnings.warn("old", FutureWarning, stacklevel=1)


def destroys_its_group(rank: int) -> None:
    dist.destroy_process_group()


def test_results_come_back_by_rank(ranks: Ranks) -> None:
    results = ranks(2).run(summed, Case(10, torch.ones(3)), 2)
    assert [result.start for result in results] == [10, 11]
    assert all(torch.equal(result.x_T, torch.full((3,), 2.0)) for result in results)
    assert type(results[0]) is Case


def test_pool_keeps_its_processes_and_reseeds_them(ranks: Ranks) -> None:
    first, second = ranks(2).run(surroundings), ranks(2).run(surroundings)
    assert first == second
    assert {(size, threads) for _, size, threads, _ in first} == {(2, 1)}
    assert len({pid for pid, *_ in first} | {os.getpid()}) == 3


def test_subgroups_work_and_do_not_pile_up(ranks: Ranks) -> None:
    for _ in range(3):
        assert ranks(4).run(sums_in_pairs) == [(0, 1.0), (0, 1.0), (0, 5.0), (0, 5.0)]


def test_failure_names_the_rank_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: E=7 is not") as caught:
        pool.run(fails_on_rank_1)
    message = str(caught.value)
    assert "in fails_on_rank_1" in message
    assert "ValueError: E=7 is not divisible by ep_size=2" in message
    assert "stopped before they finished: ranks [0]" in message
    assert " in barrier" in message.split("rank 0 stood here:")[1]
    assert [result.start for result in pool.run(summed, Case(0, torch.ones(1)))] == [0, 1]


def test_failures_of_all_ranks_are_collected(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fails_everywhere)
    failures = caught.value.failures
    assert sorted(failures) == [0, 1]
    assert all(f"no luck on rank {rank}" in text for rank, text in failures.items())


def test_timeout_names_the_ranks_that_hang(pool: RankPool) -> None:
    with pytest.raises(RankTimeoutError, match=r"ranks \[1\] of 2 were still running after 1 s") as caught:
        pool.run(hangs_on_rank_1, timeout=1)
    assert " in hangs_on_rank_1" in str(caught.value).split("rank 1 stood here:")[1]


def test_death_of_a_process_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed: the process died with exit code 7"):
        pool.run(dies_on_rank_0)


def test_destroying_the_pools_group_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="belongs to its pool"):
        pool.run(destroys_its_group)


def test_warnings_are_errors_on_the_ranks_too(pool: RankPool) -> None:
    with pytest.raises(RankError, match="FutureWarning: old"):
        pool.run(warns)


def test_worker_must_be_a_module_level_function(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="make it a module-level function"):
        pool.run(lambda rank: rank)


def test_a_rank_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RankPool(1)
    pool.run(summed, Case(0, torch.ones(1)))
    (process,) = pool._processes
    monkeypatch.setattr(launch, "END_TIMEOUT", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)
        with pytest.raises(RuntimeError, match=rf"not ended 0\.2 s after .*: rank-0, process {process.pid}, State: "):
            pool.close()
    process.kill()
    process.join()
    pool.close()  # it has no ranks any more


def test_run_ranks_uses_processes_of_its_own() -> None:
    (pid, size, _, _), *others = run_ranks(surroundings, 1)
    assert (size, others) == (1, [])
    assert pid != os.getpid()


def makes_a_group_on_rank_0(rank: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
        dist.distributed_c10d._world.group_count += 1  # as new_group without it does


def test_ranks_that_make_different_groups_are_found_and_the_next_call_works() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RuntimeError, match=r"makes_a_group_on_rank_0 made \[1, 0\] process groups"):
            pool.run(makes_a_group_on_rank_0)
        assert [total for _, total in pool.run(sums_over_new_groups)] == [1.0, 1.0]


def sums_over_new_groups(rank: int) -> tuple[int, float]:
    group, x = dist.new_group([0, 1]), torch.tensor(float(rank))
    dist.all_reduce(x, group=group)
    return rank, x.item()
