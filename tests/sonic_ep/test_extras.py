"""A missing extra is answered with the pip line that installs it."""

import pytest

from sonic_ep.extras import require_extra


def test_missing_packages_are_named_with_their_extra() -> None:
    with pytest.raises(ImportError, match=r"^no_such_a, no_such_b not found; pip install 'sonic-ep\[cuda\]'$"):
        require_extra("cuda", "no_such_a", "json", "no_such_b")


def test_present_packages_pass() -> None:
    require_extra("cuda", "json", "torch")
