"""Training steps of Megatron-Core with Qwen3-30B-A3B's layers: its MoE layer and ours, in turns of one run.

    torchrun --nproc-per-node 2 benchmarks/megatron_step.py --layers 6 --out megatron_step_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/megatron_step.py --device cpu --shape tiny --layers 2 --tokens 64 --length 32

A GPT with EP over all ranks, Megatron's DDP with distributed optimizer, overlapped gradient reduction and parameter
gather, bf16, flash attention, fp32 router, and the same weights for all. Where Transformer Engine is installed, all but
the MoE layers is its kernels for every contestant, and stock routers and permutation are fused (megatron_model.py).
Contestants:

    MoELayer, TEGroupedMLP     stock: all-to-all, Transformer Engine's grouped GEMMs; needs Transformer Engine
    MoELayer, SequentialMLP    stock: the experts of Megatron-Core that train without it, one after the other
    sonic_ep                   ours
    sonic_ep, apportion        ours, with token rounding
    sonic_ep, graphs           ours, with Megatron's CUDA graphs of router and preprocessing; its rounds come last

A round builds one model after the other, each in the memory of the last, and its contestants take their turns of
--seconds. A turn begins once its contestant traces no more programs. Medians over --rounds, and the largest of
all ranks, in milliseconds unless said otherwise:

    step, host            forward and backward of --micro-batches, and optimizer, back to back; its calls until they
                          return
    tokens_per_second     of one GPU
    mfu                   pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib              the most that torch allocated in a turn of steps
    layer, layer_host     forward and backward of the first MoE layer, back to back, as in a microbatch that is not the
                          last: gradients of weights go to main_grad; its calls until they return
    layer_tflops          18 T K d n / layer, in TFLOP/s of a rank: what tokens need, without the router
    layer_device          the same, launched while the device is busy: forward and backward, each from when all devices
                          are free until this one is done. The stock dispatcher is given its row counts, for which it
                          would wait
    saved_mib             what one MoE layer holds between forward and backward, without input and output
    traced_in_turn        programs that are new in the steps that count; a turn with one is repeated, at most twice
    first_loss            of the first rank before any step: contestants without rounding agree but for bf16

With graphs the layer is not called alone. A contestant that fails is in `errors`, and the
others go on.
"""

import argparse
import logging
import warnings
from functools import partial

import torch.distributed as dist

from megatron_model import FAMILIES, GRAPHED, TE_GROUPED, Model, has_te, megatron
from pretrain_model import DENSE
from runs import group_of_ranks
from sonic_ep import load_config
from step_race import Race, parsed_options, step_parser

SIZES = ("micro_batches", "attention")
PACKAGES = ("megatron-core", "transformer-engine", "flash-attn")


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="qwen3_30b_a3b", shapes=DENSE, tokens=8192, seconds=1.5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=1, help="of --tokens each, before the optimizer's step")
    parser.add_argument("--attention", choices=("te", "torch"), default="te", help="te: where it is installed")
    return parsed_options(parser)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")
    logging.basicConfig()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    group_of_ranks(options.device)
    build = partial(Model, options=options)
    with megatron(options):
        race = Race(
            [family for family in FAMILIES if GRAPHED not in family],
            build,
            options,
            moe=load_config(options.shape),
            dense=DENSE[options.shape],
            sizes=SIZES,
            packages=PACKAGES,
            forwards=options.micro_batches,
        )
        if not has_te():
            race.errors[TE_GROUPED] = "Transformer Engine is not installed, or there is no GPU"
        race.run()
        if has_te():  # which Megatron's graphs need. They come last: a capture that fails may end the process
            race.families = [(GRAPHED,)]
            race.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
