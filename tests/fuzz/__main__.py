"""The hostile suite: random configurations against an oracle, misuse, faults, and hostile folders, for a given time.

    python -m tests.fuzz --seconds 600 --ranks 1 2 4
    python -m tests.fuzz --only misuse --ranks 2 --seed 7 --case 12      one case again

The exit status is 1 if anything was found.
"""

import argparse
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tests.fuzz import configurations, faults, folders, misuse
from tests.helpers.launch import RankError, RankPool, RankTimeoutError

Check = Callable[[RankPool, int, int], None]
CHECKS: dict[str, Check] = {
    "configurations": configurations.check,
    "misuse": misuse.check,
    "faults": faults.check,
    "folders": folders.check,
}
# How many cases of each kind a turn has, so that the time is shared.
TURN = {"configurations": 20, "misuse": 10, "faults": 1, "folders": 2}
# At most so many failures are shown; then the run ends.
MOST_SHOWN, PROGRESS = 10, 10.0


def outcome(check: Check, pool: RankPool, seed: int, number: int) -> tuple[str, str] | None:
    """The kind of failure and what it was, or None."""
    try:
        check(pool, seed, number)
    except RankTimeoutError as error:
        return "hangs", _described(error)
    except (RankError, faults.AbortError) as error:
        died = isinstance(error, faults.AbortError) or "the process died" in str(error)
        return "aborts" if died else "differences", _described(error)
    except AssertionError as error:
        return "differences", _described(error)
    return None


def _described(error: Exception) -> str:
    return "\n".join([*getattr(error, "__notes__", ()), str(error)])


def _cases(kinds: list[str], ranks: list[int], case: int | None) -> Iterator[tuple[str, int, int]]:
    """Kind, number of ranks and number of each case."""
    if case is not None:
        yield from ((kind, size, case) for kind in kinds for size in ranks)
        return
    for turn in itertools.count():
        for size, kind in itertools.product(ranks, kinds):
            yield from ((kind, size, turn * TURN[kind] + i) for i in range(TURN[kind]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, help="default: drawn, and shown")
    parser.add_argument("--only", choices=[*CHECKS])
    parser.add_argument("--case", type=int, help="run this case of --only alone")
    options = parser.parse_args()
    if options.case is not None and (options.only is None or options.seed is None):
        parser.error("--case needs --only and --seed")
    return options


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Runs what the command line says. Returns the exit status."""
    options = _options()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    _say(f"seed {seed}, ranks {options.ranks}, {options.seconds:g} s")
    warnings.simplefilter("ignore")
    kinds, done, failures = [options.only] if options.only else [*CHECKS], Counter[str](), Counter[str]()
    start = shown = time.monotonic()
    with ExitStack() as stack:
        pools = {size: stack.enter_context(RankPool(size)) for size in options.ranks}
        for kind, size, number in _cases(kinds, options.ranks, options.case):
            now = time.monotonic()
            if options.case is None and (now - start > options.seconds or failures.total() >= MOST_SHOWN):
                break
            if now - shown > PROGRESS:
                shown = now
                _say(f"{now - start:5.0f} s: {dict(done)}, failures {dict(failures)}")
            done[kind] += 1
            if failure := outcome(CHECKS[kind], pools[size], seed, number):
                failures[failure[0]] += 1
                again = f"--only {kind} --ranks {size} --seed {seed} --case {number}"
                _say(f'--- {failure[0]}: make fuzz ARGS="{again}"\n{failure[1]}')
    counts = ", ".join(f"{done[kind]} {kind}" for kind in CHECKS)
    _say(f"{counts}: {', '.join(f'{failures[how]} {how}' for how in ('differences', 'hangs', 'aborts'))}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
