"""The README's example runs as it stands, and stays short."""

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
