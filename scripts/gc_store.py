"""List what the store holds and no result needs, with sizes; delete it only when told.

    python scripts/gc_store.py [--work DIR] [--config FILE ...] [--unfinished] [--delete]

Listed are shards of which no manifest names a sample, answers under a recipe that no ledger was made with,
trainings that no checkpoint came from, what verify_store.py set aside, and half-written files. Work that the
next run of a build would go on from (answers and states of datasets that have no target yet, trainings that
have not ended) is listed apart and kept, unless --unfinished says otherwise. Builds are those of --config and
the last one that ran; what belongs to any other target below the work folder is kept, too. Refused while a
build is running.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eyrie.budget import size_of
from eyrie.config import Config
from eyrie.config_files import read_config
from eyrie.console import run_command, start_log
from eyrie.errors import BuildError
from eyrie.garbage import Garbage, Item
from eyrie.journals import writers_shut_out
from unlock import LOCKS, running_builds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of all results; by default that of config.yaml")
    parser.add_argument(
        "--config",
        type=Path,
        nargs="+",
        default=[Path("config.yaml")],
        help="builds whose unfinished work stays",
    )
    parser.add_argument("--unfinished", action="store_true", help="unfinished work is garbage, too")
    parser.add_argument("--delete", action="store_true", help="delete what is listed as garbage")
    arguments = parser.parse_args()
    log = start_log("gc_store", None)
    configs = [read_config([path]) for path in arguments.config]
    work = arguments.work or configs[0].work
    garbage = Garbage(work, configs + _last_build(work))
    refuse_beside_a_build(garbage)
    items = garbage.items()
    kept = [] if arguments.unfinished else [item for item in items if item.unfinished]
    doomed = [item for item in items if item not in kept]
    show("no result needs", doomed)
    show("unfinished, kept unless --unfinished", kept)
    if arguments.delete:
        garbage.delete(doomed)
        log.info("deleted %s", size_of(sum(item.size for item in doomed)))
    elif doomed:
        log.info("nothing was deleted; --delete does")


def show(title: str, items: Sequence[Item]) -> None:
    """Print items with their sizes, and the total."""
    print(f"{title}: {len(items)}, {size_of(sum(item.size for item in items))}")
    for item in items:
        print(f"  {size_of(item.size):>10}  {item.path}: {item.unfinished or item.why}")


def refuse_beside_a_build(garbage: Garbage) -> None:
    """Raise BuildError or StoreError where a build is running, or may be."""
    running = running_builds(Path.cwd())
    if running:
        raise BuildError(f"a build is running here (process {running[0]}). Wait for it, or stop it.")
    if LOCKS.is_dir() and any(LOCKS.iterdir()):
        raise BuildError(
            f"{LOCKS} holds a build's lock. Wait for the build; `make unlock` clears a dead one's."
        )
    with writers_shut_out(garbage.journals()):
        pass


def _last_build(work: Path) -> list[Config]:
    """The configuration that the last build here ran with, whatever its files say by now."""
    path = work / "config.json"
    return [read_config([path])] if path.exists() else []


if __name__ == "__main__":
    run_command(main)
