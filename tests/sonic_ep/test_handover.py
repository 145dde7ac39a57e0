"""Values are found beside the tensor they were left with, by nobody else, and checked where nobody takes them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sonic_ep.handover import Handover


def test_a_value_is_taken_once_beside_its_tensor() -> None:
    checked: list[str] = []
    handover, beside = Handover(checked.append), torch.zeros(3)
    handover.leave("a", beside, "value")
    assert handover.take("b", beside) is None
    assert handover.take("a", beside.view(1, 3)) == "value"
    assert handover.take("a", beside) is None
    assert checked == []


def test_what_nobody_takes_is_checked_once() -> None:
    checked: list[str] = []
    handover, first, second = Handover(checked.append), torch.zeros(3), torch.zeros(3)
    handover.leave("a", first, "first")
    handover.leave("a", second, "second")
    assert checked == ["first"]
    assert handover.take("a", first) is None
    assert checked == ["first", "second"]
    assert handover.take("a", second) is None
    handover.settle("a")
    assert checked == ["first", "second"]


def test_no_other_tensor_is_taken_for_one_that_was_let_go() -> None:
    checked: list[int] = []
    handover = Handover(checked.append)
    for number in range(50):
        handover.leave("a", torch.zeros(7), number)
        assert handover.take("a", torch.zeros(7)) is None
    assert checked == list(range(50))


def test_threads_do_not_take_from_each_other() -> None:
    checked: list[str] = []
    handover, beside = Handover(checked.append), torch.zeros(3)
    handover.leave("a", beside, "value")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(handover.take, "a", beside).result() is None
    assert handover.take("a", beside) == "value"
    assert checked == []


def test_a_check_that_raises_leaves_nothing_behind() -> None:
    def check(value: str) -> None:
        raise ValueError(value)

    handover, beside = Handover(check), torch.zeros(3)
    handover.leave("a", beside, "first")
    with pytest.raises(ValueError, match="first"):
        handover.settle("a")
    handover.leave("a", beside, "second")
    assert handover.take("a", beside) == "second"
