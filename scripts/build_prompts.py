"""Read a dataset's raw files into prompts, or into native conversations whose answers are kept.

Every row that is read is kept or counted under a reason. Rows are written by id, which is a hash of the
prompt alone, so neither the order of the file nor its answers move a row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from eyrie.code_inputs import code_digest
from eyrie.config import DatasetSettings, parse_settings
from eyrie.console import run_command, start_log
from eyrie.prompts import Prompts
from eyrie.provenance import manifest_header


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--settings", required=True, help="the dataset's entry in the configuration, as JSON")
    parser.add_argument("--raw", type=Path, required=True, help="source.json beside the raw files")
    parser.add_argument("--out", type=Path, required=True, help="prompts.jsonl or conversations.jsonl")
    parser.add_argument("--ledger", type=Path, required=True, help="counts of rows kept and skipped")
    parser.add_argument("--rejects", type=Path, required=True, help="the rows that were skipped, and why")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args()
    log = start_log("build_prompts", arguments.log)
    start = time.monotonic()

    settings = parse_settings(DatasetSettings, arguments.settings)
    made_by = manifest_header("prompts", json.loads(arguments.settings), [arguments.raw])
    made_by["code"] = code_digest("build_prompts", settings.layout)
    prompts = Prompts(arguments.dataset, settings, arguments.raw, made_by)
    ledger = prompts.write(arguments.out, arguments.ledger, arguments.rejects)

    seconds = time.monotonic() - start
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(ledger.skipped.items())) or "none"
    log.info(
        "%s: %d rows read, %d kept; skipped: %s; %.1f s, %.0f rows/s",
        *(arguments.dataset, ledger.rows, ledger.kept, skipped, seconds, ledger.rows / max(seconds, 1e-9)),
    )


if __name__ == "__main__":
    run_command(main)
