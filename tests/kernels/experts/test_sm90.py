"""Partial tiles, tiles drawn ahead and the epilogue change no bit of what quack's own kernels for Hopper give.

And the counter that tiles are drawn from is left at zero, a stream's own.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import tile_counter
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.tile_table import ReserveFor, TileConfig

pytestmark = pytest.mark.gpu

# Around every number of 64-row blocks that a tile can have, and of tiles that a cluster can have.
COUNTS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 321, 383, 384, 385, 0, 512, 600, 0]
# (d, n) that between them take every tile of the table over rows.
SHAPES = {"dividing": (1536, 768), "not dividing": (2048, 512), "large": (1152, 6272), "narrow": (128, 64)}


def all_results(
    operations: ModuleType, d: int, n: int, *, tile_aligned: bool, reserve_for: ReserveFor | None = None
) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(d + n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    e, P, R = len(COUNTS), sum(COUNTS), 700
    x, w1, w2, h, a, dh = draw(R, d), draw(e, 2 * n, d), draw(e, d, n), draw(P, 2 * n), draw(P, n), draw(P, 2 * n)
    pair_weights = torch.rand(P, device="cuda", generator=generator)
    rows = torch.randint(R, (P,), device="cuda", dtype=torch.int32, generator=generator)
    starts = torch.tensor([0, *COUNTS], device="cuda").cumsum(0).int()
    act = activation_named("swiglu")
    up = operations.up_projection(x, w1, None, rows, starts, act)
    given = (x, w2, None, h, pair_weights, rows, starts, act)
    backward = operations.down_projection_backward(*given, reserve_for=reserve_for)
    return {
        **dict(zip(("H", "A"), up, strict=True)),
        **dict(zip(("dH", "A'", "dS"), backward, strict=True)),
        "Y": operations.down_projection(a, w2, None, starts, tile_aligned=tile_aligned),
        "dX": operations.up_projection_backward(dh, w1, starts, tile_aligned=tile_aligned, reserve_for=reserve_for),
        "dW1": operations.weight_grad(dh, x, rows, starts, reserve_for=reserve_for),
        "dW2": operations.weight_grad(a, x, rows, starts, transposed=True, reserve_for=reserve_for),
    }


@pytest.fixture
def on_hopper() -> ModuleType:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper's kernels are changed")
    rows, w2 = torch.empty(1, 64, device="cuda").bfloat16(), torch.empty(1, 64, 64, device="cuda").bfloat16()
    operations = operations_for(rows, w2, activation_named("swiglu"))
    assert isinstance(operations, ModuleType)
    return operations


def assert_equal_to_quacks(
    operations: ModuleType, d: int, n: int, monkeypatch: pytest.MonkeyPatch, *, tile_aligned: bool = False
) -> None:
    got = all_results(operations, d, n, tile_aligned=tile_aligned)
    with monkeypatch.context() as patch:
        patch.setattr(operations, "hopper_mod", lambda mod: mod)
        wanted = all_results(operations, d, n, tile_aligned=tile_aligned)
    for name, tensor in got.items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("tile_aligned", [False, True], ids=["ragged", "rounded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tables_tiles(
    shape: str, tile_aligned: bool, on_hopper: ModuleType, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal_to_quacks(on_hopper, *SHAPES[shape], monkeypatch, tile_aligned=tile_aligned)


@pytest.mark.parametrize("tile", [TileConfig(128, 128, True, 2), TileConfig(128, 128, False, 2)], ids=str)
def test_clusters_whose_second_tile_may_have_no_rows(
    tile: TileConfig, on_hopper: ModuleType, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_hopper, "tile_config", lambda *_, **__: tile)
    assert_equal_to_quacks(on_hopper, 512, 256, monkeypatch)


@pytest.mark.parametrize("tile_aligned", [False, True], ids=["ragged", "rounded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_leaving_sms_to_an_exchange_changes_no_bit(
    shape: str, tile_aligned: bool, on_hopper: ModuleType, poison: None
) -> None:
    wanted = all_results(on_hopper, *SHAPES[shape], tile_aligned=tile_aligned)
    for _ in range(2):  # the counters of a dynamic schedule are back at zero
        got = all_results(on_hopper, *SHAPES[shape], tile_aligned=tile_aligned, reserve_for="exchange")
        for name, tensor in got.items():
            assert torch.equal(tensor, wanted[name]), name


def test_counters_are_left_at_zero(on_hopper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counter, "_STREAM_COUNTERS", {})
    first, second = (all_results(on_hopper, 1536, 768, tile_aligned=False) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert [counter.tolist() for counter in tile_counter._STREAM_COUNTERS.values()] == [[0, 0]]


def test_starts_may_be_written_by_the_kernel_before(on_hopper: ModuleType) -> None:
    """Launched programmatically, a GEMM begins before that kernel has ended."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(4096, 512, device="cuda", generator=generator).bfloat16()
    w1 = torch.randn(8, 256, 512, device="cuda", generator=generator).bfloat16()
    rows = torch.randint(4096, (4096,), device="cuda", dtype=torch.int32, generator=generator)
    some = torch.tensor([0, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096], device="cuda", dtype=torch.int32)
    others = torch.tensor([0, 0, 3000, 3001, 3001, 3500, 3600, 4000, 4096], device="cuda", dtype=torch.int32)

    def up(starts: Tensor) -> tuple[Tensor, Tensor]:
        return on_hopper.up_projection(x, w1, None, rows, starts, activation_named("swiglu"))

    wanted = [up(some), up(others)]
    starts, large = torch.empty_like(some), torch.zeros(1 << 24, device="cuda")
    results = []
    for turn in range(40):
        torch.cuda.synchronize()
        large.add_(1)  # while this runs, the host launches what follows
        torch.mul((some, others)[turn % 2], 1, out=starts)
        results.append(up(starts))
    for turn, result in enumerate(results):
        assert all(torch.equal(got, value) for got, value in zip(result, wanted[turn % 2], strict=True))


