"""docs/megatron.md prints the table of fields.py."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from sonic_ep.integrations.megatron.fields import table

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "megatron.md"


def test_the_guide_has_the_table_of_fields() -> None:
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    printed = [line for line in lines if line.startswith("|")]
    start = printed.index(table()[0])
    assert printed[start:] == table(), "\n" + "\n".join(table())
