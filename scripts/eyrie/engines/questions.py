"""Questions to one server before the work: what it is, and single answers to look at."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from eyrie.config import SamplingSettings
from eyrie.engines import EngineError
from eyrie.engines.replies import Dialect, Failure, Request


class IdentityError(EngineError):
    """A server is not the one that was meant, or does not say what it is."""


def mismatch(url: str, what: str, seen: object, expected: object, change: str) -> IdentityError:
    """The error for a server that is not what it should be; `change` says which flag or key to set."""
    return IdentityError(
        f"{url}: {what}\n  seen: {seen}\n  expected: {expected}\n  change: {change}; nothing was asked yet"
    )


class Questions:
    """Questions to one server, under one time-out."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._session = requests.Session()
        self._session.trust_env = False

    def get(self, *paths: str) -> dict[str, Any]:
        """The JSON object at the first of the paths that there is; {} where there is none."""
        for path in paths:
            status, reply = self._ask("GET", path, None)
            if status == requests.codes.ok and isinstance(reply, dict):
                return reply
        return {}

    def get_text(self, path: str) -> str:
        """The text at a path; empty where there is none."""
        reply = self._session.get(self.url + path, timeout=self._timeout)
        return reply.text if reply.status_code == requests.codes.ok else ""

    def answer(
        self,
        dialect: Dialect,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], dict[str, Any]]:
        """The ids of an answer that has passed the dialect's own checks, and the reply that they came in.

        more: fields of the request beside the dialect's own. Raises IdentityError where there is no answer.
        """
        # No two requests of a name: several jobs may prove the same server at once.
        request = Request("proof", f"proof-{uuid.uuid4().hex}", prompt, sampling)
        status, reply = self._ask("POST", dialect.path, {**dialect.body(request), **(more or {})})
        if status != requests.codes.ok or not isinstance(reply, dict):
            raise IdentityError(
                f"{self.url}{dialect.path}: status {status}: {str(reply)[:500]}\n"
                f"  expected: an answer to {len(prompt)} token ids, sampled with {sampling}\n"
                "  change: what the reply complains of: the server's command, or the partition's sampling"
            )
        try:
            ids, _ = dialect.read(request, reply)
        except Failure as failure:
            raise IdentityError(
                f"{self.url}{dialect.path}: {failure}\n"
                "  expected: an answer in token ids\n"
                "  change: engine.kind, or a server of a version that gives them"
            ) from failure
        dialect.discard(reply, time.monotonic() + self._timeout)
        return ids, reply

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        try:
            reply = self._session.request(method, self.url + path, json=body, timeout=self._timeout)
        except requests.RequestException as error:
            raise IdentityError(
                f"{self.url}{path}: {type(error).__name__}: {error}\n"
                "  expected: a reply\n"
                "  change: engine.urls if the server is elsewhere, engine.request_timeout if it is only slow"
            ) from error
        try:
            return reply.status_code, reply.json()
        except ValueError:
            return reply.status_code, reply.text[:500]
