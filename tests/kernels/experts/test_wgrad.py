"""Weight gradients whose loader reads indices and draws tiles ahead are those of quack's own kernel, bit for bit."""

import pytest
import torch

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
