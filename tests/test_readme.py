"""The README's first screen has the figures of the records, its example runs as it stands, its sentences stay short."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_usage_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    code = [line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 20
    exec(compile(block, "README.md", "exec"), {})
    assert re.fullmatch(r"changed \d+\.\d%, busiest rank 1\.00x the mean\n", capsys.readouterr().out)


def test_every_link_leads_somewhere() -> None:
    root = README.parent
    for page in (
        README,
        root / "CONTRIBUTING.md",
        *sorted((root / "dev").glob("*.md")),
        *sorted((root / "docs").glob("*.md")),
    ):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            found = page.parent / file if file else page
            assert found.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(found.read_text()), f"{page.name} links to {target}"


def anchors(page: str) -> set[str]:
    """What a link may name after #: the headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_first_screen_says_what_it_is_how_fast_and_how_to_get_it() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    screen = lines[:30]
    assert sum("**" in line for line in screen if line.startswith("|")) == len(STEPS)
    imported = [line.split()[1] for line in screen if line.startswith("    from sonic_ep")]
    of_frameworks = [f"sonic_ep.integrations.{name}" for name in ("megatron", "transformers", "deepspeed")]
    assert imported == [of_frameworks[0], "sonic_ep", *of_frameworks[1:]]  # as the rows; torchtitan needs none
    assert sum("pip install" in line for line in screen) == 3
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert sections[:2] == ["Use it", "Integrations"]


# By page: the record, and the two contestants in it.
STEPS = {
    "megatron.md": ("megatron_step_2_gpus", "MoELayer, TEGroupedMLP", "sonic_ep"),
    "benchmarks.md": ("pretrain_no_reshard_2_gpus", "torch", "nearest"),
    "transformers.md": ("transformers_step_2_gpus", "all_to_all, grouped_mm", "sonic_ep"),
    "torchtitan.md": ("torchtitan_step_2_gpus", "all_to_all, grouped_mm", "sonic_ep"),
    "deepspeed.md": ("deepspeed_step_2_gpus", "AutoEP", "sonic_ep AutoEP"),
}


@pytest.mark.parametrize("page", STEPS)
def test_the_first_table_has_the_figures_of_the_records(page: str) -> None:
    name, *contestants = STEPS[page]
    record = json.loads((README.parent / "benchmarks" / "results" / f"{name}.json").read_text())
    found = record["contestants"] if "contestants" in record else record["cases"]["12"]
    theirs, ours = (found[each]["step"] for each in contestants)
    (line,) = [line for line in README.read_text().splitlines() if line.startswith("|") and f"(docs/{page}#" in line]
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        f"{theirs:.0f} ms",
        f"{ours:.0f} ms",
        f"**{theirs / ours:.1f}x**",
    ]


def test_a_sentence_has_at_most_two_numbers() -> None:
    assert [sentence for sentence in sentences(README.read_text()) if len(numbers_in(sentence)) > 2] == []


def sentences(page: str) -> list[str]:
    """The sentences of a page's paragraphs: without code, tables, headings and the targets of links."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    prose = "\n".join(line for line in page.splitlines() if not line.startswith(("|", "    ", "#", "!")))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    return [found for block in prose.split("\n\n") for found in re.split(r"(?<=[.:;])\s", block.replace("\n", " "))]


def numbers_in(sentence: str) -> list[str]:
    """Numbers that stand alone: not those of a name, as in A3B or Qwen3-30B."""
    return re.findall(r"(?<![\w.,/-])\d+(?:[.,]\d+)*(?![\w-])", sentence)


def test_the_rule_of_numbers_itself() -> None:
    (sentence,) = sentences(
        "It takes 1,024 tokens, `t=5`, of\nQwen3-30B-A3B and the 7B in 2.5 ms on [a page](docs/1.md)"
    )
    assert numbers_in(sentence) == ["1,024", "2.5"]
