"""The constants of the time model are what the fit finds in the records that they name."""

from pathlib import Path

import pytest

from benchmarks.fit_time_model import RESULTS, constants
from sonic_ep.cli.time_constants import CONSTANTS


def test_constants_are_those_of_the_records() -> None:
    found = constants()
    assert list(found) == list(CONSTANTS)
    for name, values in found.items():
        assert values == pytest.approx(CONSTANTS[name].values, rel=1e-3), name


def test_records_exist() -> None:
    for constant in CONSTANTS.values():
        assert constant.fields
        assert all(Path(RESULTS / name).exists() for name in constant.records)
