"""A missing extra is answered with the pip line that installs it."""

import tomllib
from pathlib import Path

import pytest

from sonic_ep.extras import require_extra


def test_missing_packages_are_named_with_their_extra() -> None:
    with pytest.raises(ImportError, match=r"^no_such_a, no_such_b not found; pip install 'sonic-ep\[cuda\]'$"):
        require_extra("cuda", "no_such_a", "json", "no_such_b")


def test_a_module_of_a_missing_package_is_missing() -> None:
    with pytest.raises(ImportError, match=r"^no_such.core not found; pip install 'sonic-ep\[megatron\]'$"):
        require_extra("megatron", "no_such.core")


def test_the_packages_of_an_extra_are_among_the_developers() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in ("cuda", "megatron", "deepspeed"):
        for requirement in extras[extra]:
            wanted = f"{requirement}; sys_platform == 'linux'"  # and a version of Python, where a package needs one
            assert any(each.startswith(wanted) for each in extras["dev"])


def test_present_packages_pass() -> None:
    require_extra("cuda", "json", "torch")
