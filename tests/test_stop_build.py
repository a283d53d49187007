"""A running build is ended gently, and none loses its lock: neither to a process here nor in a container."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import check_health
import stop_build
from eyrie.build_lock import LOCK
from workspace import ROOT

LOG = logging.getLogger("stop_build")

JOB = "import signal, sys, time; {trap}; open(sys.argv[2], 'w').close(); time.sleep(60)"
TRAPPED = "signal.signal(signal.SIGTERM, lambda *_: None)"
SNAKEFILE = """
rule all:
    input: "one", "two"
rule make:
    output: "{name}"
    log: "{name}.log"
    shell: "python scripts/job.py --log {log}; touch {output}"
"""


@contextmanager
def build(folder: Path, trap: str = "0") -> Iterator[subprocess.Popen[bytes]]:
    """Snakemake at work on the first of two jobs, which does not end by itself."""
    (folder / "scripts").mkdir()
    (folder / "scripts/job.py").write_text(JOB.format(trap=trap))
    (folder / "Snakefile").write_text(SNAKEFILE)
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not list(folder.glob("*.log")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield process
        process.kill()


def test_a_build_ends_with_its_job_and_begins_no_other(tmp_path: Path) -> None:
    with build(tmp_path) as process:
        assert stop_build.stop(tmp_path, 60, LOG)
        assert process.poll() is not None
    assert len(list(tmp_path.glob("*.log"))) == 1
    assert not (tmp_path / "one").exists() and not (tmp_path / "two").exists()
    assert not list((tmp_path / ".snakemake/locks").glob("*"))


def test_what_does_not_end_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build(tmp_path, TRAPPED) as process:
        jobs = [job for one in stop_build.builds_in(tmp_path) for job in stop_build.jobs_of(one)]
        assert not stop_build.stop(tmp_path, 1.0, LOG)
        assert process.poll() is None
        for job in jobs:
            assert f"process {job.pid} has not ended" in caplog.text
            job.kill()


def test_a_build_elsewhere_is_no_business_of_this_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with build(tmp_path / "there") as process:
        assert stop_build.stop(tmp_path / "here", 0, LOG)
        assert process.poll() is None
        assert stop_build.stop(tmp_path / "there", 60, LOG)


def test_health_is_each_jobs_last_word(tmp_path: Path) -> None:
    assert check_health.silent_seconds(tmp_path) == {}
    with build(tmp_path):
        (name,) = (path.name for path in tmp_path.glob("*.log"))
        time.sleep(1.5)
        assert check_health.silent_seconds(tmp_path)[name] >= 1.5
        (tmp_path / name).write_text("a word")
        assert check_health.silent_seconds(tmp_path)[name] < 1.5
        assert stop_build.stop(tmp_path, 60, LOG)


def test_a_lock_is_cleared_only_where_no_build_holds_the_folder(tmp_path: Path) -> None:
    lock = tmp_path / ".snakemake/locks/0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("work/x\n")
    # As a build in a container does, whose process is not to be seen.
    with (tmp_path / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        refused = unlock(tmp_path)
        assert refused.returncode == 1 and "in a container" in refused.stderr
        assert lock.exists()
    assert unlock(tmp_path).returncode == 0
    assert not lock.exists()


def unlock(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/unlock.py")], cwd=folder, capture_output=True, text=True
    )
