"""Say whether the jobs of the build in this folder are alive: each has written to its log within an hour.

    python scripts/check_health.py [--quiet SECONDS]

The container's health check, and as good by hand. Jobs tell how far they are every few seconds, also while
they wait for a server that loads; one that has long been silent hangs. Status 1 names it; nothing is
ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil

from stop_build import builds_in, jobs_of

_DEFAULT_QUIET = 3600.0


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quiet", type=float, default=_DEFAULT_QUIET, help="seconds that a job's log may be silent"
    )
    arguments = parser.parse_args()
    silences = silent_seconds(Path.cwd())
    for log, seconds in sorted(silences.items()):
        print(f"{log}: last word {seconds:.0f} s ago")
    if not silences:
        print("no job is running")
    sys.exit(any(seconds > arguments.quiet for seconds in silences.values()))


def silent_seconds(folder: Path) -> dict[str, float]:
    """For each running job's log, the seconds since the job began or last wrote to it."""
    now = time.time()
    found = {}
    for job in (job for build in builds_in(folder) for job in jobs_of(build)):
        try:
            words, began = job.cmdline(), job.create_time()
        except psutil.NoSuchProcess:
            continue
        if "--log" in words[:-1]:
            log = words[words.index("--log") + 1]
            found[log] = now - max(began, _written(folder / log))
    return found


def _written(log: Path) -> float:
    try:
        return os.stat(log).st_mtime
    except FileNotFoundError:
        return 0.0


if __name__ == "__main__":
    main()
