"""The engine that asks servers: prompts out, answers in, whatever fails on the way.

A thread for each place at a server takes prompts from a short queue; the caller's thread fills the queue from
the prompts' iterator, schedules what must be asked again, and gives out results in groups as they finish. So
memory holds the prompts that are asked and those next in line, however many there are in all.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyrie.config import EngineSettings, SamplingSettings
from eyrie.engines import Answered, EngineError, Failed, Follow, Prompt, Result
from eyrie.engines.asking import ask, new_session
from eyrie.engines.endpoints import Endpoints
from eyrie.engines.replies import FINAL_KINDS, SERVER_KINDS, Dialect, Failure, Request
from eyrie.stopping import StopRequest

_LOG = logging.getLogger(__name__)

# Results are given out together for this long, so that many of them share one sync of the journal. What is
# not yet given out when the process is killed is asked again.
_GROUP_SECONDS = 0.1
_GROUP_SIZE = 256
# Nothing happened for so long: the caller gets an empty group, and may say so.
_QUIET_SECONDS = 1.0
_LONGEST_BACKOFF = 60.0
# So many prompts in a row that got no answer, with all their repetitions, are no fault of the prompts.
_FAILURES_IN_A_ROW = 50


class RequestingEngine:
    """Answers prompts by servers of one kind, all of which serve the same target.

    verify: proves that a server which was away is still the right one. watch: looks after a server that this
    process started. Both raise BuildError. description: what a manifest tells of the servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        settings: EngineSettings,
        stop: StopRequest,
        verify: Callable[[str], object] | None = None,
        watch: Callable[[], None] | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.urls = list(urls)
        self.dialect = dialect
        self.settings = settings
        self.stop = stop
        self.verify = verify
        self.watch = watch
        self._description = dict(description or {"engine": settings.kind})
        self.failures: Counter[str] = Counter()
        self._run: _Run | None = None

    def described(self) -> dict[str, Any]:
        """What a manifest tells of the servers."""
        return self._description

    def errors(self) -> dict[str, int]:
        """How many attempts failed so far, by kind."""
        return dict(self.failures)

    def running(self) -> int:
        """How many requests are being answered."""
        return 0 if self._run is None else self._run.endpoints.running()

    def answer(
        self, prompts: Iterable[Prompt], sampling: SamplingSettings, follow: Follow | None = None
    ) -> Iterator[list[Result]]:
        """Each prompt's result, and those of the prompts that follow, in groups as they finish.

        Prompts that follow go before new ones: what their conversation has in common with them is still in
        the server's cache. Raises EngineError where no server can answer, and Stopped after a signal, once
        what was running has finished or had its time.
        """
        self._run = _Run(self, iter(prompts), sampling, follow)
        try:
            yield from self._run.groups()
        finally:
            self._run.close()
            self._run = None


@dataclass
class _Task:
    """A prompt and how often it was asked."""

    key: str
    ids: Sequence[int]
    attempts: int = 0


_Outcome = Answered | Failure | Exception | None
"""None: it was not asked, since the work stops."""


class _Run:
    """One call of `answer`. Only `_work` runs in other threads; it shares two queues and the endpoints."""

    def __init__(
        self,
        engine: RequestingEngine,
        source: Iterator[Prompt],
        sampling: SamplingSettings,
        follow: Follow | None,
    ) -> None:
        self.engine = engine
        self.endpoints = Endpoints(
            engine.urls, sampling.max_in_flight, engine.dialect.health_path, engine.verify
        )
        self._sampling = sampling
        self._follow = follow
        self._source: Iterator[Prompt] | None = source
        self._following: deque[_Task] = deque()
        self._later: list[tuple[float, int, _Task]] = []
        self._numbers = itertools.count()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[_Task, _Outcome]] = queue.SimpleQueue()
        self._given = 0
        """Tasks that were put in the queue and have no result yet that the caller has taken: so many prompts
        at most are asked again when the process is killed."""
        self._threads: list[threading.Thread] = []
        self._places = sampling.max_in_flight * len(engine.urls)
        self._failed_in_a_row = 0
        self._stopping = False

    def groups(self) -> Iterator[list[Result]]:
        """See RequestingEngine.answer."""
        while True:
            self._look_at_the_stop()
            self._feed()
            if self._source is None and not (self._given or self._following or self._later):
                return
            if self._stopping and (not self._given or self.engine.stop.expired):
                raise self.engine.stop.stopped()
            group = self._gather()
            yield group
            # Only now are they safe with the caller; until here they counted as being asked.
            self._given -= len(group)
            self._look_at_the_servers()

    def close(self) -> None:
        """Let the threads end; one that waits for a reply ends with the process."""
        self.endpoints.close()
        for _ in self._threads:
            self._tasks.put(None)

    # The caller's thread: what to ask next.

    def _feed(self) -> None:
        """Put tasks into the queue: as many as there are places, and as many again to be at hand.

        What waits to be asked again counts, too, so that a server which fails for a while does not have
        every prompt asked and waiting.
        """
        while self._given < 2 * self._places and not self._stopping:
            task = self._next_task()
            if task is None:
                return
            self._given += 1
            self._tasks.put(task)
            if len(self._threads) < min(self._given, self._places):
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()

    def _next_task(self) -> _Task | None:
        if self._later and self._later[0][0] <= time.monotonic():
            return heapq.heappop(self._later)[2]
        if self._given + len(self._later) >= 2 * self._places:
            return None
        if self._following:
            return self._following.popleft()
        if self._source is not None:
            for key, ids in self._source:
                return _Task(key, ids)
            self._source = None
        return None

    # The caller's thread: what came back.

    def _gather(self) -> list[Result]:
        """The results of a short time from the first on; none where it is quiet."""
        group: list[Result] = []
        end = time.monotonic() + _QUIET_SECONDS
        while len(group) < _GROUP_SIZE and (now := time.monotonic()) < end:
            try:
                task, outcome = self._outcomes.get(timeout=min(end - now, self._next_due(now)))
            except queue.Empty:
                self._feed()
                if self.engine.stop.requested and not group:
                    break
                continue
            result = self._result(task, outcome)
            if result is None:
                self._given -= 1
            self._feed()
            if result is not None:
                if not group:
                    end = time.monotonic() + _GROUP_SECONDS
                group.append(result)
        return group

    def _next_due(self, now: float) -> float:
        """How long to wait at most: until a repetition is due, and not past a signal."""
        due = self._later[0][0] - now if self._later else _GROUP_SECONDS
        return min(max(due, 0.001), _GROUP_SECONDS)

    def _result(self, task: _Task, outcome: _Outcome) -> Result | None:
        if isinstance(outcome, Answered):
            self._failed_in_a_row = 0
            following = None if self._follow is None else self._follow(outcome)
            if following is not None:
                self._following.append(_Task(*following))
            return outcome
        if isinstance(outcome, Failure):
            return self._failed(task, outcome)
        if outcome is not None:
            raise outcome
        return None

    def _failed(self, task: _Task, failure: Failure) -> Failed | None:
        self.engine.failures[failure.kind] += 1
        if self.engine.failures[failure.kind] == 1:
            _LOG.warning("first failure of its kind, %s", failure)
        task.attempts += 1
        if failure.kind not in FINAL_KINDS and task.attempts <= self.engine.settings.retries:
            due = time.monotonic() + self._backoff(task)
            heapq.heappush(self._later, (due, next(self._numbers), task))
            return None
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
            raise EngineError(
                f"the last {self._failed_in_a_row} prompts got no answer, each asked {task.attempts} times; "
                f"the last failure is {failure}\n"
                f"  failures so far: {dict(self.engine.failures)}\n"
                "  change: the server (its log tells more), or engine.retries and engine.request_timeout; "
                "what was answered is in the store"
            )
        return Failed(task.key, failure.kind, failure.detail)

    def _backoff(self, task: _Task) -> float:
        """Doubled with each attempt; a prompt's own share of it, so that not all come back at once."""
        longest = min(self.engine.settings.backoff * 2 ** (task.attempts - 1), _LONGEST_BACKOFF)
        return longest * random.Random(f"{task.key} {task.attempts}").uniform(0.5, 1.0)

    def _look_at_the_stop(self) -> None:
        if not self.engine.stop.requested or self._stopping:
            return
        self._stopping = True
        self.endpoints.close()
        while True:
            try:
                self._tasks.get_nowait()
            except queue.Empty:
                return
            self._given -= 1

    def _look_at_the_servers(self) -> None:
        if self.endpoints.fault is not None:
            raise self.endpoints.fault
        if self.engine.watch is not None:
            self.engine.watch()
        away, limit = self.endpoints.away_seconds(), self.engine.settings.ready_timeout
        if away > limit:
            raise EngineError(
                f"no server has answered for {away:.0f} s: {', '.join(self.engine.urls)}\n"
                f"  expected: one of them to be well again within engine.ready_timeout, {limit:.0f} s\n"
                f"  failures so far: {dict(self.engine.failures)}\n"
                "  change: start the servers again, or engine.urls; what was answered is in the store, "
                "and the same command goes on from there"
            )

    # The other threads.

    def _work(self) -> None:
        with new_session(len(self.engine.urls)) as session:
            while (task := self._tasks.get()) is not None:
                endpoint = self.endpoints.acquire()
                if endpoint is None:
                    self._outcomes.put((task, None))
                    continue
                request = Request(
                    task.key, f"{task.key}-{task.attempts}-{time.time_ns()}", task.ids, self._sampling
                )
                outcome: _Outcome
                try:
                    outcome = ask(
                        session,
                        endpoint.url,
                        self.engine.dialect,
                        request,
                        self.engine.settings.request_timeout,
                    )
                except Failure as failure:
                    if failure.kind in SERVER_KINDS:
                        self.endpoints.suspect(endpoint)
                    outcome = failure
                except Exception as error:  # a fault of this program: the caller's thread raises it
                    outcome = error
                self.endpoints.release(endpoint)
                self._outcomes.put((task, outcome))
