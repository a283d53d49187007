"""End the builds that run in this folder gently, wait for them, and tell what is left.

    python scripts/stop_build.py [--wait SECONDS]

Snakemake is told first, so that it begins no new job; then its jobs are. An answering job lets running
answers finish for `engine.stop_grace` seconds, training and capturing end at their last saved step. What
was finished is in the store, and the same command goes on from there. Nothing is killed: what has not
ended after the wait is named, and status 1 says so. A build in a container is stopped in there: `make
stop`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from eyrie.console import run_command, start_log
from unlock import running_builds

_DEFAULT_WAIT = 180.0
_LOOK_SECONDS = 0.5
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wait", type=float, default=_DEFAULT_WAIT, help="seconds until it gives up waiting")
    arguments = parser.parse_args()
    log = start_log("stop_build", None)
    if not stop(Path.cwd(), arguments.wait, log):
        sys.exit(1)


def stop(folder: Path, wait: float, log: logging.Logger) -> bool:
    """End the builds that run in a folder; returns whether they have ended."""
    builds = builds_in(folder)
    if not builds:
        log.info("no build is running in %s", folder)
        return True
    for build in builds:
        _tell(build, log)
    left = _await_end(builds, time.monotonic() + wait, log)
    for process in left:
        log.error("process %d has not ended after %.0f s: %s", process.pid, wait, _words(process))
    if not left:
        log.info("the build has ended; the same command goes on from what was finished")
    return not left


def _await_end(
    builds: Sequence[psutil.Process], deadline: float, log: logging.Logger
) -> list[psutil.Process]:
    """Tell the builds' jobs, too, and wait; returns what has not ended. A job may be on its way still."""
    told: set[psutil.Process] = set()
    while True:
        for job in {job for build in builds for job in jobs_of(build)} - told:
            _tell(job, log)
            told.add(job)
        patience = max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
        _, left = psutil.wait_procs([*builds, *told], timeout=patience)
        if not left or time.monotonic() >= deadline:
            return left


def builds_in(folder: Path) -> list[psutil.Process]:
    """The processes that run Snakemake in a folder."""
    found = []
    for pid in running_builds(folder):
        try:
            process = psutil.Process(pid)
            if _runs_snakemake(process):
                found.append(process)
        except _GONE:
            continue
    return found


def jobs_of(build: psutil.Process) -> list[psutil.Process]:
    """The stages' commands that a build has started, without what they have started themselves."""
    try:
        below = build.children(recursive=True)
    except _GONE:
        return []
    return [process for process in below if _is_command(process)]


def _tell(process: psutil.Process, log: logging.Logger) -> None:
    try:
        log.info("SIGTERM to process %d: %s", process.pid, _words(process))
        process.terminate()
    except _GONE:
        return


def _runs_snakemake(process: psutil.Process) -> bool:
    return "snakemake" in [os.path.basename(word) for word in process.cmdline()[:3]]


def _is_command(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("scripts/") for word in process.cmdline())
    except _GONE:
        return False


def _words(process: psutil.Process) -> str:
    """A command's first words: the rest holds settings, and is long."""
    try:
        return " ".join(process.cmdline()[:3])
    except _GONE:
        return "(ended)"


if __name__ == "__main__":
    run_command(main)
