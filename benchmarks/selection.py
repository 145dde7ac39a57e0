"""Time a router's selection and its lists on one GPU: the Triton kernels against the plain torch they stand for.

    python benchmarks/selection.py --out results.json

Median milliseconds over CUDA events, contestants taking turns, launches queued ahead of the device; scores are softmax
of skewed random logits, counts rounded to the nearest multiple of 128. "half" takes half of each count, as a capacity
may.
"""

from collections.abc import Callable

import torch

from runs import new_record, parser_of, write
from sonic_ep.kernels.route.select import triton as kernels
from sonic_ep.kernels.route.select.reference import pairs_of_mask, pairs_of_topk, select_tokens
from sonic_ep.kernels.route.topk.reference import topk_mask
from timing import medians_ms

# (T, E, K): Qwen3-30B-A3B, Qwen3-Next, the paper's 7B, Mixtral.
SHAPES = [(16384, 128, 8), (16384, 512, 10), (24576, 128, 8), (16384, 8, 2)]


def contestants(T: int, E: int, K: int) -> dict[str, Callable[[], object]]:
    scores_TE = torch.randn(T, E, device="cuda").add(torch.randn(E, device="cuda") / 2).softmax(1)
    ids_TK = scores_TE.topk(K, dim=1).indices
    counts_E = topk_mask(ids_TK, E).sum(0)
    pairs_E = ((counts_E + 64) // 128 * 128).clamp(max=T)
    num_pairs, half_E = int(pairs_E.sum()), counts_E // 2
    num_half = int(half_E.sum())
    return {
        "choice, kernels": lambda: kernels.chosen_pairs(ids_TK, counts_E),
        "choice, torch": lambda: pairs_of_topk(ids_TK),
        "selection, kernels": lambda: kernels.start_selection(scores_TE, ids_TK, None)(pairs_E, num_pairs),
        "half, kernels": lambda: kernels.start_selection(scores_TE, ids_TK, None)(half_E, num_half),
        "selection, torch": lambda: pairs_of_mask(select_tokens(scores_TE, ids_TK, None, pairs_E), num_pairs),
    }


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    record = new_record()
    for T, E, K in SHAPES:
        medians = medians_ms(contestants(T, E, K), options.rounds, backlog=2_000_000, untimed=3)
        record[f"T={T} E={E} K={K}"] = {name: round(ms, 4) for name, ms in medians.items()}
        print(f"T={T} E={E} K={K}", *(f"{name} {ms:.4f} ms" for name, ms in medians.items()), sep="\n  ")
    write(record, options.out)


if __name__ == "__main__":
    main()
