"""Functions of tvm-ffi get from `Arguments` what they get from Python."""

import ctypes
import struct
from collections import namedtuple
from typing import Any, cast

import pytest
import torch

from sonic_ep.kernels.program.foreign import Address, Arguments, Operand
from sonic_ep.kernels.program.sizes import Size

tvm_ffi = pytest.importorskip("tvm_ffi")
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
Pair = namedtuple("Pair", ["tensor", "other"])


def read(form: str, address: int) -> tuple[Any, ...]:
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


def described(arguments: int, number: int) -> list[Any]:
    """What a function finds: ints and floats, addresses, shapes and strides of tensors, and lists for arrays."""
    found = []
    for place in range(arguments, arguments + 16 * number, 16):
        kind, _, value = read("iiQ", place)
        if kind == 71:
            found.append(described(*read("Qq", value + 24)))
        elif kind in (7, 70):
            start = value if kind == 7 else value + 24
            data, *device_dims_dtype, shape, strides, first = read("QiiiBBHQQQ", start)
            dims = device_dims_dtype[2]
            sizes = [read(f"{dims}q", each) for each in (shape, strides)]
            found.append(("tensor", data + first, *device_dims_dtype, *sizes))
        else:
            found.append((kind, value))
    return found


def seen_by(arguments: tuple[Any, ...], made: Arguments) -> list[Any]:
    """What a function finds that gets `arguments` from Python, and then `made`."""
    seen: list[Any] = []

    @_CALL
    def note(_: int, arguments: int, number: int, result: int) -> int:
        seen.append(described(arguments, number))
        return 0

    tvm_ffi.Function.__from_extern_c__(ctypes.cast(note, ctypes.c_void_p).value)(*arguments)
    note(None, ctypes.addressof(made.memory), len(arguments), None)
    return seen


def test_options_of_quack() -> None:
    pytest.importorskip("quack")
    from sonic_ep.kernels.experts.quack_compat import make_scheduler_args, make_varlen_args
    from sonic_ep.kernels.experts.sm90.wgrad import _PLAIN

    starts, counter = torch.arange(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    slots = [Operand(0, 0, (4,), (1,), torch.int32), Operand(1, 0, (2,), (1,), torch.int32)]
    options = make_scheduler_args(131, 8, counter), _PLAIN, make_varlen_args(starts, None, counter), None
    late = (
        options[0]._replace(tile_count_semaphore=Address(1, 0)),
        _PLAIN,
        make_varlen_args(slots[0], None, slots[1]),
        None,
    )
    made = Arguments(late, lambda size: size, lambda index, _: index, (1, 0))
    for place, number in made.patches:
        made.memory[place // 8] = (starts, counter)[cast(int, number)].data_ptr()
    python, ours = seen_by(options, made)
    assert python == ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64])
def test_arguments(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 4, 6).to(dtype)
    rows = torch.arange(10, dtype=torch.int32)

    def arguments(tensor: Any, rows: Any, address: Any) -> tuple[Any, ...]:
        options = Pair(rows, Pair(None, (5, -7, True, 2.5, address)))
        return tensor, None, options, 123456789012, Pair(1, tensor)

    guards: dict[str, object] = {}
    sizes = [Size("T", 8, guards)]
    first = 4 * 6 * dtype.itemsize
    addresses = {(0, first): 0, (0, 0): 1, (1, 8): 2}
    tensor = Operand(0, first, (2, 6, 4), (24, 1, 6), dtype)
    made = Arguments(
        arguments(tensor, Operand(1, 8, (sizes[0],), (1,), torch.int32), Address(0, 0)),
        lambda size: 3 + sizes.index(size),
        lambda index, first_byte: addresses[index, first_byte],
        (1, 0),
    )
    numbers = [values.data_ptr() + first, values.data_ptr(), rows.data_ptr() + 8, 8]
    for place, number in made.patches:
        made.memory[place // 8] = numbers[cast(int, number)]
    python, ours = seen_by(arguments(values.mT[1:], rows[2:], values.data_ptr()), made)
    assert python == ours
    assert python[0][0] == "tensor"
