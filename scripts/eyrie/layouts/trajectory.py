"""An agent's trajectory of role and text (nebius SWE-agent).

    {"trajectory": [{"role": "system", "system_prompt": "You are ...", "text": null},
                    {"role": "user", "system_prompt": null, "text": "Fix the issue ..."},
                    {"role": "ai", "system_prompt": null, "text": "DISCUSSION ..."}]}

The system turn's words are in `system_prompt`; other texts may be null. `mask` and `target` of such rows are
the source's own flags and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyrie.layouts.base import Conversation, Message, entry, message, turns_column

COLUMNS = ("trajectory",)
OPTIONAL = ()
EXPECTED = "a column `trajectory` with a list of {role, text, system_prompt}"


def read(row: Any, fields: Mapping[str, str]) -> Conversation:
    """The steps as turns."""
    return Conversation(
        [_message(step) for step in turns_column(row, fields.get("trajectory", "trajectory"))]
    )


def _message(step: Mapping[str, Any]) -> Message:
    made = message(entry(step, "role"), entry(step, "text"))
    if made["role"] == "system" and not made["content"].strip():
        made = message("system", step.get("system_prompt"))
    return made
