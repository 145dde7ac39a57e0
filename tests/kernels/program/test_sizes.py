"""A size has the value of its expression, and comparisons become guards."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.kernels.program.sizes import Size, concrete, specialized

OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "-//": lambda a, b: -(-a // b),
    "<<": lambda a, _: 1 << (a % 7),
    "bits": lambda a, _: (a + 0).bit_length(),
}
steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(1, 300), st.booleans()), min_size=1, max_size=6
)


@given(steps, st.integers(1, 10_000), st.integers(1, 10_000))
def test_values(steps: list[tuple[str, int, bool]], T: int, L: int) -> None:
    def computed(T: Any, L: Any) -> Any:
        result = T
        for name, number, with_size in steps:
            result = OPERATORS[name](result, (L if with_size else number))
        return result

    guards: dict[str, object] = {}
    size = computed(Size("T", T, guards), Size("L", L, guards))
    assert type(size) is Size
    assert concrete(size) == computed(T, L) == eval(size.text, {"T": T, "L": L})
    assert guards == {}


def test_guards() -> None:
    guards: dict[str, object] = {}
    T = Size("T", 100, guards)
    assert T >= 64
    assert not T * 2 == 64
    assert specialized(T // 64) == 1
    assert guards == {"(T<64)": False, "((T*2)==64)": False, "(T//64)": 1}
    with pytest.raises(TypeError):
        range(T)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        hash(T)
