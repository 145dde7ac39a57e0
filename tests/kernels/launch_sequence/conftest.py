"""A driver without a GPU."""

from typing import Any

import pytest

from tests.helpers.fake_driver import FakeGraph, load


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def graph(fake: Any) -> FakeGraph:
    return FakeGraph(fake)
