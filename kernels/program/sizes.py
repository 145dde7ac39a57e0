"""`Size`: an integer that changes from step to step, while a function is traced: an expression in the names of sizes.

Arithmetic on sizes gives sizes. A comparison gives the answer for the traced step and becomes a *guard*: a program runs
in the steps for which all its guards give the same answers. Everything else that would take a number, as a dict or
torch.empty, fails: a size must never become a constant unseen.

Example: with T = 100, `-(-T // 64)` is the expression (-((-T)//64)), and `T >= 64` is True with the guard (T>=64).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, final

Guarded = TypeVar("Guarded")
Guards = dict[str, object]  # by expression, what it was in the traced step


@final
class Size:
    """text: the expression. value: in the traced step. guards: of the trace, to which comparisons add."""

    __slots__ = ("guards", "text", "value")
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, text: str, value: int, guards: Guards) -> None:
        self.text, self.value, self.guards = text, value, guards

    def _of(
        self, operator: str, other: "Real", value: Callable[[int], int | float], *, swapped: bool = False
    ) -> "Size":
        if type(other) not in (int, float, Size):
            return NotImplemented
        one, two = (_text(other), self.text) if swapped else (self.text, _text(other))
        return Size(f"({one}{operator}{two})", value(_value(other)), self.guards)

    def _guard(self, text: str, value: Guarded) -> Guarded:
        self.guards[text] = value
        return value

    def __add__(self, other: "Real") -> "Size":
        return self._of("+", other, lambda o: self.value + o)

    def __radd__(self, other: "Real") -> "Size":
        return self._of("+", other, lambda o: o + self.value, swapped=True)

    def __sub__(self, other: "Real") -> "Size":
        return self._of("-", other, lambda o: self.value - o)

    def __rsub__(self, other: "Real") -> "Size":
        return self._of("-", other, lambda o: o - self.value, swapped=True)

    def __mul__(self, other: "Real") -> "Size":
        return self._of("*", other, lambda o: self.value * o)

    def __rmul__(self, other: "Real") -> "Size":
        return self._of("*", other, lambda o: o * self.value, swapped=True)

    def __floordiv__(self, other: "Real") -> "Size":
        return self._of("//", other, lambda o: self.value // o)

    def __rfloordiv__(self, other: "Real") -> "Size":
        return self._of("//", other, lambda o: o // self.value, swapped=True)

    def __truediv__(self, other: "Real") -> "Size":
        return self._of("/", other, lambda o: self.value / o)

    def __rtruediv__(self, other: "Real") -> "Size":
        return self._of("/", other, lambda o: o / self.value, swapped=True)

    def __mod__(self, other: "Real") -> "Size":
        return self._of("%", other, lambda o: self.value % o)

    def __neg__(self) -> "Size":
        return Size(f"(-{self.text})", -self.value, self.guards)

    def __eq__(self, other: object) -> bool:
        return self._guard(f"({self.text}=={_text(other)})", self.value == _value(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: "Real") -> bool:
        return self._guard(f"({self.text}<{_text(other)})", self.value < _value(other))

    def __le__(self, other: "Real") -> bool:
        return self._guard(f"({self.text}<={_text(other)})", self.value <= _value(other))

    def __gt__(self, other: "Real") -> bool:
        return not self <= other

    def __ge__(self, other: "Real") -> bool:
        return not self < other

    def __bool__(self) -> bool:
        return not self == 0

    def __rlshift__(self, other: "Real") -> "Size":
        return self._of("<<", other, lambda o: o << self.value, swapped=True)

    def bit_length(self) -> "Size":
        return Size(f"({self.text}).bit_length()", self.value.bit_length(), self.guards)

    def __repr__(self) -> str:
        return f"Size({self.text}={self.value})"


Number = int | Size
Real = float | Size  # with int


def _text(size: object) -> str:
    return size.text if type(size) is Size else repr(size)


def _value(size: object) -> int:
    return size.value if type(size) is Size else size


def specialized(size: Number) -> int:
    """Returns a number where a Size will not do. It is a guard: steps with another one have a program of their own."""
    if type(size) is not Size:
        return size  # pyright: ignore[reportReturnType]
    return size._guard(size.text, size.value)


def concrete(size: Number) -> int:
    """Returns the value in the traced step, for what must not depend on it."""
    return _value(size)


def item_of(table: Sequence[int], index: Number) -> Number:
    """Returns table[index]."""
    if type(index) is not Size:
        return table[index]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return Size(f"{tuple(table)}[{index.text}]", table[index.value], index.guards)


def smaller(one: Number, two: int) -> Number:
    """Returns the smaller one, without a guard."""
    if type(one) is not Size:
        return min(one, two)  # pyright: ignore[reportArgumentType]
    return Size(f"min({one.text},{two})", min(one.value, two), one.guards)
