"""Look at a raw file: its columns, roles, figures and rows, the layout that reads it, and its entry.

The entry can be pasted into a configuration. Where two layouts would find different questions in the file,
both are listed and none is chosen (exit status 1).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from eyrie.console import run_command, start_log
from eyrie.detection import detect_format
from eyrie.inspection import Inspection
from eyrie.raw_files import Format


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="a raw file, perhaps compressed (.gz, .zst)")
    parser.add_argument(
        "--format", choices=get_args(Format), help="its format, where that is not to be guessed"
    )
    parser.add_argument("--rows", type=int, default=1_000, help="how many rows to look at (%(default)s)")
    arguments = parser.parse_args()
    start_log("inspect_raw", None)

    file_format: Format = arguments.format or detect_format(arguments.file)
    inspection = Inspection(arguments.file, file_format, arguments.rows)
    print(inspection.report())
    print(inspection.entry())


if __name__ == "__main__":
    run_command(main)
