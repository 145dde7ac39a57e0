"""Values are found beside the tensor they were left with, by nobody else, and checked where nobody takes them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sonic_ep.in_flight import InFlight


def test_a_value_is_taken_once_beside_its_tensor() -> None:
    checked: list[str] = []
    in_flight, key = InFlight(checked.append), torch.zeros(3)
    in_flight.put("a", key, "value")
    assert in_flight.pop("b", key) is None
    assert in_flight.pop("a", key.view(1, 3)) == "value"
    assert in_flight.pop("a", key) is None
    assert checked == []


def test_what_nobody_takes_is_checked_once() -> None:
    checked: list[str] = []
    in_flight, first, second = InFlight(checked.append), torch.zeros(3), torch.zeros(3)
    in_flight.put("a", first, "first")
    in_flight.put("a", second, "second")
    assert checked == ["first"]
    assert in_flight.pop("a", first) is None
    assert checked == ["first", "second"]
    assert in_flight.pop("a", second) is None
    in_flight.flush("a")
    assert checked == ["first", "second"]


def test_no_other_tensor_is_taken_for_one_that_was_let_go() -> None:
    checked: list[int] = []
    in_flight = InFlight(checked.append)
    for number in range(50):
        in_flight.put("a", torch.zeros(7), number)
        assert in_flight.pop("a", torch.zeros(7)) is None
    assert checked == list(range(50))


def test_threads_do_not_take_from_each_other() -> None:
    checked: list[str] = []
    in_flight, key = InFlight(checked.append), torch.zeros(3)
    in_flight.put("a", key, "value")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_flight.pop, "a", key).result() is None
    assert in_flight.pop("a", key) == "value"
    assert checked == []


def test_a_check_that_raises_leaves_nothing_behind() -> None:
    def check(value: str) -> None:
        raise ValueError(value)

    in_flight, key = InFlight(check), torch.zeros(3)
    in_flight.put("a", key, "first")
    with pytest.raises(ValueError, match="first"):
        in_flight.flush("a")
    in_flight.put("a", key, "second")
    assert in_flight.pop("a", key) == "second"
