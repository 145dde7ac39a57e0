"""Does token rounding cost quality? A language model trained with top-K, `nearest` and `apportion` over several ranks.

    python benchmarks/rounding_quality.py --jobs 6 --out results.json --plot plot.png

The ranks are played by one process: each rank's part of the batch is counted, rounded and selected on its own, by the
functions that run on real ranks, and the pairs of all are computed together, which is what a group computes. rho is the
mean number of pairs of a (rank, expert) chunk in tiles of 128, set by the number of experts: E times their width is the
same throughout, hence parameters too, and K = 2. Runs are examples/train.py, each with its own seed of weights and
data; validation is always plain top-K. `jobs` of them share the GPU at a time.
"""

import dataclasses
import itertools
import multiprocessing
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from runs import new_record, parser_of, write

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(EXAMPLES.parent))

import train as example  # noqa: E402
from language_model import LanguageModel, ModelConfig  # noqa: E402
from run_folder import read_metrics  # noqa: E402
from sonic_ep import EPGroup, load_config  # noqa: E402
from sonic_ep.kernels.common.replaced import replaced  # noqa: E402
from sonic_ep.routers import router  # noqa: E402
from sonic_ep.routers.rounding import round_counts  # noqa: E402
from sonic_ep.routers.route import RoutingContext, decide_pairs, select  # noqa: E402
from sonic_ep.routers.topk import TopK  # noqa: E402
from sonic_ep.routing import GroupCounts, RoutedPairs  # noqa: E402

RHOS, MODES, SEEDS = (4.0, 2.0, 1.0, 0.5), ("off", "nearest", "apportion"), (0, 1, 2)
RANKS = 8
D, K, E_TIMES_N, LAYERS, HEAD_DIM, SEQ, BATCH = 256, 2, 8192, 4, 64, 128, 128

CONFIG = """[moe]
d = {d}
n = {n}
E = {E}
K = {K}
init_std = 0.04

[router]
balance = "global"
balance_coef = 0.01
z_loss_coef = 0.001

[rounding]
mode = "apportion"
t = "auto"
G = 128
"""


def experts_for(rho: float) -> int:
    """E such that T K / E of a rank's T tokens is rho tiles of 128."""
    return round(BATCH * SEQ / RANKS * K / (128 * rho))


