"""Symbols have one meaning: every legend is in the words of the table in docs/design.md."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sonic_ep", "kernels", "dispatch", "routers", "benchmarks", "examples", "tests")
ROW = re.compile(r"^\| `(\w)` \| (.+?) \| (.*?) \|$", re.MULTILINE)
TABLE = {
    symbol: meaning for symbol, meaning, _ in ROW.findall((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
}
LEGEND = re.compile(r"^Legend: (.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)


def entries(legend: str) -> list[str]:
    """Returns what a legend says of each symbol; sentences after the first are notes. Commas in parentheses part
    nothing."""
    first = re.split(r"\.(?:\s|$)", legend, maxsplit=1)[0]
    return re.split(r", (?![^(]*\))", " ".join(first.split()))


def faults(docstring: str) -> list[str]:
    """Returns the entries of a docstring's legend that are not in the table."""
    return [
        entry
        for legend in LEGEND.findall(docstring)
        for entry in entries(legend)
        if TABLE.get(entry[:1]) != entry[2:] or entry[1:2] != " "
    ]


def test_legends_are_in_the_words_of_the_table() -> None:
    assert len(TABLE) > 20
    found = {
        str(path.relative_to(ROOT)): wrong
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (wrong := faults(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""))
    }
    assert found == {}


def test_no_other_line_starts_a_legend() -> None:
    """A legend that the test above does not see would say what it likes."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            text = path.read_text(encoding="utf-8")
            docstring = ast.get_docstring(ast.parse(text)) or ""
            assert text.count("Legend:") == len(LEGEND.findall(docstring)), path


@pytest.mark.parametrize(
    ("legend", "wrong"),
    [
        ("Legend: T tokens on this rank, E experts.", []),
        ("Legend: C chunks (source rank, local expert),\nE experts. Integers are int64.", []),
        ("Legend: T tokens, E experts.", ["T tokens"]),
        ("Legend: X rows.", ["X rows"]),
        ("Legend: see protocol.py.", ["see protocol.py"]),
    ],
)
def test_the_rule_itself(legend: str, wrong: list[str]) -> None:
    assert faults(f"A module.\n\n{legend}\n") == wrong
