"""The digests of thirty layers' results, ten layers on 1, 2 and 4 ranks: did a change leave every bit as it was?

python tests/results/digest.py                    print them
python tests/results/digest.py --against COMMIT   compare with what that commit computes here; on any machine
python tests/results/digest.py --write            renew digests.json, with which test_results.py compares
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before any installed sonic_ep
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.helpers.launch import RankPool
from tests.results.layers import EP_SIZES, ROOT, digests, probe

STORED = Path(__file__).with_name("digests.json")
# By layer and tensor, those of all ranks in one line.
Results = dict[str, dict[str, str]]


def fingerprint(pool: RankPool) -> dict[str, str]:
    """What the bits depend on beside this repository. pool: of one rank."""
    return {"torch": torch.__version__, "probe": pool.run(probe)[0]}


def results_of(pool: RankPool) -> Results:
    """The results of the ten layers on the ranks of this pool."""
    first, *others = pool.run(digests)
    return {
        f"{case}, ep_size={pool.world_size}": {
            name: " ".join([digest, *(other[case][name] for other in others)]) for name, digest in tensors.items()
        }
        for case, tensors in first.items()
    }


def differences(wanted: Results, got: Results) -> list[str]:
    """A line for each tensor that differs or that only one side has."""
    lines = []
    for layer in wanted | got:
        a, b = wanted.get(layer, {}), got.get(layer, {})
        lines += [f"{layer}: {name}{_where(a.get(name), b.get(name))}" for name in a | b if a.get(name) != b.get(name)]
    return lines


def _where(wanted: str | None, got: str | None) -> str:
    if wanted is None or got is None:
        return " is new" if wanted is None else " is missing"
    ranks = [str(rank) for rank, (a, b) in enumerate(zip(wanted.split(), got.split(), strict=True)) if a != b]
    return f" differs on rank {', '.join(ranks)}"


def computed() -> dict[str, Any]:
    """All that digests.json holds."""
    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(size)) for size in EP_SIZES]
        results = {layer: tensors for pool in pools for layer, tensors in results_of(pool).items()}
        return {**fingerprint(pools[0]), "results": results}


def computed_by(commit: str) -> dict[str, Any]:
    """The same of another commit, by its own copy of this script."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            script = tree / Path(__file__).resolve().relative_to(ROOT)
            if not script.exists():
                sys.exit(f"{commit} has no {script.relative_to(tree)}; name a commit that has it")
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            run = subprocess.run(
                [sys.executable, script], cwd=tree, env=environment, stdout=subprocess.PIPE, check=True
            )
            return json.loads(run.stdout)
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--against", metavar="COMMIT")
    action.add_argument("--write", action="store_true")
    options = parser.parse_args()
    here = computed()
    text = json.dumps(here, indent=1) + "\n"
    if options.write:
        STORED.write_text(text, encoding="utf-8")
    elif options.against is None:
        sys.stdout.write(text)
    else:
        lines = differences(computed_by(options.against)["results"], here["results"])
        raised = f"{len(lines)} tensors differ" if lines else f"all {len(here['results'])} layers agree"
        sys.stdout.write("\n".join([*lines, f"{raised} with {options.against}\n"]))
        return bool(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
