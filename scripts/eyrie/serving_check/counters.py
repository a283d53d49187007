"""vLLM's counts of its speculation, from the text of `/metrics`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(rf"^{_PREFIX}(?P<name>\w+)_total\{{(?P<labels>[^}}]*)\}} (?P<value>\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
# A reply may leave before its last step is counted.
_SECONDS_BETWEEN_READINGS = 0.3
_READINGS = 20


@dataclass(frozen=True)
class Counters:
    """Drafts (one for each pass of the target over drafted tokens), tokens drafted, tokens accepted.

    by_position: how many drafts had their first, second, ... token accepted, and so all before it.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    by_position: tuple[int, ...]

    def since(self, earlier: Counters) -> Counters:
        """What was counted after an earlier reading."""
        return Counters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in zip(self.by_position, earlier.by_position, strict=True)),
        )

    def acceptance_length(self) -> float | None:
        """Accepted tokens and the target's own by draft; None without a draft."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def rates(self) -> list[float]:
        """The share of drafts that had each position accepted; empty without a draft."""
        return [count / self.drafts for count in self.by_position] if self.drafts else []


def parse_counters(text: str) -> Counters | None:
    """The counts in a page of metrics, over all engines of the server; None where it does not speculate."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in _LINE.finditer(text):
        value = int(float(line["value"]))
        if position := _POSITION.search(line["labels"]):
            positions[int(position[1])] = positions.get(int(position[1]), 0) + value
        else:
            totals[line["name"]] = totals.get(line["name"], 0) + value
    if "drafts" not in totals:
        return None
    return Counters(
        totals["drafts"],
        totals.get("draft_tokens", 0),
        totals.get("accepted_tokens", 0),
        tuple(positions[position] for position in sorted(positions)),
    )


def settled(read: Callable[[], Counters | None], pause: float = _SECONDS_BETWEEN_READINGS) -> Counters | None:
    """A reading that repeats: what was answered is then counted. pause: seconds between readings."""
    seen = read()
    for _ in range(_READINGS):
        time.sleep(pause)
        again = read()
        if again == seen:
            break
        seen = again
    return seen


def of_cycles(accepted: Sequence[int], draft_tokens: int) -> Counters:
    """The counts of drafts of equal length, from how many tokens of each were accepted."""
    return Counters(
        len(accepted),
        len(accepted) * draft_tokens,
        sum(accepted),
        tuple(sum(count > position for count in accepted) for position in range(draft_tokens)),
    )
