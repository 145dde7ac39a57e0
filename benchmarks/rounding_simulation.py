"""Simulate how many assignments `apportion` changes, against the prediction that t = "auto" relies on.

    python benchmarks/rounding_simulation.py --out results.json

Counts are Poisson around each expert's popularity, which is Gamma(8) distributed over the experts (mean 1), as measured
loads of trained routers roughly are; rho is tiles of 128 rows per (rank, expert).
"""

import torch

from runs import parser_of, write
from sonic_ep import RoundingConfig
from sonic_ep.routers.rounding import predicted_change, round_counts

E, G, SEEDS = 512, 128, 5


def simulated_change(ep_size: int, t: int, rho: float, seed: int) -> float:
    """Share of assignments that rounding changes in one random step."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = torch.randn(16, E, generator=generator).square().sum(0) / 16  # chi2(16) / 16 = Gamma(8, 8)
    mean_SE = (128 * rho * popularity_E).expand(ep_size, E).contiguous()
    counts_SE = torch.poisson(mean_SE, generator=generator).long()
    tokens_S = torch.full((ep_size,), int(counts_SE.max()) + G)
    rows_SE = round_counts(counts_SE, tokens_S, RoundingConfig(t=t, G=G)).rows_SE
    return float((rows_SE - counts_SE).abs().sum() / counts_SE.sum())


def main() -> None:
    options = parser_of(__doc__, out_required=True).parse_args()
    rows = []
    for ep_size in (1, 2, 4, 8, 16, 64):
        for t in (128, 64, 32, 16):
            for rho in (0.66, 1.08, 2.0, 4.0, 8.0):
                measured = sum(simulated_change(ep_size, t, rho, seed) for seed in range(SEEDS)) / SEEDS
                predicted = predicted_change(rho, t, G, ep_size)
                rows.append({"ep_size": ep_size, "t": t, "rho": rho, "simulated": measured, "predicted": predicted})
                print(f"{ep_size:3} {t:4} {rho:5} {measured:8.4f} {predicted:8.4f} {measured / predicted:6.2f}")
    write({"E": E, "G": G, "seeds": SEEDS, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
