"""Several servers side by side: each is kept full, one that fails is left alone until it is well again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import requests

from eyrie.engines.replies import Failure
from eyrie.errors import BuildError

_LOG = logging.getLogger(__name__)
_HEALTH_TIMEOUT = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0


@dataclass
class Endpoint:
    """One server: how many requests it has, and whether it gets more."""

    url: str
    running: int = 0
    live: bool = True


class Endpoints:
    """The servers' places, `places` each. A place is taken before a request is sent and given back after.

    health_path: what answers 200 while a server is well. verify: the proof that a server which was away is
    the right one, now that it is back; it raises BuildError.
    """

    def __init__(
        self,
        urls: Sequence[str],
        places: int,
        health_path: str,
        verify: Callable[[str], object] | None = None,
    ) -> None:
        self.fault: BuildError | None = None
        self._places = places
        self._health_path = health_path
        self._verify = verify
        self._endpoints = [Endpoint(url) for url in urls]
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._away_since: float | None = None

    def acquire(self) -> Endpoint | None:
        """A place with the live server that has the fewest requests; waits for one. None once closed."""
        with self._changed:
            while not self._closed.is_set():
                free = [one for one in self._endpoints if one.live and one.running < self._places]
                if free:
                    endpoint = min(free, key=lambda one: one.running)
                    endpoint.running += 1
                    return endpoint
                self._changed.wait()
        return None

    def release(self, endpoint: Endpoint) -> None:
        """Give a place back."""
        with self._changed:
            endpoint.running -= 1
            self._changed.notify()

    def suspect(self, endpoint: Endpoint) -> None:
        """Send a server nothing more until it is seen to be well."""
        with self._changed:
            if not endpoint.live or self._closed.is_set():
                return
            endpoint.live = False
            if not any(one.live for one in self._endpoints):
                self._away_since = time.monotonic()
        threading.Thread(target=self._await_health, args=(endpoint,), daemon=True).start()

    def running(self) -> int:
        """Requests that are being answered."""
        with self._changed:
            return sum(one.running for one in self._endpoints)

    def away_seconds(self) -> float:
        """For how long no server has been live."""
        with self._changed:
            return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def close(self) -> None:
        """Give no more places; those who wait for one get None."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def _await_health(self, endpoint: Endpoint) -> None:
        wait, was_away = _FIRST_WAIT, False
        while not self._closed.is_set():
            if self._is_well(endpoint) and (not was_away or self._is_proved(endpoint)):
                self._rejoin(endpoint, was_away)
                return
            if self.fault is not None:
                return
            if not was_away:
                _LOG.warning("%s does not answer; its work goes to the others until it is back", endpoint.url)
            was_away = True
            self._closed.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _is_well(self, endpoint: Endpoint) -> bool:
        try:
            with requests.Session() as session:
                session.trust_env = False
                reply = session.get(endpoint.url + self._health_path, timeout=_HEALTH_TIMEOUT)
                return reply.status_code == requests.codes.ok
        except requests.RequestException:
            return False

    def _is_proved(self, endpoint: Endpoint) -> bool:
        """Whether a server that is back is the right one; a wrong one is a fault, a silent one still away."""
        try:
            if self._verify is not None:
                self._verify(endpoint.url)
        except BuildError as error:
            if not isinstance(error.__cause__, (requests.RequestException, Failure)):
                self.fault = error
            return False
        return True

    def _rejoin(self, endpoint: Endpoint, was_away: bool) -> None:
        if was_away:
            _LOG.info("%s answers again", endpoint.url)
        with self._changed:
            endpoint.live = True
            self._away_since = None
            self._changed.notify_all()
