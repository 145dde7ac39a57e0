"""Imitated hosts, and the small model of the examples' tests."""

from collections.abc import Iterator

import pytest

from tests.cluster.imitated_hosts import Hosts, imitated_hosts
from tests.examples.conftest import small

__all__ = ["any_hosts", "hosts", "small"]


@pytest.fixture
def any_hosts() -> Iterator[Hosts]:
    with imitated_hosts() as made:
        yield made


@pytest.fixture
def hosts(any_hosts: Hosts) -> Hosts:
    """Hosts in namespaces; skips where those are not permitted."""
    if any_hosts.way != "namespaces":
        pytest.skip(str(any_hosts))
    return any_hosts
