"""Write the model card of a checkpoint: README.md in its folder, with the head that the hub reads.

It comes after the evaluation, since its acceptance table is the evaluation's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.console import run_command, start_log
from eyrie.model_card import CardInputs, model_card
from eyrie.records import RecordError, atomic_write, ledgers_by_dataset, read_json
from eyrie.target import read_text_config


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target's files")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json")
    parser.add_argument("--ledgers", type=Path, nargs="+", required=True, help="ledgers of both row stages")
    parser.add_argument("--recipe", required=True, help="JSON: what the card tells of the configuration")
    parser.add_argument("--out", type=Path, required=True, help="README.md")
    parser.add_argument("--log", type=Path, help="log file")
    return parser.parse_args()


def read_inputs(arguments: argparse.Namespace) -> CardInputs:
    """All that the card is made of. Raises RecordError where a dataset's ledger is missing."""
    recipe = json.loads(arguments.recipe)
    rows, samples = ledgers_by_dataset(read_json(path) for path in arguments.ledgers)
    missing = sorted(recipe["datasets"].keys() - (rows.keys() & samples.keys()))
    if missing:
        raise RecordError(
            f"the model card lacks ledgers of {', '.join(missing)}: expected one of the rows read and one of "
            "the samples for each dataset"
        )
    return CardInputs(
        recipe=recipe,
        target=read_json(arguments.target),
        model_type=read_text_config(arguments.target_path).model_type,
        drafter=read_json(arguments.checkpoint / "config.json"),
        training=read_json(arguments.checkpoint / "training.json"),
        evaluation=read_json(arguments.evaluation),
        rows=rows,
        samples=samples,
    )


def main() -> None:
    """The command."""
    arguments = _arguments()
    log = start_log("write_card", arguments.log)
    card = model_card(read_inputs(arguments))
    with atomic_write(arguments.out) as file:
        file.write(card.encode())
    log.info("wrote %s", arguments.out)


if __name__ == "__main__":
    run_command(main)
