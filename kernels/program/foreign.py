"""Arguments of a function of tvm-ffi, written to memory once. A program then changes only addresses and sizes in it.

The GEMMs of quack are such functions. They take an array of `Any` (a type and 8 bytes); a tensor is a pointer to a
DLTensor, and a tuple a pointer to an array object. All are plain C structs (tvm/ffi/c_api.h and dlpack.h of
apache-tvm-ffi), and these functions only read them. So no object of tvm-ffi is made, and none is counted.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch

from sonic_ep.kernels.program.sizes import Number, Size

_NONE, _INT, _BOOL, _FLOAT, _TENSOR, _ARRAY = 0, 1, 2, 3, 7, 71  # TVMFFITypeIndex
_ANY, _TENSOR_HEAD = struct.Struct("iiQ"), struct.Struct("QiiiBBHQQQ")  # DLTensor
_ARRAY_HEAD = struct.Struct("QiiQQqqQ")  # TVMFFIObject and TVMFFISeqCell
_CODES = {torch.int8: 0, torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.float16: 2, torch.float32: 2}
_CODES |= {torch.bfloat16: 4, torch.bool: 6}


# The number of a value of a program. Until all are known, an address is its tensor and the text of an offset.
Value = int | tuple[int, str]


class Operand(NamedTuple):
    """A tensor of a trace. buffer: its number."""

    buffer: int | None
    first_byte: Number
    shape: tuple[Number, ...]
    strides: tuple[Number, ...]
    dtype: torch.dtype


class Address(NamedTuple):
    """The address of a tensor, as a number. buffer: see `Operand`."""

    buffer: int | None
    first_byte: Number


@final
class Arguments:
    """memory: keeps them. patches: pairs of a byte of it, and the number of the value that belongs there."""

    def __init__(
        self,
        arguments: Sequence[object],
        number_of: Callable[[Number], int],
        address_of: Callable[[int | None, Number], Value],
        device: tuple[int, int],
    ) -> None:
        """number_of, address_of: return the numbers of values. device: type of DLPack, and index."""
        self._number_of, self._address_of, self._device = number_of, address_of, device
        self._bytes, self._pointers = bytearray(), list[tuple[int, int]]()
        self.patches: list[tuple[int, Value]] = []
        self._many(arguments)
        self.memory = (ctypes.c_uint64 * (len(self._bytes) // 8)).from_buffer_copy(self._bytes)
        start = ctypes.addressof(self.memory)
        for place, target in self._pointers:
            self.memory[place // 8] = start + target

    def _reserve(self, size: int) -> int:
        place = len(self._bytes)
        self._bytes += bytes(-(-size // 8) * 8)
        return place

    def _many(self, arguments: Sequence[object]) -> int:
        """Writes an array of Any. Returns where it starts."""
        place = self._reserve(_ANY.size * len(arguments))
        for number, each in enumerate(arguments):
            self._any(place + _ANY.size * number, each)
        return place

    def _any(self, place: int, argument: object) -> None:
        if isinstance(argument, Operand):
            self._point(place, _TENSOR, self._tensor(argument))
        elif isinstance(argument, Address):
            _ANY.pack_into(self._bytes, place, _INT, 0, 0)
            self.patches.append((place + 8, self._address_of(*argument)))
        elif type(argument) is Size:
            _ANY.pack_into(self._bytes, place, _INT, 0, 0)
            self.patches.append((place + 8, self._number_of(argument)))
        elif isinstance(argument, tuple | list):
            self._point(place, _ARRAY, self._array(argument))
        elif argument is None:
            _ANY.pack_into(self._bytes, place, _NONE, 0, 0)
        elif isinstance(argument, float):
            _ANY.pack_into(self._bytes, place, _FLOAT, 0, *struct.unpack("Q", struct.pack("d", argument)))
        else:
            kind = _BOOL if isinstance(argument, bool) else _INT
            _ANY.pack_into(self._bytes, place, kind, 0, int(getattr(argument, "value", argument)) % 2**64)

    def _point(self, place: int, kind: int, target: int) -> None:
        _ANY.pack_into(self._bytes, place, kind, 0, 0)
        self._pointers.append((place + 8, target))

    def _array(self, items: Sequence[object]) -> int:
        place = self._reserve(_ARRAY_HEAD.size)
        _ARRAY_HEAD.pack_into(self._bytes, place, 1, _ARRAY, 0, 0, 0, len(items), len(items), 0)
        self._pointers.append((place + 24, self._many(items)))
        return place

    def _tensor(self, operand: Operand) -> int:
        place, dims = self._reserve(_TENSOR_HEAD.size), len(operand.shape)
        sizes = self._reserve(8 * 2 * dims)
        code, bits = _CODES[operand.dtype], 8 * operand.dtype.itemsize
        _TENSOR_HEAD.pack_into(self._bytes, place, 0, *self._device, dims, code, bits, 1, 0, 0, 0)
        self.patches.append((place, self._address_of(operand.buffer, operand.first_byte)))
        self._pointers += [(place + 24, sizes), (place + 32, sizes + 8 * dims)]
        for number, size in enumerate((*operand.shape, *operand.strides)):
            if type(size) is Size:
                self.patches.append((sizes + 8 * number, self._number_of(size)))
            else:
                struct.pack_into("q", self._bytes, sizes + 8 * number, size)
        return place
