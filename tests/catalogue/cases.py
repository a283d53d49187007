"""The catalogue's cases: a folder each with an input file and case.json, which says what must become of it.

case.json holds `about` (what goes wrong with such files elsewhere), `settings` (how the file is read: keys of
a dataset's configuration, and `format`), and `expected`: either `kept` (the messages, or ids and mask, of
each row that is kept), `skipped` (reasons and counts) and `places` (of the skipped rows), or `refused`, words
that the refusal must hold.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError, DatasetSettings
from eyrie.errors import BuildError
from eyrie.prompts import Prompts
from eyrie.records import sha256_file, write_json

RAW = Path(__file__).parent / "raw"


@dataclass(frozen=True)
class Case:
    """One input and what is expected of it."""

    name: str
    about: str
    files: list[Path]
    settings: dict[str, Any]
    expected: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Case:
        """The case in a folder."""
        described = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        files = sorted(path for path in folder.iterdir() if path.name != "case.json")
        return cls(folder.name, described["about"], files, described["settings"], described["expected"])

    def outcome(self) -> dict[str, Any]:
        """What becomes of the input, in the terms of `expected`; a refusal is its whole text."""
        with tempfile.TemporaryDirectory() as name:
            try:
                return self._built(Path(name))
            except BuildError as error:
                return {"refused": str(error)}

    def _built(self, folder: Path) -> dict[str, Any]:
        settings = self._dataset()
        files = [
            {"name": str(file), "bytes": file.stat().st_size, "sha256": sha256_file(file)}
            for file in self.files
        ]
        write_json(folder / "source.json", {"files": files})
        rows, ledger, rejects = (folder / name for name in ("rows.jsonl", "ledger.json", "rejects.jsonl"))
        Prompts("case", settings, folder / "source.json").write(rows, ledger, rejects)
        kept = [_essence(row) for row in _lines(rows)]
        counts = json.loads(ledger.read_text(encoding="utf-8"))
        if counts["in"] != counts["kept"] + sum(counts["skipped"].values()) or counts["kept"] != len(kept):
            raise ConfigError(f"the ledger does not add up: {counts}")
        places = [f"{reject['position']} {reject['reason']}" for reject in _lines(rejects)]
        return {"kept": sorted(kept, key=json.dumps), "skipped": counts["skipped"], "places": sorted(places)}

    def _dataset(self) -> DatasetSettings:
        file_format = self.settings["format"]
        source = {"files": [str(file) for file in self.files], "format": file_format}
        others = {name: value for name, value in self.settings.items() if name != "format"}
        native = {"native_model": "someone/model"} if others.get("kind") == "native" else {}
        return DatasetSettings.model_validate(
            {"source": source, "licence": "Apache-2.0", "kind": "prompts", **native, **others}
        )

    def problems(self, outcome: dict[str, Any]) -> list[str]:
        """Where an outcome is not what is expected."""
        if ("refused" in self.expected) != ("refused" in outcome):
            return [f"expected {json.dumps(self.expected)}, saw {json.dumps(outcome)}"]
        if "refused" in outcome:
            seen = outcome["refused"]
            return [
                f"expected {words!r} in: {seen}" for words in self.expected["refused"] if words not in seen
            ]
        wanted = {
            "kept": sorted(self.expected.get("kept", []), key=json.dumps),
            "skipped": self.expected.get("skipped", {}),
            "places": sorted(self.expected.get("places", outcome["places"])),
        }
        return [
            f"{name}: expected {json.dumps(wanted[name])}, saw {json.dumps(outcome[name])}"
            for name in wanted
            if wanted[name] != outcome[name]
        ]


def cases() -> list[Case]:
    """All cases by name."""
    return [Case.load(path.parent) for path in sorted(RAW.glob("*/case.json"))]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _essence(row: dict[str, Any]) -> Any:
    """The messages alone or, where there is more, all but what every row has."""
    rest = {name: value for name, value in row.items() if name not in ("id", "dataset", "group")}
    return rest["messages"] if set(rest) == {"messages"} else rest
