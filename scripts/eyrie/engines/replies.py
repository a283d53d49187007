"""What a server's reply must be to count as an answer, and the kinds of failure that it may be instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eyrie.config import SamplingSettings
from eyrie.engines import FinishReason

if TYPE_CHECKING:
    from eyrie.store import States

FINAL_KINDS = frozenset({"rejected"})
"""Kinds that no repetition mends; all others may pass."""
SERVER_KINDS = frozenset({"refused", "reset", "timeout", "unavailable", "server_error"})
"""Kinds after which a server must show that it is well before it is asked again."""


class Failure(Exception):
    """One attempt to get an answer failed.

    Kinds: refused and reset (the connection), timeout, unavailable (busy or not ready), server_error,
    rejected (the request was called wrong), aborted (the answer was broken off), malformed_reply, and for a
    reply of the right form that can't be the answer: wrong_model, wrong_prompt, wrong_tokens, wrong_count,
    wrong_finish. For the file of hidden states that a reply names: states_missing, states_unreadable,
    states_short, states_of_other_tokens.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Request:
    """One attempt: the prompt, how to sample, and a name that no other attempt has."""

    key: str
    name: str
    ids: Sequence[int]
    sampling: SamplingSettings


class Dialect(Protocol):
    """How one kind of server is asked, and how its reply is read."""

    path: str
    """Where requests go."""
    health_path: str
    """What answers 200 while the server is well."""

    def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON."""
        ...

    def read(self, request: Request, reply: Mapping[str, Any]) -> tuple[list[int], FinishReason]:
        """The generated ids and why they end. Raises Failure where this can't be the answer."""
        ...

    def states(
        self, request: Request, ids: Sequence[int], reply: Mapping[str, Any], deadline: float
    ) -> States | None:
        """The hidden states that the server has left of this request, by time.monotonic()'s deadline.

        ids: the generated ones. None where none are wanted. Raises Failure, StoreError.
        """
        ...

    def discard(self, reply: Mapping[str, Any], deadline: float) -> None:
        """Remove what hidden states the server has left of a reply, by time.monotonic()'s deadline."""
        ...


@dataclass(frozen=True)
class AnswerRules:
    """What holds for every answer of a target: its ids are in the vocabulary, and it ends as it says."""

    vocab_size: int
    eos_ids: frozenset[int]

    def check(
        self, ids: object, reason: object, reported: object, max_new_tokens: int
    ) -> tuple[list[int], FinishReason]:
        """The answer, if it is one. reported: how many tokens the server counts in it. Raises Failure."""
        if not isinstance(ids, list) or not ids:
            raise Failure("malformed_reply", f"expected a list of generated ids, saw {shortly(ids)}")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= self.vocab_size:
            odd = next(one for one in ids if type(one) is not int or not 0 <= one < self.vocab_size)
            raise Failure(
                "wrong_tokens",
                f"{shortly(odd)} is none of {self.vocab_size} tokens; is this the target?",
            )
        if len(ids) != reported or len(ids) > max_new_tokens:
            raise Failure(
                "wrong_count",
                f"{len(ids)} ids, {shortly(reported)} by the server's count, {max_new_tokens} at most",
            )
        ends = self.eos_ids.intersection(ids)
        if ends and (ids[-1] not in ends or any(ids.count(end) > (end == ids[-1]) for end in ends)):
            raise Failure("wrong_finish", f"an end token among {len(ids)} ids before the last")
        return ids, self._finish(ids, reason, max_new_tokens)

    def _finish(self, ids: list[int], reason: object, max_new_tokens: int) -> FinishReason:
        ended = ids[-1] in self.eos_ids
        # A server may look at the length first; an answer whose last token ends it has ended all the same.
        if ended and (reason == "stop" or (reason == "length" and len(ids) == max_new_tokens)):
            return "stop"
        if not ended and reason == "length" and len(ids) == max_new_tokens:
            return "length"
        raise Failure(
            "wrong_finish",
            f"{shortly(reason)} after {len(ids)} of {max_new_tokens} ids, the last being {ids[-1]}; "
            f"expected stop after one of {sorted(self.eos_ids)}, or length after {max_new_tokens}",
        )


def field(reply: object, *path: str | int) -> Any:
    """The value at a path in a reply. Raises Failure where there is none."""
    value = reply
    for part in path:
        try:
            value = value[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            where = ".".join(map(str, path))
            raise Failure("malformed_reply", f"no {where} in {shortly(reply)}") from None
    return value


def shortly(value: object) -> str:
    """A value in a message: its beginning."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
