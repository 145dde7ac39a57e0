"""Writes and reads the files of all ranks in the steps of torch.distributed.checkpoint.

torch's own `save` and `load` exchange plans and results by collectives that wait for torch's limit of 30 minutes and
name nobody. Here they go through an EPGroup, so that a rank that does not come is named within the group's timeout.
Plans go to the first rank and back, as torch sends them, because all plans of thousands of ranks on every rank would
take gigabytes.
"""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from sonic_ep.checkpoint.files import SafePlanner, SafeReader
from sonic_ep.groups import EPGroup

_Own = TypeVar("_Own")
_Answer = TypeVar("_Answer")
_STAGE = "checkpoint"


class StepError(Exception):
    """A step failed. failures: the exceptions by rank, equal on every rank. The message has their first lines."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        shown = {rank: f"{type(error).__name__}: {error}".partition("\n")[0] for rank, error in failures.items()}
        super().__init__("; ".join(f"rank {rank}: {text}" for rank, text in shown.items()))
        self.failures = failures


def write_sharded(folder: Path, state: STATE_DICT_TYPE, group: EPGroup) -> None:
    """Writes each rank's share of `state`, and `.metadata`. A collective. Raises StepError, on every rank."""
    writer, planner, is_first = FileSystemWriter(folder), DefaultSavePlanner(), group.rank == 0
    metadata: list[Metadata] = []  # of the first rank

    def plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        planned, described = planner.create_global_plan(plans)
        metadata.append(described)
        return writer.prepare_global_plan(planned)

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(own_plan), planner).wait()

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(metadata[0], results)
        return [None] * group.size

    own_plan = _through_first_rank(group, plan, plan_all)
    _through_first_rank(group, write, finish)


def read_sharded(folder: Path, state: STATE_DICT_TYPE, group: EPGroup) -> None:
    """Reads into the tensors of `state` and sets its other values. A collective. Raises StepError, on every rank."""
    reader, planner, is_first = SafeReader(folder), SafePlanner(), group.rank == 0

    def read() -> None:
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_first)
        reader.set_up_storage_reader(metadata, is_first)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    _through_first_rank(group, read, lambda results: results)


def _through_first_rank(
    group: EPGroup, own: Callable[[], _Own], of_all: Callable[[list[_Own]], list[_Answer]]
) -> _Answer:
    """Calls `own` on every rank, then `of_all` with the results, by rank, on the first. Returns this rank's entry of
    what `of_all` returned. Raises StepError, on every rank, if a call failed."""
    nothing = [None] * group.size
    replies = group.all_to_all_object([_result_or_error(own), *nothing[1:]], stage=_STAGE)
    answers: Sequence[tuple[_Answer | None, dict[int, Exception]] | None] = nothing
    if group.rank == 0:
        found = [reply for reply in replies if reply is not None]
        failures = {rank: error for rank, (_, error) in enumerate(found) if error is not None}
        results: list[_Answer] | None = None
        if not failures:
            results, error = _result_or_error(lambda: of_all(cast("list[_Own]", [result for result, _ in found])))
            failures = {} if error is None else {0: error}
        answers = [(None if results is None else results[rank], failures) for rank in range(group.size)]
    received = group.all_to_all_object(answers, stage=_STAGE)[0]
    assert received is not None
    answer, failures = received
    if failures:
        raise StepError(failures)
    return cast("_Answer", answer)


def _result_or_error(step: Callable[[], _Own]) -> tuple[_Own | None, Exception | None]:
    """Returns what `step` returns, or what it raises, as an exception that can be sent to other ranks."""
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        try:
            return None, pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - classes of exceptions may need other arguments
            return None, RuntimeError(f"{type(error).__name__}: {error}")
