"""Compile all that sonic-moe's tuning will try of its Triton sums, many at a time, into Triton's cache.

    python benchmarks/compile_sums.py --shape sonic_7b qwen3_30b_a3b [--processes 12]

Triton's tuning compiles one candidate after the other, minutes of a race (local_moe.py) in which the GPU waits.
"""

import argparse
from multiprocessing import get_context
from typing import NamedTuple

import torch
from local_moe import TOKENS

from sonic_ep import load_config

SHARES = 4  # of one kernel's candidates


class Share(NamedTuple):
    """Every SHARES-th candidate, from `first` on, of the sums that one call makes."""

    H: int
    T: int
    most: int  # rows of a token
    weighted: bool
    varying: bool  # number of a token's rows
    first: int


def compile_share(share: Share) -> int:
    from sonicmoe.functional import reduction_over_k_gather as sums

    kernel, H = sums.token_gather_sum_kernel, share.H
    configs = sums._prune_triton_autotune_config(kernel.configs, None, H=H, MAX_K=share.most)[share.first :: SHARES]
    for config in configs:
        kernel.fn.warmup(
            torch.bfloat16,
            torch.float32 if share.weighted else None,
            torch.int32,
            torch.int32 if share.varying else None,
            torch.bfloat16,
            T=share.T,
            H=H,
            MAX_K=share.most,
            stride_xM=H,
            stride_xH=1,
            stride_outT=H,
            stride_outH=1,
            w_is_None=not share.weighted,
            is_varlen_K=share.varying,
            grid=(share.T,),
            **config.all_kwargs(),
        )
    return len(configs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TOKENS, nargs="+", required=True)
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    shares = []
    for config, T in ((load_config(shape), TOKENS[shape]) for shape in options.shape):
        for most, varying in ((config.E, True), (config.K, False)):  # routings that are given, and those of a router
            for weighted in (True, False):
                shares += [Share(config.d, T, most, weighted, varying, first) for first in range(SHARES)]
    with get_context("spawn").Pool(options.processes) as pool:
        print(sum(pool.map(compile_share, shares, chunksize=1)), "kernels")


if __name__ == "__main__":
    main()
