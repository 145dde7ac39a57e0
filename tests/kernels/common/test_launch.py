"""kernels/common/launch.py: a variant is launched with those arguments alone that Triton compiles alike."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
triton, tl = import_module("triton"), import_module("triton.language")
launch: Any = import_module("sonic_ep.kernels.common.launch")


class Recorder:
    """Stands in for a kernel of Triton's: notes its launches, and what was compiled notes its own."""

    def __init__(self) -> None:
        kinds = {"x_ptr": (), "n": ("do_not_specialize",), "wide": ("do_not_specialize", "annotation_type"), "H": ()}
        self.params = [
            SimpleNamespace(
                name=name,
                is_constexpr=name in ("A", "B"),
                do_not_specialize="do_not_specialize" in flags,
                annotation_type="i64" if "annotation_type" in flags else "",
            )
            for name, flags in {**kinds, "A": (), "B": ()}.items()
        ]
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: object, **named: object) -> Any:
            self.launches.append(("Triton", grid, arguments[1:], named["A"]))
            return Compiled(self.launches)

        return run


class Compiled:
    """run: the launcher that Triton compiles. Without a version that is known, what was compiled is called by []."""

    function, packed_metadata = 7, "metadata"
    src = SimpleNamespace(signature={"x": "*fp32", "A": "constexpr"})
    metadata = SimpleNamespace(num_ctas=1, num_warps=4, shared=0)

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches
        self.run = SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
            launch=self.launch,
        )

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        assert function == self.function
        assert given[:8] == (False, True, None, None, "metadata", None, None, None)
        assert type(given[8]) is int  # the address of the tensor
        self.launches.append(("launcher", (x, y, z), given[9:-2], given[-2]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.launches.append(("compiled", grid, given[1:-2], given[-2]))


@pytest.mark.parametrize(("known", "way"), [(True, "launcher"), (False, "compiled")])
def test_what_triton_compiles_for_is_looked_up(known: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_current_device", lambda: 0), ("_stream_of", lambda _: 0), ("_HAS_KNOWN_LAUNCHER", known)):
        monkeypatch.setattr(launch, name, value)
    recorder, x = Recorder(), torch.zeros(64)
    kernel = launch.FastLauncher(recorder)
    options = {"B": 2, "A": 3, "num_warps": 4}
    kernel[2, 3](x, 5, 6, 16, **options)
    kernel[2, 3](x, 6, 1 << 40, 16, **options)  # numbers that change from step to step
    kernel[2,](x, 1, 16, 16, **options)
    kernel[2, 3](x, 5, 6, 32, **options)  # one that does not
    kernel[2, 3](x, 5, 6, 16, **(options | {"A": 4}))
    kernel[2, 3](x.long(), 5, 6, 16, **options)
    kernel[2, 3](x[1:], 5, 6, 16, **options)  # Triton compiles for aligned tensors, and for 32 bits
    kernel[2, 3](x, 1 << 31, 6, 16, **options)
    kernel[2, 3](x, 7, 6, 16, **options)
    assert recorder.launches == [
        ("Triton", (2, 3), (5, 6, 16), 3),
        (way, (2, 3, 1), (6, 1 << 40, 16), 3),
        (way, (2, 1, 1), (1, 16, 16), 3),
        ("Triton", (2, 3), (5, 6, 32), 3),
        ("Triton", (2, 3), (5, 6, 16), 4),
        ("Triton", (2, 3), (5, 6, 16), 3),
        ("Triton", (2, 3), (5, 6, 16), 3),
        ("Triton", (2, 3), (1 << 31, 6, 16), 3),
        (way, (2, 3, 1), (7, 6, 16), 3),
    ]


@launch.fast_launch
@triton.jit(do_not_specialize=["n"])
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
