"""The README opens with what it is and how to use it, its example runs as it stands, and its sentences stay short."""

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
    for page in (README, *sorted((root / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_it_is_comes_before_what_was_measured() -> None:
    sections = re.findall(r"^## (.+)$", README.read_text(), flags=re.MULTILINE)
    assert sections[:2] == ["Install", "Use it"]
    assert sections.index("Measurements") > sections.index("Integrations")


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
