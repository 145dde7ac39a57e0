"""A few seconds of `make fuzz`, with fixed seeds, and the routing oracle on examples that are known by hand."""

from collections.abc import Callable
from unittest.mock import patch

import pytest

from sonic_ep import RoundingConfig, layer
from sonic_ep.functional import moe
from tests.fuzz.__main__ import CHECKS
from tests.fuzz.configurations import differences, random_case
from tests.fuzz.misuse import ALL
from tests.fuzz.routing_oracle import round_counts
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]


def without_checkpoints(size: int, number: int) -> list[int]:
    """Activation checkpointing imports Dynamo, which takes each rank seconds."""
    return [case for case in range(number) if not random_case(1, size, case).checkpointed]


@pytest.mark.filterwarnings("ignore")  # as in `make fuzz`: some of what is misused warns
@pytest.mark.parametrize(
    ("kind", "size", "number"),
    [
        *(("configurations", 1, number) for number in range(30)),
        *(("configurations", 2, number) for number in without_checkpoints(2, 20)),
        *(("configurations", 4, number) for number in without_checkpoints(4, 6)),
        *(("misuse", 2, number) for number in range(len(dict.fromkeys(ALL)))),
        *(("faults", 1, number) for number in range(2)),
        *(("faults", 2, number) for number in (0, 2)),
        *(("folders", 2, number) for number in range(6)),
    ],
)
def test_a_case(ranks: Ranks, kind: str, size: int, number: int) -> None:
    CHECKS[kind](ranks(size), 1, number)


def test_cases_are_fixed_by_their_numbers() -> None:
    assert random_case(3, 2, 5) == random_case(3, 2, 5)
    assert random_case(3, 2, 5) != random_case(3, 2, 6)


def with_wrong_outputs(rank: int) -> list[list[str] | None]:
    """What is found where outputs are off by 1e-8, and where nothing is."""
    case = random_case(1, 1, 1)
    right = differences(rank, case)
    with patch.object(layer, "moe", lambda *args, **kwargs: moe(*args, **kwargs) * (1 + 1e-8)):
        return [right, differences(rank, case)]


def test_a_small_difference_is_found(ranks: Ranks) -> None:
    ((right, wrong),) = ranks(1).run(with_wrong_outputs)
    assert right == []
    assert wrong is not None
    assert any("y differs by 1e-08" in text for text in wrong)


def test_the_rounding_of_the_documented_example() -> None:
    """Expert 0 has 100 pairs, so 128 rows; expert 1 has 190, so 128 (kernels/route/rounding/reference.py)."""
    counts, rounding = [[70, 90], [30, 100]], RoundingConfig(t=64, G=128)
    assert round_counts(counts, [170, 170], rounding, True, [])[0] == [[64, 64], [64, 64]]
