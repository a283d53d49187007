"""Read the whole store again and name what is damaged; set it aside, so that the next run makes it anew.

    python scripts/verify_store.py [--dry-run] [--work DIR]

One line a fault on standard output: file, sample and dataset, problem. Damaged shards go to store/damaged/
and the manifests that vouch for them are removed; the next run captures their samples and no others. Answers
and training states that can't be read are set aside, too. Status 1 where something was found, 0 where all is
well. With --dry-run nothing is changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from eyrie.config_files import read_config
from eyrie.console import run_command, start_log
from eyrie.store_check import StoreCheck


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of all results; by default that of config.yaml")
    parser.add_argument("--dry-run", action="store_true", help="only report")
    arguments = parser.parse_args()
    log = start_log("verify_store", None)
    # Several shards are read side by side; more threads for each would fight for the cores.
    torch.set_num_threads(1)
    check = StoreCheck(arguments.work or read_config([Path("config.yaml")]).work, log)
    check.run()
    for line in check.lines():
        print(line, flush=True)
    if not check.faults:
        log.info("all is well")
        return
    if not arguments.dry_run:
        check.mend()
        log.info("set aside what is damaged, below %s; run the build again", check.aside)
    sys.exit(1)


if __name__ == "__main__":
    run_command(main)
