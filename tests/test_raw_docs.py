"""docs/raw-data.md names every reason and every gate there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from eyrie.chat import Reason
from eyrie.config import GateSettings

# Where a reason is given: to a row, to a ledger, to a record that cannot be read.
GIVEN = re.compile(r"(?:SkipRow|skip|RawError|Left)\(\s*f?\"([a-z_]+(?::(?:[a-z_0-9]+|\{))?)")
RULES = re.compile(r"(?:JsonError\(|kind, message = )\"([a-z_0-9]+)\"")
# Their rules are found where they are broken.
WITH_RULES = {"bad_json:{", "bad_csv:{"}


def reasons(root: Path) -> set[str]:
    """Every reason in the code; one that ends in a name of the source's own has {} for it."""
    found = set(get_args(Reason))
    for path in sorted((root / "scripts").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.update(GIVEN.findall(text))
        found.update(f"bad_json:{rule}" for rule in RULES.findall(text))
    return found - WITH_RULES


def test_every_reason_is_explained(root: Path) -> None:
    text = (root / "docs" / "raw-data.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `([a-z_]+(?::\w+)?)` \|", text, re.M))
    found = reasons(root)
    assert len(found) > 30
    unexplained = {
        reason
        for reason in found
        if reason not in explained and f"{reason.split(':')[0]}:NAME" not in explained
    }
    assert unexplained == set()


def test_every_gate_is_explained(root: Path) -> None:
    text = (root / "docs" / "raw-data.md").read_text(encoding="utf-8")
    for name, field in GateSettings.model_fields.items():
        if name != "on_fail":
            row = re.search(rf"^\| `{name}` \| ([0-9.]+) \|", text, re.M)
            assert row is not None, name
            assert float(row[1]) == field.default
