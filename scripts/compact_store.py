"""Rewrite the store's answer journals without torn and repeated lines.

    python scripts/compact_store.py --store work/store

A build never needs this: it reads past such lines. Nothing that a build would find is removed, and a journal
that is being written is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.console import run_command, start_log
from eyrie.journals import compact_journal


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="the store's folder")
    arguments = parser.parse_args()
    log = start_log("compact_store", None)
    for path in sorted(arguments.store.glob("answers/*/*.jsonl")):
        done = compact_journal(path)
        log.info("%s: kept %d rows, %d repeated, %d torn", path, done.kept, done.repeated, done.torn)


if __name__ == "__main__":
    run_command(main)
