"""Who builds in a folder, seen from every container: each build holds a shared lock for as long as it lives.

Snakemake's own lock is files, which a killed build leaves. The kernel's lock ends with its holder, and is
seen from every container of the host that has the folder mounted, where processes are not.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(".snakemake/building")

_held: list[int] = []


def hold_while_building() -> None:
    """Hold this folder's lock until the process ends. Where files can't be locked, nothing is held."""
    LOCK.parent.mkdir(exist_ok=True)
    file = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError:  # a file system without locks
        os.close(file)
        return
    _held.append(file)


@contextmanager
def nobody_builds() -> Iterator[bool]:
    """Whether no build holds the folder's lock; one that begins within the block waits for its end."""
    if not LOCK.exists():
        yield True
        return
    file = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _taken(file)
    finally:
        os.close(file)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
