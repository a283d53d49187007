"""Clear the lock that a killed build left in this folder; refuse while a build is running in it.

Snakemake keeps its lock as files and can't tell whether who wrote them lives. A build that was killed would
block every later one; a build that runs must not lose its lock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from eyrie.build_lock import nobody_builds

LOCKS = Path(".snakemake/locks")
# Commands that are about builds and write none of their files.
_ABOUT_BUILDS = {
    b"unlock.py",
    b"stop_build.py",
    b"check_health.py",
    b"enter_container.py",
    b"run_container.py",
}


def main() -> None:
    """Unlock the current folder."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not LOCKS.is_dir() or not any(LOCKS.iterdir()):
        return
    running = running_builds(Path.cwd())
    if running:
        numbers = ", ".join(str(pid) for pid in running)
        sys.exit(
            f"A build is running in {Path.cwd()} (process {numbers}).\n"
            "Expected none. Wait for it, or stop it with Ctrl-C, and run again."
        )
    with nobody_builds() as alone:
        if not alone:
            sys.exit(
                f"A build in a container, or on another host, holds {Path.cwd()}.\n"
                "Expected none. Wait for it, or stop it (`make stop`), and run again."
            )
        shutil.rmtree(LOCKS)


def running_builds(folder: Path) -> list[int]:
    """The other processes that run Snakemake, or a stage's command, in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            here = (entry / "cwd").resolve() == folder.resolve()
        except OSError:
            continue  # It ended meanwhile, or is another user's.
        if here and _builds(words):
            found.append(int(entry.name))
    return sorted(found)


def _builds(words: list[bytes]) -> bool:
    names = [os.path.basename(word) for word in words[:3]]
    stage = any(word.startswith(b"scripts/") for word in words[:3])
    return b"snakemake" in names or (stage and not _ABOUT_BUILDS & set(names))


if __name__ == "__main__":
    main()
