"""Sizes of grids and blocks, in plain integer arithmetic.

triton.cdiv and triton.next_power_of_2 take the host as long as an allocation does, and every launch needs one or two.
"""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()
