"""The catalogue's mask cases: a conversation, a target's template, and the tokens and mask to come out.

A case's file holds `about` (what goes wrong with it elsewhere), `target` (one of tests/chat_targets),
`messages` and where they matter `tools` and `loss_on`; and `expected`: either `rows`, each with its `turn`
and its tokens as `runs` of [mask, texts], or `reason`, why the conversation is refused. Bytes of a token that
are no text by themselves are written as \\xNN.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import chat_targets
from eyrie.chat import ChatError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class MaskCase:
    """One conversation and what is expected of it."""

    name: str
    about: str
    target: str
    given: dict[str, Any]
    expected: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> MaskCase:
        """The case in a file."""
        case = json.loads(path.read_text(encoding="utf-8"))
        given = {name: case[name] for name in ("messages", "tools", "loss_on") if name in case}
        return cls(path.stem, case["about"], case["target"], given, case["expected"])

    def outcome(self) -> dict[str, Any]:
        """What becomes of the conversation, in the terms of `expected`."""
        try:
            rows = chat_targets.chat(self.target).rows(**self.given)
        except ChatError as error:
            return {"reason": error.reason}
        return {"rows": [{"turn": row.turn, "runs": self._runs(row.ids, row.loss_mask)} for row in rows]}

    def problems(self, outcome: dict[str, Any]) -> list[str]:
        """Where an outcome is not what is expected."""
        if outcome == self.expected:
            return []
        return [f"expected {json.dumps(self.expected)}, saw {json.dumps(outcome)}"]

    def _runs(self, ids: list[int], mask: list[int]) -> list[Any]:
        texts = [chat_targets.token_text(self.target, number) for number in ids]
        pairs = groupby(zip(mask, texts, strict=True), key=lambda pair: pair[0])
        return [[value, [text for _, text in run]] for value, run in pairs]


def mask_cases() -> list[MaskCase]:
    """All cases by name."""
    return [MaskCase.load(path) for path in sorted(HERE.glob("*.json"))]
