"""kernels/common/launch.py: what was compiled is launched with those arguments alone that Triton compiles alike."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
triton, tl = import_module("triton"), import_module("triton.language")
launch: Any = import_module("sonic_ep.kernels.common.launch")

EDGES = [-(1 << 63), -(1 << 31) - 1, -(1 << 31), -16, -1, 0, 1, 2, 15, 16, 17, (1 << 31) - 1, 1 << 31, (1 << 64) - 1]
INTEGERS = st.sampled_from(EDGES) | st.integers(-(1 << 63), (1 << 64) - 1)
TENSORS = st.builds(
    lambda dtype, start, size: torch.zeros(64, dtype=dtype)[start : start + size],
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64]),
    st.integers(0, 32),
    st.integers(0, 32),
)


def compiled_for(argument: object) -> object:
    """What Triton compiles for."""
    backend = import_module("triton.backends.nvidia.compiler").CUDABackend
    return import_module("triton._C.libtriton").native_specialize_impl(backend, argument, False, True, True)


@given(st.lists(INTEGERS | TENSORS | st.booleans() | st.floats() | st.none(), min_size=2, max_size=8))
def test_arguments_of_one_kind_are_compiled_alike(arguments: list[object]) -> None:
    seen: dict[object, object] = {}
    for argument in arguments:
        assert seen.setdefault(launch.specialization_key(argument), compiled_for(argument)) == compiled_for(argument)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"was given \[1\], wanted a tensor or a number"):
        launch.specialization_key([1])


class Recorder:
    """Stands in for a kernel of Triton's and for what it compiles."""

    def __init__(self) -> None:
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "n", "A", "B")]
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: object, **named: object) -> Any:
            self.launches.append(("Triton", grid, arguments, named))
            return Compiled(self.launches, named)

        return run


class Compiled:
    def __init__(self, launches: list[tuple[Any, ...]], named: dict[str, object]) -> None:
        self.launches, self.named = launches, named

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append(("compiled", grid, arguments, self.named))


def test_the_second_launch_of_a_kind_goes_straight_to_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    recorder, x = Recorder(), torch.zeros(8)
    kernel = launch.FastLauncher(recorder)
    options = {"B": 2, "A": 3, "num_warps": 4}
    for n, named in ((5, options), (6, options), (16, options), (7, options | {"A": 4}), (32, options)):
        kernel[2, 3](x, n, **named)
    kernel[5,](x[1:], 5, **options)
    assert [(way, grid, arguments[1:], named["A"]) for way, grid, arguments, named in recorder.launches] == [
        ("Triton", (2, 3), (5,), 3),
        ("compiled", (2, 3, 1, 1), (6, 3, 2), 3),
        ("Triton", (2, 3), (16,), 3),
        ("Triton", (2, 3), (7,), 4),
        ("compiled", (2, 3, 1, 1), (32, 3, 2), 3),
        ("Triton", (5,), (5,), 3),
    ]


@launch.fast_launch
@triton.jit
def scaled(x_ptr, factor, n, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=index < n) * factor, mask=index < n)


def scale(x: Tensor, factor: object) -> Tensor:
    out = torch.empty_like(x)
    scaled[(-(-x.shape[0] // 128),)](x, factor, x.shape[0], out, BLOCK=128, num_warps=4)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_arguments_of_all_kinds_in_turn(dtype: torch.dtype) -> None:
    whole = (torch.arange(1024, device=DEVICE) % 50).to(dtype)
    for _ in range(2):
        for start in (0, 1, 2, 4):
            for size in (1, 16, 17, 512, 1000):
                for factor in (1, 2, 16, 1 << 33):
                    x = whole[start : start + size]
                    assert torch.equal(scale(x, factor), x * factor)
