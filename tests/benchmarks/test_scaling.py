"""benchmarks/results/scaling.json is what the model says today, and docs/scaling.md shows what is in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import BALANCED, DrawnRoutes, case, link_limit, steps
from sonic_ep import load_config
from sonic_ep.cli.plan import Layout

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())
SHOWN = ("qwen3_30b_a3b", "deepseek_v3", "qwen3_next_80b_a3b", "gpt_oss_120b")


def test_the_record_is_of_today() -> None:
    """Balanced times of all cases, and all of one case with its drawn routes."""
    T = RECORD["tokens"]
    for found in RECORD["cases"]:
        layout = Layout(found["ranks"], 8, RECORD["link_gb_s"])
        assert found["balanced"] == pytest.approx(steps(load_config(found["config"]), T, layout, BALANCED))
    routes = DrawnRoutes(load_config("olmoe"), T * 64, RECORD["skew"], RECORD["seed"])
    again = json.loads(json.dumps(case("olmoe", 16, routes, T)))
    stored = next(each for each in RECORD["cases"] if (each["config"], each["ranks"]) == ("olmoe", 16))
    assert again["load"] == pytest.approx(stored["load"], rel=1e-3)
    assert again["by_gpus"]["4096"] == pytest.approx(stored["by_gpus"]["4096"], rel=1e-3)
    assert again["link_limit"] == pytest.approx(stored["link_limit"], rel=1e-3)


def test_all_shapes_up_to_4096_gpus() -> None:
    assert {found["config"] for found in RECORD["cases"]} == set(scaling.SHAPES)
    assert all("4096" in found["by_gpus"] for found in RECORD["cases"])


def test_the_link_at_which_both_are_as_fast() -> None:
    config = load_config("qwen3_30b_a3b")
    limit = link_limit(config, 8192, Layout(32, 8), BALANCED)
    assert limit is not None
    times = steps(config, 8192, Layout(32, 8, limit), BALANCED)
    assert times["two_hop"] == pytest.approx(times["all_to_all"], rel=1e-3)
    assert link_limit(config, 1, Layout(32, 8), BALANCED) is None  # two short exchanges take longer than one


def rows_of_table(record: dict[str, Any]) -> list[str]:
    """Returns the table of docs/scaling.md."""
    lines = []
    for found in record["cases"]:
        if found["config"] in SHOWN and found["hosts"] > 1:
            even, skewed, limits = found["balanced"], found["by_gpus"]["4096"], found["link_limit"]
            kinds = ("two_hop", "two_hop_overlapped", "all_to_all", "pairs")
            times = [" / ".join(f"{each[kind]:.1f}" for kind in kinds) for each in (even, skewed)]
            shown = f"{limits['balanced']:.0f} / {limits['skewed']:.0f}"
            lines.append(f"| {found['config']} | {found['ranks']} | {times[0]} | {times[1]} | {shown} |")
    return lines


def test_the_table_of_the_docs() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert [line for line in rows_of_table(RECORD) if line not in text] == []
    few = " | ".join(f"{each['two_hop']:.1f} / {each['all_to_all']:.1f}" for each in RECORD["few_tokens"].values())
    assert f"| {few} |" in text
