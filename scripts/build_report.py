"""Put a build's evidence on one HTML page that opens without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.console import run_command, start_log
from eyrie.records import atomic_write
from eyrie.report.inputs import read_build
from eyrie.report.page import render


def main() -> None:
    """Run the command."""
    args = _arguments()
    log = start_log("build_report", args.log)
    build = read_build(
        args.config,
        args.ledgers,
        args.manifests,
        args.vocabulary,
        args.training,
        args.evaluation,
        args.benchmarks,
    )
    page = render(build).encode()
    with atomic_write(args.out) as file:
        file.write(page)
    log.info("%d datasets, %.1f MB -> %s", len(build.datasets), len(page) / 1e6, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON of the whole configuration")
    parser.add_argument(
        "--ledgers", type=Path, nargs="+", required=True, help="ledger.json of prompts and of samples"
    )
    parser.add_argument(
        "--manifests", type=Path, nargs="+", required=True, help="manifest.json of each dataset's states"
    )
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocabulary.json")
    parser.add_argument("--training", type=Path, required=True, help="training.json of the checkpoint")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json")
    parser.add_argument(
        "--benchmarks", type=Path, help="folder of Snakemake's benchmark files, for wall times"
    )
    parser.add_argument("--out", type=Path, required=True, help="the page, report.html")
    parser.add_argument("--log", type=Path, help="also write the log there")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
