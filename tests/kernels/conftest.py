"""Compilers take minutes, in processes of their own. Other tests of this folder, which need one core, run beside."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
WAITING = "test_every_kernel_compiles"  # what begins with it waits for compilers that an earlier test has started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait come last."""
    places = [place for place, item in enumerate(items) if FOLDER in item.path.parents]
    here = sorted((items[place] for place in places), key=lambda item: item.name.startswith(WAITING))
    for place, item in zip(places, here, strict=True):
        items[place] = item
