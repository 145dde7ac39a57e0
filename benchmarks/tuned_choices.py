"""The choices that sonic-moe's tuning has found, in one file, so that a later race need not find it again.

    python benchmarks/tuned_choices.py FILE      writes what lies in the caches, also of a run that was cut short

quack and Triton keep the times of all candidates by problem, versions and GPU, each in files of its cache folder. Those
files are what is kept here. Kernels are not: what was chosen compiles in a minute, the candidates do not.
"""

import json
import os
import sys
from pathlib import Path

NAMES = "*.autotune.json"


def _folders() -> dict[str, Path]:
    """As Triton and quack 0.6.5 choose them."""
    home = Path.home()
    return {
        "quack": Path(os.environ.get("QUACK_CACHE_DIR") or home / ".quack" / "cache"),
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
    }


def save_choices(file: Path) -> None:
    """Write what was found to the file."""
    found = {
        f"{name}/{path.relative_to(folder)}": json.loads(path.read_text())
        for name, folder in _folders().items()
        for path in sorted(folder.rglob(NAMES))
    }
    lines = [f"{json.dumps(place)}: {json.dumps(timings)}" for place, timings in found.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def restore(file: Path) -> None:
    """Put what the file holds where tuning looks first; before sonic-moe is imported. Triton's is kept from then on."""
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    if not file.exists():
        return
    for place, timings in json.loads(file.read_text()).items():
        name, _, path = place.partition("/")
        target = _folders()[name] / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(timings))


if __name__ == "__main__":
    save_choices(Path(sys.argv[1]))
