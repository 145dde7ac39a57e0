"""Room for the next step, and the plan that is one of nothing where there is not enough."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.dispatch.plan import Plan
from sonic_ep.dispatch.room import Forecast, Room, RowsForecast, plan_within
from sonic_ep.kernels.host_sizes import host_sizes
from sonic_ep.routing import HostSizes, SizesOnHost


def test_room_by_hand() -> None:
    """Rank 0 sends 3 + 4 pairs and receives 3 + 9, rank 1 sends 9 + 1 and receives 4 + 1."""
    sizes = HostSizes((5, 8), ((3, 6), (10, 1)), ((3, 4), (9, 1)))
    assert Room.needed_by(sizes) == (8, 13, 12)
    assert Room(8, 13, 12).holds(Room.needed_by(sizes))
    assert Room(8, 14, 13).holds(Room.needed_by(sizes))
    for room in ((7, 13, 12), (9, 13, 12), (8, 12, 12), (8, 13, 11)):
        assert not Room(*room).holds(Room.needed_by(sizes))


@given(size=st.integers(1, 4), e=st.integers(1, 4), multiple=st.integers(1, 9), data=st.data())
def test_the_device_says_what_the_host_does(size: int, e: int, multiple: int, data: st.DataObject) -> None:
    row = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=size * e, max_size=size * e)
    pairs_SE = torch.tensor(data.draw(st.lists(row, min_size=size, max_size=size)))
    rows_SE, tokens_S = -(-pairs_SE // multiple) * multiple, torch.arange(size) + 3
    values = host_sizes(tokens_S, rows_SE, pairs_SE, torch.full((size, 2), 99))  # the ranks' reports stand behind
    needed = Room.needed_by(SizesOnHost(values, size).read())
    room = Room(*(most + data.draw(st.sampled_from([-1, 0, 0, 1])) for most in needed))
    plan = Plan.from_counts(rows_SE, pairs_SE, 4).of_rank(size - 1)
    got = plan_within(plan, values, room)
    assert got.table_FC.dtype == got.pairs_SQ.dtype == torch.int32
    if room.holds(needed):
        assert all(map(torch.equal, got, plan))
    else:
        assert not got.table_FC.any()
        assert not got.expert_starts_e.any()
        assert not got.pairs_SQ.any()


@given(st.lists(st.tuples(*3 * [st.integers(0, 10**6)]), min_size=1, max_size=9), st.data())
def test_a_forecast_follows_steps(steps: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Room for a quarter more than the last step took, if this rank has as many tokens as then."""
    forecast = Forecast()
    assert forecast.room(0, 10**7) is None
    for step in steps:
        own = data.draw(st.integers(0, step[0]))
        forecast.note(Room(*step), own)
        assert forecast.room(own + 1, 10**7) is None
        room = forecast.room(own, 10**7)
        assert room is not None
        assert room.holds(Room(step[0], step[1] + step[1] // 4, step[2] + step[2] // 4))
        assert forecast.room(own, 5) == room._replace(pairs=min(5, room.pairs))


def test_room_shrinks_by_little() -> None:
    """A layer of few pairs does not take the room of the next one."""
    forecast = Forecast()
    for needed in (1600, 16, 16):
        forecast.note(Room(9, needed, 2 * needed), 9)
    room = forecast.room(9, 10**6)
    assert room is not None
    assert room.holds(Room(9, 1600, 3200))
    for _ in range(200):
        forecast.note(Room(9, 16, 32), 9)
    room = forecast.room(9, 10**6)
    assert room is not None
    assert room.pairs < 80


def test_rows_of_the_next_step() -> None:
    """A thirty-second more than the same experts' last one, whatever came before, for as many tokens."""
    forecast = RowsForecast()
    assert forecast.rows(1, 9) is None
    forecast.note(2, 32, 9)
    for rows, more in ((640, 660), (64, 66), (0, 0), (320, 330)):
        forecast.note(1, rows, 9)
        assert forecast.rows(1, 9) == more
        assert forecast.rows(1, 8) is None
        assert forecast.rows(2, 9) == 33


def test_numbers_that_nobody_keeps_are_forgotten() -> None:
    forecast = RowsForecast()
    for whose in range(5000):
        forecast.note(whose, 64, 9)
    assert forecast.rows(4999, 9) == 66
    assert forecast.rows(0, 9) is None
