"""Compiled code that another user may have written is found."""

import os
from pathlib import Path

import pytest

from sonic_ep.kernels.common.cache import problem_with_access, problem_with_quack_cache


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775])
def test_a_folder_of_this_user(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert problem_with_access(tmp_path) is None
    assert problem_with_access(tmp_path / "nothing") is None


def test_a_folder_that_all_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    problem = problem_with_access(tmp_path)
    assert problem is not None
    assert problem.startswith(
        f"{tmp_path} with compiled code has mode 777: all may write; use chmod o-w, or give a folder"
    )


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    if user == 0:
        os.chown(tmp_path, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    holder, reader = (4321, 0) if user == 0 else (user, 4321)
    wanted = f"{tmp_path} with compiled code belongs to user {holder}, wanted root or user {reader}; give a folder of"
    assert str(problem_with_access(tmp_path)).startswith(wanted)


def test_folders_in_that_of_quack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    (inner := tmp_path / "digest").mkdir()
    assert problem_with_quack_cache() is None
    inner.chmod(0o777)
    assert f"{inner} with compiled code has mode 777" in str(problem_with_quack_cache())
