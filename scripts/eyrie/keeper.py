"""Runs one command in a session of its own, and leaves nothing of it behind whatever becomes of the parent.

    python keeper.py --parent PID --grace SECONDS [--note FILE] -- COMMAND ARGUMENT...

Standard input is a pipe of which the parent holds the other end and never writes to. When that end closes,
because the parent wants the command to stop or because it was killed, the command's process group gets
SIGTERM, and what is left of it after the grace gets SIGKILL, down to the last grandchild: the kernel makes
orphans of the command this process's children (PR_SET_CHILD_SUBREAPER), also those that left the group. If
this process itself is killed, the command dies with it (PR_SET_PDEATHSIG), and what the command had started
is found by a mark in its environment; see serving.py. SIGINT, SIGTERM and SIGHUP are handed on.

It ends with the command's status, or 128 + the number of the signal that killed it. It imports the standard
library alone, since it must start at once and stay small.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

MARK_VARIABLE = "EYRIE_KEPT"
"""In the environment of the command and of all that it starts: the mark of the note."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process, or a dead one.

    A number is used again some day; number and start together are one process's alone until the next boot.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def boot_id() -> str:
    """What the kernel calls this boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before them may hold blanks and brackets."""
    try:
        return (
            (_PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None


def all_pids() -> list[int]:
    """The processes that there are."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def descendants(pid: int) -> list[int]:
    """The processes that descend from one and have not ended."""
    children: dict[int, list[int]] = {}
    for other in all_pids():
        fields = _stat(other)
        if fields is not None and fields[0] not in ("Z", "X"):
            children.setdefault(int(fields[1]), []).append(other)
    found, waiting = [], [pid]
    while waiting:
        offspring = children.get(waiting.pop(), [])
        found.extend(offspring)
        waiting.extend(offspring)
    return found


def set_process_option(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _die_with(keeper: int) -> Callable[[], None]:
    """What the command's process does before it becomes the command."""

    def prepare() -> None:
        set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died between fork and here
            os._exit(128 + signal.SIGKILL)

    return prepare


class Keeper:
    """One kept command."""

    def __init__(self, parent: int, grace: float) -> None:
        self._parent = parent
        self._grace = grace
        self._status: int | None = None
        self._child = 0
        self._early: list[signal.Signals] = []
        """Signals that came before there was a child."""

    def run(self, command: list[str], mark: str) -> int:
        """Run the command until it ends or must end; returns the status to end with."""
        set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hand_on)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
                env={**os.environ, MARK_VARIABLE: mark},
            )
        except OSError as error:
            print(f"{command[0]} can't be started: {error}", file=sys.stderr)
            return 127
        self._child = child.pid
        for early in self._early:
            self._signal(early)
        while self._status is None and not self._parent_is_gone(woken):
            self._reap()
        if self._status is None:
            self._end_all(signal.SIGTERM, self._grace)
        self._end_all(signal.SIGKILL, float("inf"))
        status = self._status or 0
        return status if status >= 0 else 128 - status

    def _parent_is_gone(self, woken: int) -> bool:
        """Wait for a second, or until something happens; whether the command must end."""
        readable = select.select([0, woken], [], [], 1.0)[0]
        if woken in readable:
            os.read(woken, 4096)
        # A child of the parent may hold the pipe's other end open after the parent's death.
        return (0 in readable and not os.read(0, 4096)) or os.getppid() != self._parent

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._status = os.waitstatus_to_exitcode(status)

    def _end_all(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to all that is left, and wait so long for it to end; SIGKILL is sent until it has."""
        deadline = time.monotonic() + seconds
        self._signal(number)
        while left := descendants(os.getpid()):
            if time.monotonic() > deadline:
                return
            if number == signal.SIGKILL:
                for pid in left:
                    _send(pid, number)
            time.sleep(0.02)
            self._reap()
        self._reap()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._signal(signal.Signals(number))

    def _signal(self, number: signal.Signals) -> None:
        """To the command's group. Its number is not used again before the command was waited for."""
        if self._child and self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child, number)
        elif not self._child:
            self._early.append(number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def write_note(path: Path, parent: int, grace: float, mark: str) -> None:
    """Write down who keeps what, for one that comes after a kill: the file is there before the command."""
    note = {
        "mark": mark,
        "boot": boot_id(),
        "grace": grace,
        "keeper": [os.getpid(), start_time(os.getpid())],
        "parent": [parent, start_time(parent)],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(note) + "\n", encoding="utf-8")
    temporary.replace(path)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Run a command and leave nothing of it behind.")
    parser.add_argument("--parent", type=int, required=True, help="the process that starts this one")
    parser.add_argument("--grace", type=float, required=True, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--mark", required=True, help="what tells the command's processes from all others")
    parser.add_argument("--note", type=Path, help="file that names this process and the mark while it runs")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if arguments.note is not None:
        write_note(arguments.note, arguments.parent, arguments.grace, arguments.mark)
    try:
        return Keeper(arguments.parent, arguments.grace).run(arguments.command, arguments.mark)
    finally:
        if arguments.note is not None:
            arguments.note.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
