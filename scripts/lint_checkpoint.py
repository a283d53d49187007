"""Check a drafter's checkpoint for what engines would pass over in silence.

    python scripts/lint_checkpoint.py DIR --target models/TARGET [--tokenized tokenized_data.jsonl ...]

Names, shapes and dtypes of all tensors, both vocabulary maps, the configuration's keys, whether the head is
random and the embedding, if there is one, the target's. Each fault is printed with what vLLM and SGLang would
make of it. With --tokenized, max_position_embeddings must reach the longest sample. Exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eyrie.console import run_command
from eyrie.eagle3.linting import lint, read_lint_target
from eyrie.records import read_jsonl


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the checkpoint's folder")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder")
    parser.add_argument("--tokenized", type=Path, nargs="+", default=[], help="tokenized_data.jsonl files")
    arguments = parser.parse_args()
    lengths = (len(row["input_ids"]) for path in arguments.tokenized for row in read_jsonl(path))
    faults = lint(arguments.folder, read_lint_target(arguments.target), max(lengths, default=None))
    for fault in faults:
        print(fault.in_words())
    if faults:
        sys.exit(1)
    print(f"{arguments.folder}: no fault found")


if __name__ == "__main__":
    run_command(main)
