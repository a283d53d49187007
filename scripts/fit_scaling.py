"""Fit acceptance length against training tokens, over drafters of nested shares of the training groups.

Inputs: training.json and acceptance.json of each drafter, the whole build's among them, and evaluation.json,
which says where the drafter breaks even. Output: scaling.json.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eyrie.console import run_command, start_log
from eyrie.gates import GateError
from eyrie.provenance import manifest_header
from eyrie.records import read_json, write_json
from eyrie.scaling import Point, scaling_figures

_BOUNDS = ("tokens", "low", "high")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainings", type=Path, nargs="+", required=True, help="training.json of each")
    parser.add_argument("--acceptances", type=Path, nargs="+", required=True, help="and acceptance.json")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json of the whole")
    parser.add_argument(
        "--recipe", required=True, help='JSON: {"version", "draft_tokens": 3, "acceptance_lengths": [2.0]}'
    )
    parser.add_argument("--out", type=Path, required=True, help="scaling.json")
    parser.add_argument("--log", type=Path, help="log file")
    arguments = parser.parse_args()
    log = start_log("fit_scaling", arguments.log)
    recipe = json.loads(arguments.recipe)
    length = str(recipe["draft_tokens"])

    points = read_points(arguments.trainings, arguments.acceptances, length)
    pays = read_json(arguments.evaluation).get("pays")
    figures = scaling_figures(
        points,
        recipe["draft_tokens"],
        recipe["acceptance_lengths"],
        None if pays is None else pays["break_even"].get(length),
    )
    parents = [*arguments.trainings, *arguments.acceptances, arguments.evaluation]
    write_json(arguments.out, manifest_header("scaling", recipe, parents, ["numpy"]) | figures)
    _log_figures(log, figures)


def read_points(trainings: Sequence[Path], acceptances: Sequence[Path], length: str) -> list[Point]:
    """The points by rising tokens. Raises GateError where they can't be compared with one another.

    length: of the drafts.
    """
    points, names = [], []
    for training_path, acceptance_path in zip(trainings, acceptances, strict=True):
        training, rows = read_json(training_path), read_json(acceptance_path)["by_group"][length]
        points.append(
            Point(
                share=training["recipe"].get("group_share", "1"),
                groups=training["train_groups"],
                tokens=training["counts"]["train_candidates"],
                sums=np.array([row[2:] for row in rows], dtype=np.float64),
            )
        )
        names.append([row[:2] for row in rows])
    if any(name != names[0] for name in names):
        raise GateError(
            "the shares' drafters were judged on different held-out groups\n"
            "  expected the same for all; run the scaling target again"
        )
    points.sort(key=lambda point: point.tokens)
    repeated = [one for one, other in pairwise(points) if one.tokens == other.tokens]
    if repeated:
        raise GateError(
            f"a share of {repeated[0].share} of the training groups holds as many tokens as the next larger "
            f"one, {repeated[0].tokens}\n  expected more in each\n"
            "  change: scaling.shares farther apart, or more samples"
        )
    return points


def _log_figures(log: logging.Logger, figures: Mapping[str, Any]) -> None:
    for point in figures["points"]:
        log.info(
            "%6s of the groups: %7d, %9d tokens: %.3f (%.3f to %.3f)",
            *(point[name] for name in ("share", "groups", "tokens", "acceptance_length", "low", "high")),
        )
    log.info("fit: %s with %s", figures["fit"]["form"], figures["fit"]["parameters"])
    needed = figures["needed"]["acceptance_length"]
    if figures["needed"]["break_even"] is not None:
        needed = {**needed, "break-even": figures["needed"]["break_even"]}
    for length, tokens in needed.items():
        told = ["out of reach" if tokens[name] is None else f"{tokens[name]:,}" for name in _BOUNDS]
        log.info("tokens for %s: %s (%s to %s)", length, *told)
    last = figures["prediction_of_last"]
    log.info(
        "the last point as the earlier ones predict it: %.3f (%.3f to %.3f), in truth %.3f",
        *(last[name] for name in ("predicted", "low", "high", "truth")),
    )


if __name__ == "__main__":
    run_command(main)
