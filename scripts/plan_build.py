"""Say what a build has still to do: its jobs and why, and requests, tokens, hours and bytes by dataset.

    python scripts/plan_build.py -- --cores all --configfile configs/kimi-k2.5.yaml
    make plan ARGS="--cores all --configfile configs/kimi-k2.5.yaml" PLAN="--rate 2500"

After -- stands what Snakemake is started with. A figure with ~ is an assumption or rests on one. Hours are
those of answering, at the rate of earlier runs of this work folder or at --rate; capturing and training have
no rate before they were run on the machine. Nothing is started or written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

from eyrie.budget import size_of
from eyrie.config_files import read_config_of
from eyrie.console import run_command
from eyrie.planning import Assumptions, BuildPlan, as_dict, plan_build, table

_RATES = (1_000.0, 2_000.0, 4_000.0)


def told(plan: BuildPlan) -> Iterator[str]:
    """The plan in lines."""
    head = ("dataset", "kind", "done", "rows", "answered", "to ask", "tokens to answer", "tokens to capture")
    rows = [
        (
            *(one.name, one.kind, one.done, str(one.rows), f"{one.answered:,}"),
            *(str(one.requests), str(one.answer_tokens), str(one.capture_tokens)),
        )
        for one in plan.datasets
    ]
    names = ("rows", "requests", "answer_tokens", "capture_tokens")
    all_rows, *sums = (str(plan.total(name)) for name in names)
    answered = f"{sum(one.answered for one in plan.datasets):,}"
    yield from table([head, *rows, ("in all", "", "", all_rows, answered, *sums)])
    yield ""
    yield f"answering  {_hours(plan)}"
    yield f"states     {_bytes(plan)}"
    yield f"training   {plan.training}; hours unknown before a run on this machine"
    yield from (f"note       {note}" for note in plan.notes)


def _hours(plan: BuildPlan) -> str:
    tokens = plan.total("answer_tokens")
    if not tokens.value:
        return "nothing to ask"
    if plan.rate is None:
        hours = ", ".join(f"{plan.hours(rate):,.0f} h at {rate:,.0f}" for rate in _RATES)
        return f"{tokens} tokens; no rate was measured here yet: {hours} tokens/s (--rate says yours)"
    hours_needed = plan.hours() or 0.0
    text = f"{tokens} tokens at {plan.rate:,.0f} tokens/s ({plan.rate_source}): {hours_needed:,.2f} h"
    return text + (f", {hours_needed * plan.gpus:,.0f} GPU hours on {plan.gpus} GPUs" if plan.gpus else "")


def _bytes(plan: BuildPlan) -> str:
    needed = plan.state_bytes()
    if needed is None:
        return "unknown: neither the target nor target.shape tells its hidden size"
    way = ""
    if plan.bytes_on_the_way:
        way = f" and {plan.bytes_on_the_way:,} on the way, which `make gc` frees"
    verdict = "fits" if plan.fits() else "DOES NOT FIT: move `work` to a larger disk, or see docs/gpu-host.md"
    return (
        f"{'~' if str(needed).startswith('~') else ''}{size_of(round(needed.value))} to write "
        f"({plan.bytes_per_token:,} bytes a token{way}); {size_of(plan.free)} free, of which "
        f"{size_of(plan.reserve)} stay: {verdict}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    usual = Assumptions()
    parser.add_argument(
        "--rate", type=float, help="tokens a second that all answering jobs generate together"
    )
    parser.add_argument("--prompt-tokens", type=int, default=usual.prompt_tokens, help="assumed of a prompt")
    parser.add_argument("--answer-tokens", type=int, default=usual.answer_tokens, help="assumed of an answer")
    parser.add_argument(
        "--native-tokens", type=int, default=usual.native_tokens, help="assumed of a native conversation"
    )
    parser.add_argument(
        "--json", action="store_true", help="the figures as one JSON object, without the jobs"
    )
    parser.add_argument("snakemake", nargs="*", help="after --: what Snakemake is started with")
    arguments = parser.parse_args()
    assumed = Assumptions(arguments.prompt_tokens, arguments.answer_tokens, arguments.native_tokens)
    plan = plan_build(read_config_of(arguments.snakemake), assumed, arguments.rate)
    if arguments.json:
        print(json.dumps(as_dict(plan)))
        return
    # Last, since --quiet takes all words behind it.
    command = [sys.executable, "-m", "snakemake", *arguments.snakemake, "--dry-run", "--quiet", "rules"]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    print("\n" + "\n".join(told(plan)))


if __name__ == "__main__":
    run_command(main)