def config_file(folder: Path, rho: float) -> Path:
    E = experts_for(rho)
    path = folder / f"E{E}.toml"
    path.write_text(CONFIG.format(d=D, n=E_TIMES_N // E, E=E, K=K))
    return path


def parameters(config: Path) -> int:
    moe = load_config(str(config))
    shape = ModelConfig(moe=moe, layers=LAYERS, head_dim=HEAD_DIM, shared_every=0)
    model = LanguageModel(
        shape, seq=SEQ, group=EPGroup.alone(), seed=0, device=torch.device("meta"), dtype=torch.float32
    )
    return sum(parameter.numel() for parameter in model.parameters())


def round_as_ranks(router: object, topk: TopK, context: RoutingContext) -> RoutedPairs:
    """In the place of `decide_pairs`: RANKS ranks with equal parts of the tokens, in training."""
    if not context.training:
        return decide_pairs(router, topk, context)
    (T, E), rounding = topk.scores_TE.shape, context.config.rounding
    parts = [_part(topk, slice(rank * T // RANKS, (rank + 1) * T // RANKS)) for rank in range(RANKS)]
    chosen_SE = torch.stack([part.counts_E() for part in parts])
    tokens_S = chosen_SE.new_full((RANKS,), T // RANKS)
    rounded = round_counts(chosen_SE, tokens_S, rounding)
    counts = GroupCounts(chosen_SE, rounded.rows_SE, rounded.pairs_SE, tokens_S, rounded.cut_S, rounded.t)
    recorded_pairs = [select(part, counts, rank, rounding, training=True) for rank, part in enumerate(parts)]
    token_ids_N = torch.cat([s.token_ids_N + rank * (T // RANKS) for rank, s in enumerate(recorded_pairs)])
    expert_ids_N = torch.cat([s.expert_ids_N for s in recorded_pairs])
    chosen_N = torch.cat([s.chosen_N for s in recorded_pairs])
    real_N = torch.cat([s.token_ids_N >= 0 for s in recorded_pairs])
    order = torch.argsort(torch.where(real_N, expert_ids_N * T + token_ids_N, E * T))[: int(real_N.sum())]
    lists = (token_ids_N[order], expert_ids_N[order], chosen_N[order])
    pairs_1E = rounded.pairs_SE.sum(0, keepdim=True)
    merged = GroupCounts(chosen_SE.sum(0)[None], pairs_1E, pairs_1E, tokens_S.sum()[None], rounded.cut_S[:1], rounded.t)
    return RoutedPairs(topk.topk_ids_TK, *lists, merged, None)


def _part(topk: TopK, tokens: slice) -> TopK:
    fields = ("scores_TE", "ranking_TE", "topk_ids_TK")
    parts: dict[str, Any] = {name: getattr(topk, name)[tokens].contiguous() for name in fields}
    return dataclasses.replace(topk, **parts, plain_counts_E=None, plain_entropy_T=None)


def train(config: Path, mode: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run; validation bits per byte by step, and what rounding did."""
    run_dir = folder / f"{config.stem}-{mode}-{seed}"
    options = {
        "config": config,
        "rounding": mode,
        "seed": seed,
        "steps": steps,
        "layers": LAYERS,
        "head-dim": HEAD_DIM,
        "shared-every": 0,
        "batch": BATCH,
        "seq": SEQ,
        "lr": 2e-3,
        "eval-every": max(1, steps // 8),
        "eval-batches": 8,
        "log-every": 8,
        "run-dir": run_dir,
    }
    with replaced(router, decide_pairs=round_as_ranks):
        example.main([text for name, value in options.items() for text in (f"--{name}", str(value))])
    validation, training = read_metrics(run_dir, "validation"), read_metrics(run_dir, "train")
    print(run_dir.name, f"{validation[-1]['bits_per_byte']:.4f}", flush=True)
    return {
        "validation": {record["step"]: record["bits_per_byte"] for record in validation},
        "last_training": mean(record["bits_per_byte"] for record in training[-4:]),
        "changed_share": mean(record["changed_share"] for record in training),
    }


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for offset, mode in enumerate(MODES):
        points = [[last(runs[key(rho, mode, seed)]) for seed in SEEDS] for rho in RHOS]
        places = [index + 0.12 * (offset - 1) for index in range(len(RHOS))]
        label = "top-K" if mode == "off" else mode
        for place, values in zip(places, points, strict=True):
            axes.plot([place] * len(values), values, "o", color=f"C{offset}", alpha=0.5)
        axes.plot(places, [mean(values) for values in points], "_", markersize=18, color=f"C{offset}", label=label)
    axes.set_xticks(range(len(RHOS)), [f"{rho:g}" for rho in RHOS])
    axes.set(xlabel="rho, mean tiles of 128 pairs of a (rank, expert) chunk", ylabel="validation, bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)


def key(rho: float, mode: str, seed: int) -> str:
    return f"rho {rho:g}, {mode}, seed {seed}"


def last(run: dict[str, Any]) -> float:
    return list(run["validation"].values())[-1]


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    configs = {rho: config_file(folder, rho) for rho in RHOS}
    cases = list(itertools.product(RHOS, MODES, SEEDS))
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        calls = [(configs[rho], mode, seed, options.steps, folder) for rho, mode, seed in cases]
        done = pool.starmap(train, calls, chunksize=1)
    runs = {key(*case): run for case, run in zip(cases, done, strict=True)}
    table = {}
    for rho, mode in itertools.product(RHOS, MODES):
        values = [last(runs[key(rho, mode, seed)]) for seed in SEEDS]
        differences = [last(runs[key(rho, mode, seed)]) - last(runs[key(rho, "off", seed)]) for seed in SEEDS]
        table[f"rho {rho:g}, {mode}"] = {
            "validation_mean": mean(values),
            "validation_stdev": stdev(values),
            "less_top_k_by_seed": differences,
            "changed_share": mean(runs[key(rho, mode, seed)]["changed_share"] for seed in SEEDS),
        }
    record = new_record(
        "cuda" if torch.cuda.is_available() else "cpu",
        ranks_played=RANKS,
        parameters=parameters(configs[RHOS[0]]),
        tokens_per_run=options.steps * BATCH * SEQ,
        experts={f"{rho:g}": experts_for(rho) for rho in RHOS},
        table=table,
        runs=runs,
    )
    write(record, options.out)
    plot(runs, options.plot)
    for name, figures in table.items():
        print(name, figures)


if __name__ == "__main__":
    main()
