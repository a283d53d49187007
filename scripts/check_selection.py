"""Compare how many rows the datasets selected together with how many the build expects.

Inputs: the ledger of each dataset's prompts. Output: selection.json, the counts by kind of dataset. Each
dataset may be right by itself while their sum is not what the configuration promises.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.config import CountRange, Settings, parse_settings
from eyrie.console import run_command, start_log
from eyrie.gates import check_selection
from eyrie.records import read_json, write_json


class KindRecipe(Settings):
    """What is expected of the datasets of a kind."""

    expected: CountRange
    datasets: list[str]


class SelectionRecipe(Settings):
    """What is expected of each kind of which something is."""

    native: KindRecipe | None = None
    prompts: KindRecipe | None = None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ledgers", type=Path, nargs="+", required=True, help="ledger.json of the prompts")
    parser.add_argument("--recipe", required=True, help="JSON: expected number and datasets, by kind")
    parser.add_argument("--out", type=Path, required=True, help="selection.json")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args()
    log = start_log("check_selection", arguments.log)

    recipe = parse_settings(SelectionRecipe, arguments.recipe)
    kept = {ledger["dataset"]: ledger["kept"] for ledger in map(read_json, arguments.ledgers)}
    counts = {}
    for kind, asked in (("native", recipe.native), ("prompts", recipe.prompts)):
        if asked is not None:
            counts[kind] = {name: kept[name] for name in asked.datasets}
            check_selection(kind, counts[kind], asked.expected)
    write_json(arguments.out, {"stage": "selection", "kept": counts})
    log.info("%s", ", ".join(f"{sum(rows.values()):,} {kind}" for kind, rows in counts.items()))


if __name__ == "__main__":
    run_command(main)
