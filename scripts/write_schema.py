"""Write the JSON schema of a configuration file from the models in eyrie/config.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.config import json_schema
from eyrie.console import run_command
from eyrie.records import write_json


def main() -> None:
    """Write the schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    write_json(parser.parse_args().out, json_schema())


if __name__ == "__main__":
    run_command(main)
