"""Model the layers of configs/ on up to 4,096 GPUs: time of a step by transport, and where two_hop is the faster one.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json
    python benchmarks/scaling_plot.py benchmarks/results/scaling.json --out docs/scaling.png

Nothing here is measured: times are by `sonic-ep plan --hosts`, of the device, without save_dispatched. EP groups
of 8, 16, ... ranks, up to the experts there are; the other GPUs are more such groups, which wait for the slowest GPU of
all. `two_hop_overlapped` is two_hop if its hops overlapped perfectly, which they do not yet: of each pair of hops the
slower one counts.

    cases         by shape and EP group: by_gpus has milliseconds a step on so many GPUs, of a skewed routing;
                  balanced the same of balanced routing on GPUs that are all alike
    link_limit    GB/s of a link up to which two_hop is faster than all_to_all
    few_tokens    one shape, balanced, by tokens of a rank
    ranks_a_host  one shape, balanced, by GPUs of a host

Legend: S ranks of the EP group, T tokens on this rank.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from sonic_ep import MoEConfig, load_config
from sonic_ep.cli.expected_rows import rows_per_token
from sonic_ep.cli.load import BALANCED, DrawnRoutes, Load, slowest_gpu
from sonic_ep.cli.plan import Layout, sent_bytes
from sonic_ep.cli.plan_hosts import Cluster, transports_on
from sonic_ep.cli.time_constants import CONSTANTS
from sonic_ep.cli.time_model import ITEM_BYTES, stages

ROOT = Path(__file__).resolve().parents[1]
SHAPES = sorted(path.stem for path in (ROOT / "configs").glob("*.toml") if path.stem != "tiny")
MAX_GPUS, LINK, SKEW, SEED = 4096, 45.0, 0.35, 0
EXAMPLE, EXAMPLE_RANKS = "qwen3_30b_a3b", 32
LINKS = (1.0, 10_000.0)  # between which a limit is looked for


def steps(config: MoEConfig, T: int, layout: Layout, load: Load) -> dict[str, float]:
    """Returns the milliseconds of a step, by transport."""
    kinds = transports_on(layout)
    times = {str(kind): stages(config, T, layout, kind, load=load).step_ms for kind in kinds}
    if "two_hop" in kinds:
        at_once = stages(config, T, layout, "two_hop", load=load, overlap="experts and hops")
        times["two_hop_overlapped"] = at_once.step_ms
    return times


def link_limit(config: MoEConfig, T: int, layout: Layout, load: Load) -> float | None:
    """Returns the GB/s up to which two_hop is the faster one, within LINKS, or None. The gain falls with the rate."""

    def wins(link: float) -> bool:
        times = steps(config, T, Layout(layout.S, layout.D, link), load)
        return times["two_hop"] < times["all_to_all"]

    low, high = LINKS
    if wins(high) or not wins(low):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low


def groups(config: MoEConfig) -> list[int]:
    """Returns the sizes of EP groups: 8, 16, ... ranks, as long as they divide the experts."""
    return [S for S in (2**power for power in range(3, 13)) if config.E % S == 0]


def case(name: str, S: int, routes: DrawnRoutes, T: int) -> dict[str, Any]:
    config, layout = load_config(name), Cluster(max(1, S // 8), 8, S, LINK).layout
    load = routes.load(S, layout.D)
    gpus = [2**power for power in range(3, 13) if 2**power >= S]
    deviation = CONSTANTS["GPU"].values[0]
    found: dict[str, Any] = {"config": name, "ranks": S, "hosts": layout.num_hosts, "load": load._asdict()}
    found["rows_per_token"] = rows_per_token(config, S, layout.D)._asdict()
    found["balanced"] = steps(config, T, layout, BALANCED)
    found["by_gpus"] = {
        count: steps(config, T, layout, load._replace(gpu=slowest_gpu(count, deviation, SEED))) for count in gpus
    }
    found["mib_to_other_hosts"] = {
        kind: sum(remote for _, remote in sent_bytes(config, T, layout, kind, ITEM_BYTES).values()) / 2**20
        for kind in transports_on(layout)
    }
    if layout.num_hosts > 1:
        found["link_limit"] = {
            "balanced": link_limit(config, T, layout, BALANCED),
            "skewed": link_limit(config, T, layout, load),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    T, cases = options.tokens, []
    for name in SHAPES:
        config = load_config(name)
        routes = DrawnRoutes(config, T * groups(config)[-1], SKEW, SEED)
        for S in groups(config):
            found = case(name, S, routes, T)
            cases.append(found)
            shown = {kind: round(ms, 2) for kind, ms in found["by_gpus"][MAX_GPUS].items()}
            print(f"{name:20} {S:4} ranks", shown, found.get("link_limit", ""), flush=True)
    example = load_config(EXAMPLE)
    record = {
        "command": f"benchmarks/scaling.py --tokens {T}",
        "modelled": True,
        "tokens": T,
        "gpus_per_host": 8,
        "link_gb_s": LINK,
        "skew": SKEW,
        "seed": SEED,
        "cases": cases,
        "few_tokens": {
            tokens: steps(example, tokens, Layout(EXAMPLE_RANKS, 8, LINK), BALANCED)
            for tokens in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
        },
        "ranks_a_host": {D: steps(example, T, Layout(EXAMPLE_RANKS, D, LINK), BALANCED) for D in (1, 2, 4, 8)},
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
