"""Sizes of grids and blocks, in plain integer arithmetic.

Every launch needs one or two of them. triton.cdiv and triton.next_power_of_2 take as much host time as an allocation.
"""

# Entries of index lists in 16 bytes. Kernels are launched faster where their tensors start at a multiple of them.
INDEX_ALIGNMENT = 4


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up. b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()
