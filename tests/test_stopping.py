from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eyrie.stopping import Stopped, StopRequest, unless_stopped


def test_a_signal_is_a_wish_and_a_later_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(60.0) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the same wish, handed on
        assert stop.requested and not stop.expired
        assert isinstance(stop.stopped(), Stopped)
        assert "SIGTERM" in str(stop.stopped())
        monkeypatch.setattr("eyrie.stopping._ONE_WISH", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_grace_ends() -> None:
    stop = StopRequest(0.0)
    stop.request("the test")
    assert stop.expired
    stop.request("another")
    assert "the test" in str(stop.stopped())


def test_work_that_ends_gives_what_it_gave() -> None:
    stop = StopRequest(1.0)
    assert unless_stopped(stop, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        unless_stopped(stop, lambda: 1 // 0)


def test_work_that_does_not_end_keeps_no_wish_waiting() -> None:
    never, stop = threading.Event(), StopRequest(60.0)
    threading.Timer(0.2, stop.request, ("the test",)).start()
    with pytest.raises(Stopped, match="the test"):
        unless_stopped(stop, never.wait)
    never.set()


def test_what_was_started_deaf_stays_deaf() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(1.0) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


JOB = """
import sys, time
sys.path.insert(0, sys.argv[1])
from eyrie.stopping import StopRequest, end_with_snakemake
end_with_snakemake()
with StopRequest(60.0) as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
print(stop.cause, flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize(("name", "ends"), [("snakemake", True), ("by-hand", False)])
def test_a_job_ends_with_its_snakemake_but_not_with_a_shell(
    tmp_path: Path, root: Path, name: str, ends: bool
) -> None:
    job, started_by = tmp_path / "job.py", tmp_path / name
    job.write_text(JOB)
    started_by.write_text(PARENT)
    command = [sys.executable, str(started_by), str(job), str(root / "scripts")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        if ends:
            assert parent.stdout.readline() == "SIGTERM\n"
        else:
            time.sleep(0.3)
            os.kill(int(child), signal.SIGINT)
            assert parent.stdout.readline() == "SIGINT\n"
