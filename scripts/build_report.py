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
    optional = {"acceptance": args.acceptance, "scaling": args.scaling, "serving": args.serving}
    build = read_build(
        args.config,
        args.ledgers,
        args.tokenized,
        args.manifests,
        args.vocabulary,
        args.checkpoint,
        args.training_log,
        args.evaluation,
        args.benchmarks,
        {name: path for name, path in optional.items() if path is not None},
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
        "--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl of each dataset"
    )
    parser.add_argument(
        "--manifests", type=Path, nargs="+", required=True, help="manifest.json of each dataset's states"
    )
    parser.add_argument("--vocabulary", type=Path, required=True, help="vocabulary.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--training-log", type=Path, required=True, help="training.jsonl")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json")
    parser.add_argument("--acceptance", type=Path, help="acceptance.json, where it was made")
    parser.add_argument("--scaling", type=Path, help="scaling.json, where it was made")
    parser.add_argument("--serving", type=Path, help="serving.json, where it was made")
    parser.add_argument(
        "--benchmarks", type=Path, help="folder of Snakemake's benchmark files, for wall times"
    )
    parser.add_argument("--out", type=Path, required=True, help="the page, report.html")
    parser.add_argument("--log", type=Path, help="also write the log there")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
