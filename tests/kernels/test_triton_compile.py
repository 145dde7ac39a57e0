"""Triton kernels compile for Hopper and Blackwell without a GPU and without spills. One row of KERNELS each."""

from concurrent.futures import Future

import pytest

from tests.helpers.machine_code import faults, needs_compilers
from tests.helpers.triton_compile import TritonKernel, compile_triton, compiling_processes

pytestmark = [needs_compilers, pytest.mark.slow]

KERNELS = [
    TritonKernel(
        "combine.gather_sum.triton",
        "_gather_sum",
        "*bf16 *i32 *i32 *fp32 *bf16 i32",
        {
            "HAS_WEIGHTS": True,
            "BLOCK": 512,
            "UNROLL": 4,
            "ACCUMULATOR": "tl.float32",
            "PDL_WAIT": True,
            "PDL_OVERLAP": False,
        },
        num_warps=1,
    ),
    TritonKernel(
        "combine.gather_sum.triton",
        "_gather_sum",
        "*bf16 *i32 *i32 *bf16 *bf16 i32",
        {
            "HAS_WEIGHTS": False,
            "BLOCK": 512,
            "UNROLL": 8,
            "ACCUMULATOR": "tl.float32",
            "PDL_WAIT": False,
            "PDL_OVERLAP": True,
        },
        num_warps=1,
    ),
    TritonKernel(
        "combine.gather_sum.triton",
        "_gather_sum",
        "*fp64 *i32 *i32 *fp64 *fp64 i32",
        {
            "HAS_WEIGHTS": True,
            "BLOCK": 512,
            "UNROLL": 4,
            "ACCUMULATOR": "tl.float64",
            "PDL_WAIT": False,
            "PDL_OVERLAP": False,
        },
        num_warps=1,
    ),
    *(
        TritonKernel(
            "dispatch.recv_index.triton",
            "_fill",
            f"*i32 i32 i32 *i32 {pair_weights} *i32 *i32 {pair_weights} *i32 *i32 i32 i32",
            {"HAS_STARTS": True, "ZEROED": words > 1, "WORDS": words, "BLOCK": 256, "PDL_WAIT": True},
        )
        for pair_weights, words in (("*fp32", 1), ("*fp32", 16), ("*fp64", 4))
    ),
    *(
        TritonKernel(
            "dispatch.recv_index.triton",
            "_starts",
            "*i32 *i32 i32",
            {"WORDS": words, "PROGRAMS": programs, "BLOCK": 256, "PDL_WAIT": True},
        )
        for words, programs in ((1, 1), (4, 128), (16, 4096))
    ),
    *(
        TritonKernel(
            "dispatch.recv_index.triton",
            "_group",
            "*i32 i32 i32 *i32 *i32 *i32 *i32",
            {"WORDS": words, "BLOCK": 256, "PDL_WAIT": True},
        )
        for words in (1, 4, 16)
    ),
    *(
        TritonKernel(
            "combine.scalars.triton",
            "_values_of_pairs",
            "*fp32 *i32 *i32 *fp32 i32",
            {"Z": parts, "COLUMNS": columns, "BLOCK": block, "ACCUMULATOR": "tl.float32", "PDL_OVERLAP": overlapped},
        )
        for parts, columns, block, overlapped in ((2, 2, 256, True), (75, 128, 32, True), (1, 1, 256, False))
    ),
    *(
        TritonKernel(
            "lora.triton",
            "_add_hidden_grads",
            "*bf16 *fp32 *bf16 *bf16 *fp32 i32",
            {
                "WIDTH": 768,
                "EACH": 1 + gated,
                "CURVE": curve,
                "ALPHA": 1.702 if limit else 1.0,
                "LIMIT": limit,
                "OFFSET": 1.0 if limit else 0.0,
                "BLOCK": 1024,
                "ACCUMULATOR": "tl.float32",
            },
        )
        for curve, gated, limit in (
            ("silu", True, 0.0),
            ("silu", True, 7.0),
            ("gelu", True, 0.0),
            ("gelu_erf", False, 0.0),
            ("relu", False, 0.0),
            ("relu2", False, 0.0),
        )
    ),
    TritonKernel(
        "dispatch.recv_index.triton",
        "_row_starts",
        "*i32 *i32 *i32 i32 i32",
        {"EXPERTS": 512, "SOURCES_BLOCK": 64, "EXPERTS_BLOCK": 32},
    ),
    *(
        TritonKernel(
            "route.rounding.triton",
            "_round_counts",
            "*i64 *i64 *i64 *i64 *i64 *i64 *i64 *i64 i32 i32 i32 i32 i64 i32 i64 i32 i64 i32 i64 i32 i32 i64 i32",
            {"MODE": mode, "BITS": 9, "ONE_RANK": ranks == 1, "RANKS": ranks, "EXPERTS": experts, "BLOCK": 1024},
        )
        for mode, ranks, experts in ((5, 1, 128), (5, 8, 128), (4, 64, 16), (1, 8, 128))
    ),
    TritonKernel(
        "route.rounding.triton",
        "_cap_dst_ranks",
        "*i64 *i64 *i64 *i64 i32 i32 i32 i32 i32",
        {"MODE": 5, "BITS": 32, "EXPERTS": 512},
    ),
    TritonKernel(
        "route.rounding.triton",
        "_cap_sources",
        "*i64 *i64 *i64 *i64 *i64 i32 i32",
        {"BITS": 32, "RANKS": 8, "EXPERTS": 128},
    ),
    *(
        TritonKernel(
            "dispatch.plan.triton",
            "_plan",
            "*i64 *i64 *i32 *i32 *i32 *i32 i32 i32 i32",
            {"TILE": 128, "SOURCES": sources, "EXPERTS": experts},
            num_warps=8,
        )
        for sources, experts in ((1, 512), (8, 64), (64, 64))
    ),
    *(
        TritonKernel(
            "dispatch.plan.triton",
            "_bounded_plan",
            "*i32 *i32 *i32 *i32 *i32 *i32 *i64 i32 i32 i32 i32 i32 i32",
            {"SOURCES": sources, "BLOCK": 1024},
        )
        for sources in (2, 8, 64)
    ),
    *(
        TritonKernel(
            "dispatch.split_sizes.triton",
            "_pack_split_sizes",
            "*i64 *i64 *i64 *i64 *i64 i32 i32 i32 i32 i32",
            {"SOURCES": sources, "EXPERTS": experts, "FIELDS": 8},
        )
        for sources, experts in ((1, 512), (8, 64), (64, 64))
    ),
    *(
        TritonKernel(
            "route.status.triton",
            "_zero_counts_on_error",
            "*i64 *i64 *i64 i32 i32 i32 i32 i32",
            {"RANKS": ranks, "BLOCK": 1024},
        )
        for ranks in (2, 8, 64)
    ),
    *(
        TritonKernel(
            "route.status.triton",
            "_pack_rank_status",
            f"*i64 *i64 *i64 *i64 i32 {status} i64 i32",
            {"HAS_BAD_LOGITS": some, "HAS_SEED": some, "BLOCK": 1024},
        )
        for some in (True, False)
        for status in ("i32", "i64")  # without and with the number of a layer
    ),
    *(
        TritonKernel(
            "dispatch.send_index.triton",
            "_mark",
            "*i32 *i32 *i32 *i32 i32 i32",
            {"DST_RANKS": 8, "COUNTS": counts, "BLOCK": 256},
        )
        for counts in (True, False)
    ),
    TritonKernel(
        "dispatch.send_index.triton", "_look_up", "*i32 *i32 *i32 *i32 i32 i32", {"DST_RANKS": 8, "BLOCK": 256}
    ),
    TritonKernel(
        "dispatch.send_index.triton", "_by_token", "*i32 *i32 *i32 *i32 i32 i32", {"DST_RANKS": 8, "TOKENS": 256}
    ),
    *(
        TritonKernel(
            "dispatch.symmetric.rows",
            "_push_rows",
            f"{rows} *i32 *i32 *i64 *i64 *i64 *i64 i64 i32 i32 i32 i32",
            {"STAGE": 1, "S": ranks, "RANKS": ranks, "TOKENS": 16 // ranks, "COLUMNS": 2048},
            num_warps=16,
            registers=128,
        )
        for rows, ranks in (("*bf16", 2), ("*bf16", 4), ("*bf16", 8), ("*fp32", 4))
    ),
    *(
        TritonKernel(
            "dispatch.symmetric.rows",
            "_combine_push",
            "*bf16 *i32 *i32 *fp32 *i64 *i32 *i64 *i64 *i64 *i64 i64 i32 i32 i32 i32",
            {
                "STAGE": 2,
                "S": 8,
                "RANKS": 8,
                "HAS_WEIGHTS": weighted,
                "BLOCK": 512,
                "BLOCKS": 2,
                "UNROLL": 4,
                "ACCUMULATOR": "tl.float32",
            },
            num_warps=1,
        )
        for weighted in (True, False)
    ),
    TritonKernel(
        "dispatch.symmetric.rows",
        "_combine_reduce",
        "*bf16 *bf16 *i32 *i64 *bf16 i32 i32 i32 i32",
        {"S": 8, "BLOCK": 512, "ACCUMULATOR": "tl.float32"},
        num_warps=1,
    ),
    *(
        TritonKernel(
            "dispatch.symmetric.acquire_release", name, "*i64 *i64 *i64 i64 i32", {"STAGE": 1, "S": 4}, num_warps=1
        )
        for name in ("_acquire_peers", "_release_peers")
    ),
    TritonKernel(
        "dispatch.symmetric.pairs",
        "_push_lists",
        "*i32 *fp32 *i32 *i64 *i64 *i64 *i64 *i64 i64 i32",
        {"STAGE": 0, "S": 8, "RANKS": 8, "BLOCK": 512},
    ),
    TritonKernel(
        "dispatch.symmetric.pairs",
        "_push_scalars",
        "*fp32 *i32 *i32 *i64 *i64 *i64 *i64 i64 i32",
        {
            "STAGE": 3,
            "S": 8,
            "RANKS": 8,
            "Z": 12,
            "COLUMNS": 16,
            "BLOCK": 128,
            "ACCUMULATOR": "tl.float32",
        },
    ),
    *(
        TritonKernel(
            "dispatch.symmetric.all_gather",
            name,
            "*i64 *i64 *i64 *i64 *i64 i64 i32 i32 i32",
            {"STAGE": 4, "S": 8, "NUM_SLOTS": 2, "BLOCK": 512},
        )
        for name in ("_all_gather_start", "_all_gather_wait")
    ),
]


CROWDED = KERNELS[0]._replace(constants=KERNELS[0].constants | {"BLOCK": 8192})
ARCHITECTURES = ["sm_90a", "sm_100a"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Future[bytes], list[str]]]:
    """Cubin and its faults by kernel and architecture."""
    wanted = {"sm_90a": [*KERNELS, CROWDED], "sm_100a": KERNELS}
    with compiling_processes(str(tmp_path_factory.mktemp("cache"))) as executor:
        made = {
            arch: {str(kernel): executor.submit(compile_triton, kernel, arch) for kernel in kernels}
            for arch, kernels in wanted.items()
        }
    results = {}
    for arch, futures in made.items():
        cubins = [b"" if future.exception() else future.result() for future in futures.values()]
        found = faults(cubins, arch, tensor_core=False)
        results |= {
            (name, arch): pair for name, pair in zip(futures, zip(futures.values(), found, strict=True), strict=True)
        }
    return results


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_compiles_without_spills(
    kernel: TritonKernel, arch: str, compiled: dict[tuple[str, str], tuple[Future[bytes], list[str]]]
) -> None:
    cubin, found = compiled[str(kernel), arch]
    assert cubin.result()  # raises what its compiler did
    assert found == []


def test_spills_are_seen(compiled: dict[tuple[str, str], tuple[Future[bytes], list[str]]]) -> None:
    (fault,) = compiled[str(CROWDED), "sm_90a"][1]
    assert fault.endswith("accesses to spilled registers")
