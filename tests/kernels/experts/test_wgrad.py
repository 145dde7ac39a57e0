"""Weight gradients whose loader reads indices and draws tiles ahead are those of quack's own kernel, bit for bit."""

import pytest
import torch

from sonic_ep.kernels.experts import reference

pytestmark = pytest.mark.gpu

# Rows of experts around every number of 64-row K tiles that the loader's turns treat unlike: none, one, two, odd, even.
COUNTS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 384, 385, 0, 600, 1000]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only Hopper's kernel is changed")


@pytest.mark.parametrize("free", [0, 9])
@pytest.mark.parametrize("accumulate", [False, True], ids=["new", "accumulated"])
@pytest.mark.parametrize(("M", "N"), [(1536, 512), (2048, 768), (200, 136), (64, 192), (320, 6152)])
def test_the_bits_are_those_of_quack(M: int, N: int, accumulate: bool, free: int, poison: None) -> None:
    quack = pytest.importorskip("quack.gemm")
    from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
    from sonic_ep.kernels.experts.tile_counter import tile_counter
    from sonic_ep.kernels.experts.tile_table import tile_config

    generator = torch.Generator(device="cuda").manual_seed(M + N)
    P, R = sum(COUNTS), 700
    gathered = torch.randn(R, M, device="cuda", generator=generator).bfloat16()
    others = torch.randn(P, N, device="cuda", generator=generator).bfloat16()
    rows = torch.randint(R, (P,), device="cuda", dtype=torch.int32, generator=generator)
    starts = torch.tensor([0, *COUNTS], device="cuda").cumsum(0).int()
    before = torch.randn(len(COUNTS), M, N, device="cuda", generator=generator)
    got = before.clone() if accumulate else torch.empty_like(before)
    tile = tile_config("weight_down", N, M, 9)
    counter = tile_counter(gathered)
    gemm = WeightGemm(gathered.T, got, tile, accumulate=accumulate)
    gemm.run(gathered.T, others.T, got, rows, starts, counter, free)
    wanted = before.clone() if accumulate else torch.empty_like(before)
    sizes = tile.m, tile.n, tile.cluster_m, tile.cluster_n
    quack.gemm(
        *(gathered.T, others.T, wanted, None, None, *sizes),
        pingpong=tile.pingpong,
        add_to_output=accumulate,
        cu_seqlens_k=starts,
        A_idx=rows,
    )
    assert torch.isfinite(got).all()
    assert torch.equal(got, wanted)
    assert counter.tolist() == [0, 0]


def test_an_expert_without_rows_waits_for_the_kernel_before() -> None:
    """Its zeros go to memory that the kernel before still reads, as the caching allocator may arrange it."""
    pytest.importorskip("quack.gemm")
    from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
    from sonic_ep.kernels.experts.tile_counter import tile_counter
    from sonic_ep.kernels.experts.tile_table import tile_config

    experts, P, R, M, N, side = 8, 65536, 700, 256, 128, 1024
    assert P * N == experts * side * side
    gathered, values = (torch.randn(size, device="cuda").bfloat16() for size in ((R, M), (P, N)))
    rows = torch.randint(R, (P,), device="cuda", dtype=torch.int32)
    starts = torch.arange(0, P + 1, P // experts, device="cuda", dtype=torch.int32)
    wide = torch.randn(R, side, device="cuda").bfloat16()
    few = torch.tensor([0] + [64] * experts, device="cuda", dtype=torch.int32)  # the first expert alone has rows
    counter, results = tile_counter(gathered), []
    for _ in range(3):
        others, out = values.clone(), torch.empty(experts, M, N, device="cuda", dtype=torch.bfloat16)
        reused = others.view(experts, side, side)
        first = WeightGemm(gathered.T, out, tile_config("weight_down", N, M, 9))
        second = WeightGemm(wide.T, reused, tile_config("weight_up", side, side, 9))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # both are launched before the first one begins
        first.run(gathered.T, others.T, out, rows, starts, counter)
        second.run(wide.T, wide[:64].T, reused, rows[:64], few, counter)
        results.append(out)
        assert torch.equal(reused[1:], torch.zeros_like(reused[1:]))
    exact = reference.weight_grad(values.double(), gathered.double(), rows, starts, transposed=True)
    for out in results:
        assert torch.equal(out, results[0])
        torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))