def test_streams_draw_from_counters_of_their_own(on_hopper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counter, "_STREAM_COUNTERS", {})
    wanted = all_results(on_hopper, 1536, 768, tile_aligned=False)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(all_results(on_hopper, 1536, 768, tile_aligned=False))
    torch.cuda.synchronize()
    for result in results:
        for name, tensor in result.items():
            assert torch.equal(tensor, wanted[name]), name
    assert [counter.tolist() for counter in tile_counter._STREAM_COUNTERS.values()] == [[0, 0]] * 4


@pytest.mark.parametrize("taken", [0, tile_counter._PAGE], ids=["of the page", "none left"])
def test_captured_kernels_have_counters_of_their_own(
    on_hopper: ModuleType, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_STREAM_COUNTERS", "_PAGES", "_NUM_USED"):
        monkeypatch.setattr(tile_counter, name, {})
    d, n, num_rows = 256, 128, 600
    x, w1 = torch.randn(500, d, device="cuda").bfloat16(), torch.randn(2, 2 * n, d, device="cuda").bfloat16()
    rows = torch.randint(500, (num_rows,), device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, 200, num_rows], device="cuda", dtype=torch.int32)

    def up_and_weights() -> list[Tensor]:
        h, a = on_hopper.up_projection(x, w1, None, rows, starts, activation_named("swiglu"))
        return [h, a, on_hopper.weight_grad(h, x, rows, starts)]

    wanted = [tensor.clone() for tensor in up_and_weights()]
    device = x.device
    monkeypatch.setitem(tile_counter._NUM_USED, device, taken)
    name = dict(tile_counter._STREAM_COUNTERS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = up_and_weights()
    assert tile_counter._STREAM_COUNTERS == name
    assert tile_counter._NUM_USED[device] == min(taken + 2, tile_counter._PAGE)
    other_stream = torch.cuda.Stream()
    for _ in range(20):
        for tensor in got:
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(other_stream):
            also = up_and_weights()
        graph.replay()
        torch.cuda.synchronize()
        for results in (got, also):
            assert all(torch.equal(tensor, value) for tensor, value in zip(results, wanted, strict=True))
    assert not tile_counter._PAGES[device].any()
