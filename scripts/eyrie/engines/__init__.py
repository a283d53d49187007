"""Who answers prompts: the small interface that all engines have. They know nothing of datasets.

An engine takes prompts as token ids under a key and gives results in groups, as they finish. What it needs
to run (a model's weights, servers that were proved to be the right ones) it has before the first prompt:
see `opening.py`. Nothing here loads a model's library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eyrie.errors import BuildError
from eyrie.records import content_key

if TYPE_CHECKING:
    from eyrie.config import SamplingSettings
    from eyrie.store import States

FinishReason = Literal["stop", "length"]
Prompt = tuple[str, Sequence[int]]
"""A key and the token ids that ask for the answer."""


class EngineError(BuildError):
    """No engine can do the work; what was answered until then is in the store."""


@dataclass(frozen=True)
class Answered:
    """An answer: the generated ids, a final end token included, and why they end.

    states are those of prompt and answer, where the pass left them.
    """

    key: str
    token_ids: list[int]
    finish_reason: FinishReason
    states: States | None = None


@dataclass(frozen=True)
class Failed:
    """A prompt that got no answer after all repetitions: the last failure's kind, and its words."""

    key: str
    reason: str
    detail: str


Result = Answered | Failed
Follow = Callable[[Answered], Prompt | None]
"""The next prompt of the same conversation, made of what was just answered; None ends it."""


class Engine(Protocol):
    """Answers prompts."""

    def answer(
        self, prompts: Iterable[Prompt], sampling: SamplingSettings, follow: Follow | None = None
    ) -> Iterator[list[Result]]:
        """Each prompt's result once, in groups, as they finish; so, too, those of the prompts that follow.

        A group may be empty: it tells that time has passed. The prompts are taken as they are needed. Raises
        EngineError where no prompt can be answered any more, Stopped after a signal.
        """
        ...

    def described(self) -> dict[str, Any]:
        """What a manifest tells of the engine: kind, version, model, what started it, the canary."""
        ...

    def errors(self) -> dict[str, int]:
        """How many attempts failed so far, by kind; some of them were repeated with success."""
        ...

    def running(self) -> int:
        """How many prompts are being answered now."""
        ...


class Capture(Protocol):
    """Captures the hidden states of finished samples."""

    def capture(self, samples: Sequence[list[int]], state_dtype: str) -> Iterator[list[States]]:
        """Each sample's states once, in groups, as they finish. Raises BuildError where some can't be had."""
        ...


def sampling_seed(key: str) -> int:
    """A seed in [0, 2**31) for a prompt's random draws, from its key alone: no neighbour changes it."""
    return int(content_key("sample", key)[:8], 16) >> 1
