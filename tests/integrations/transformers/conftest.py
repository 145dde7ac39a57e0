"""What tests of models of transformers share."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def registered() -> Iterator[None]:
    from sonic_ep.integrations.transformers import register

    register()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield
