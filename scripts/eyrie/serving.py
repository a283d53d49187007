"""A server's life: started as a child of the job, watched while it loads, ended on every way out.

    command = fill_command(settings.command, model=path, host=HOST, port=free_port())
    with Server(command, url, log=..., ready_timeout=..., stop_grace=...) as server:
        ...                 # server.url answers
        server.check()      # starts it again if it has ended, or raises ServerError

Between the job and the server stands a small process (keeper.py) that ends the server with all its workers
when the job ends, however it ends: with the block, by an error, by a signal, by SIGKILL. What the keeper
leaves, since it was killed, too, the next start ends: a note beside the log names the mark that all processes
of that server carry, and only processes that carry it are ever ended.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

import requests

from eyrie import keeper
from eyrie.errors import BuildError

_LOG = logging.getLogger(__name__)

URLS_VARIABLE = "EYRIE_SERVER_URLS"
"""Set by with_server.py for the command that it runs: the servers' addresses, separated by commas."""
HOST = "127.0.0.1"

_POLL_SECONDS = 0.2
_HEALTH_TIMEOUT = 10.0
_SECONDS_BETWEEN_LINES = 30.0
# How long the keeper may take beyond the grace to end what does not end by itself.
_KEEPER_SECONDS = 10.0
_TAIL_BYTES, _TAIL_LINES = 8192, 20


class ServerError(BuildError):
    """A server can't be started, or has ended."""


def server_urls() -> list[str]:
    """The servers that with_server.py started for this process; none where it did not."""
    return [url for url in os.environ.get(URLS_VARIABLE, "").split(",") if url]


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def fill_command(template: str, **values: object) -> list[str]:
    """The words of a command with {name} replaced for the given names; other braces stay, as in JSON.

    A word that is nothing but the name of an empty value is left out.
    """
    words = shlex.split(template)
    for name, value in values.items():
        place = "{" + name + "}"
        words = [word.replace(place, str(value)) for word in words if value != "" or word != place]
    return words


@contextmanager
def arriving_files(folder: Path) -> Iterator[None]:
    """A folder for the hidden states that a server leaves, emptied before and after the block.

    What a killed job has not taken away lies there until then: only this server writes to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _empty(folder)
        yield
    finally:
        _empty(folder)


def _empty(folder: Path) -> None:
    for pattern in ("*.safetensors", "*.safetensors.lock"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class Kept:
    """A command run under a keeper until it ends, or until the `with` block does.

    grace: seconds between SIGTERM and SIGKILL. note: file that lets the next start find what was left by a
    kill; see end_leftovers. output: takes what the command prints; by default it is this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        grace: float,
        note: Path | None = None,
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._grace = grace
        self._mark = uuid.uuid4().hex
        # The keeper reads one end; the other closes with this process at the latest.
        theirs, self._lifeline = os.pipe()
        settings = ["--parent", str(os.getpid()), "--grace", str(grace), "--mark", self._mark]
        if note is not None:
            settings += ["--note", str(note)]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *settings, "--", *command],
                stdin=theirs,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=None if environment is None else dict(environment),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The command's status once it has ended; 128 + the signal that killed it."""
        status = self._keeper.poll()
        return status if status is None or status >= 0 else 128 - status

    def send(self, number: signal.Signals) -> None:
        """Send the command's process group a signal."""
        if self._keeper.poll() is None:
            self._keeper.send_signal(number)

    def stop(self) -> None:
        """End the command and all that it started; returns when nothing of it is left."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._keeper.wait(self._grace + _KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.returncode < 0:
            _end_marked(self._mark)


def end_leftovers(note: Path) -> int:
    """End what an earlier run left behind, by its note; returns how many processes there were.

    Only what carries the note's mark in its environment is ended: a number in a file proves nothing, since
    numbers are used again. Raises ServerError while the run that wrote the note is still alive.
    """
    try:
        left = json.loads(note.read_text(encoding="utf-8"))
        mark, grace = str(left["mark"]), float(left["grace"])
        parent, kept_by = left["parent"], left["keeper"]
        same_boot = left["boot"] == keeper.boot_id()
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        # Not written by a keeper: it names nothing that could be known as ours.
        return 0
    count = 0
    if same_boot:
        if _lives(parent):
            raise ServerError(
                f"{note}: process {parent[0]} has started a server there and is still running\n"
                "  expected: one job at a time for each log\n"
                "  change: wait for it or stop it, then run again"
            )
        # The keeper of a killed job is ending the server; it needs the grace at most.
        deadline = time.monotonic() + grace + _KEEPER_SECONDS
        while _lives(kept_by) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        count = _end_marked(mark)
    note.unlink(missing_ok=True)
    return count


def _lives(process: Any) -> bool:
    pid, start = process
    return start is not None and keeper.start_time(int(pid)) == start


def _end_marked(mark: str) -> int:
    """SIGKILL all processes with this mark, until there are none; returns how many there were."""
    ended: set[int] = set()
    while left := [pid for pid in keeper.all_pids() if _kill_if_marked(pid, mark)]:
        ended.update(left)
        time.sleep(0.02)
    return len(ended)


def _kill_if_marked(pid: int, mark: str) -> bool:
    """Kill one process if it carries the mark; the descriptor stays with it when its number is used again."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"{keeper.MARK_VARIABLE}={mark}".encode() not in variables:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


class Server:
    """A server that lives as long as the `with` block.

    command: its words, see fill_command. url: where it will answer. log: takes all that it prints, appended;
    the note about its processes lies beside it. health_path answers 200 once it is ready. warm_up: called
    with the url once it is ready, since a first request may take far longer than those after it. on_wait:
    called while the server loads; what it raises ends the wait. restarts: how often it is started again, at
    the same address, after an end that nobody wished; before it was ready once, an end is final.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        *,
        log: Path,
        ready_timeout: float,
        stop_grace: float,
        health_path: str = "/health",
        warm_up: Callable[[str], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        restarts: int = 0,
    ) -> None:
        self.command = list(command)
        self.url = url
        self.log = log
        self.note = log.with_name(f"{log.name}.process.json")
        self._ready_timeout = ready_timeout
        self._stop_grace = stop_grace
        self._health_path = health_path
        self._warm_up = warm_up
        self._on_wait = on_wait
        self._restarts = restarts
        self._restarted = 0
        self._last_seen = "nothing"
        self._log_start = 0
        self._kept: Kept | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start it and wait until it is ready. Raises ServerError where it ends before, or takes too long."""
        with ExitStack() as stack:
            stack.enter_context(ends_in_order())
            self.log.parent.mkdir(parents=True, exist_ok=True)
            ended = end_leftovers(self.note)
            if ended:
                _LOG.warning("ended %d processes that a killed run had left behind", ended)
            self._kept = stack.enter_context(self._start())
            seconds = self._await_ready()
            if self._warm_up is not None:
                self._warm_up(self.url)
            _LOG.info("%s is ready after %.1f s; its log: %s", self.url, seconds, self.log)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def check(self) -> None:
        """Look after the server inside the block: one that has ended is started again, and not waited for.

        Raises ServerError once it has ended oftener than `restarts` allows.
        """
        status = self._status()
        if status is None:
            return
        if self._restarted == self._restarts:
            raise self._ended(status)
        self._restarted += 1
        _LOG.warning(
            "the server ended with %s; starting it again, %d of %d times. The last lines of its log, %s:\n%s",
            *(_status_in_words(status), self._restarted, self._restarts, self.log, self._tail()),
        )
        if self._kept is not None:
            self._kept.stop()
        self._kept = self._stack.enter_context(self._start())

    def _status(self) -> int | None:
        return None if self._kept is None else self._kept.poll()

    def _ended(self, status: int) -> ServerError:
        again = f" after {self._restarted} restarts" if self._restarted else ""
        return ServerError(
            f"the server ended{again} with {_status_in_words(status)}: {shlex.join(self.command)}\n"
            "  expected: a server that runs, in the foreground, until it is stopped\n"
            f"  the last lines of its log, {self.log}:\n{self._tail()}\n"
            "  change: engine.command, or what the log complains of; what was answered is in the store"
        )

    def _start(self) -> Kept:
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            output.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(self.command)}\n".encode())
            output.flush()
            return Kept(self.command, self._stop_grace, self.note, output)

    def _await_ready(self) -> float:
        start = last_line = time.monotonic()
        with requests.Session() as session:
            session.trust_env = False
            while not self._is_ready(session):
                self._check_loading()
                if self._on_wait is not None:
                    self._on_wait()
                now = time.monotonic()
                if now - start > self._ready_timeout:
                    raise ServerError(
                        f"the server was not ready after {self._ready_timeout:.0f} s: "
                        f"{shlex.join(self.command)}\n"
                        f"  expected: status 200 from {self.url}{self._health_path}, saw {self._last_seen}\n"
                        f"  the last lines of its log, {self.log}:\n{self._tail()}\n"
                        "  change: engine.ready_timeout if it was still loading, else engine.command"
                    )
                if now - last_line > _SECONDS_BETWEEN_LINES:
                    last_line = now
                    _LOG.info("the server is loading, %.0f s so far", now - start)
                time.sleep(_POLL_SECONDS)
        self._check_loading()
        return time.monotonic() - start

    def _check_loading(self) -> None:
        if (status := self._status()) is not None:
            raise self._ended(status)

    def _is_ready(self, session: requests.Session) -> bool:
        try:
            reply = session.get(self.url + self._health_path, timeout=_HEALTH_TIMEOUT)
        except requests.RequestException as error:
            self._last_seen = type(error).__name__
            return False
        self._last_seen = f"status {reply.status_code}"
        return reply.status_code == requests.codes.ok

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])


def _status_in_words(status: int) -> str:
    try:
        return f"status {status}" if status <= 128 else f"signal {signal.Signals(status - 128).name}"
    except ValueError:
        return f"status {status}"


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, where nobody handles them, raise SystemExit: blocks are then left in order."""
    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                former[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
