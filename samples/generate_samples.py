"""Write the raw sample datasets: nine files in their datasets' own layouts, and expected.json.

    python samples/generate_samples.py [--out samples]

The same bytes come out every time: each dataset has its own seeded random numbers, and no clock, network
or model is asked. The tenth file, kimi_native.jsonl, is made by answer_native.py. expected.json says for
each of the ten how many rows are usable, how many must be skipped for which reason, and how often each
trap was planted. These counts are kept while the rows are made, not read back from them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from generator import (
    deepswe_kimi,
    glaive,
    kimi_native,
    magicoder,
    mixture_of_thoughts,
    opencodeinstruct,
    openthoughts,
    sharegpt,
    swe_agent,
    ultrachat,
)
from generator.common import Row, write_text

SEED = 20250
DATASETS = {
    "deepswe_kimi": deepswe_kimi.build,
    "glaive": glaive.build,
    "opencodeinstruct": opencodeinstruct.build,
    "magicoder": magicoder.build,
    "mixture_of_thoughts": mixture_of_thoughts.build,
    "openthoughts": openthoughts.build,
    "ultrachat": ultrachat.build,
    "sharegpt": sharegpt.build,
    "swe_agent": swe_agent.build,
}


def generate(folder: Path) -> dict[str, Row]:
    """Write the nine files and expected.json into the folder and return what is expected."""
    folder.mkdir(parents=True, exist_ok=True)
    expected: dict[str, Row] = {}
    for name, build in DATASETS.items():
        sample = build(random.Random(f"{SEED} {name}"))
        sample.write(folder)
        expected[name] = sample.tally.as_dict()
    expected["kimi_native"] = kimi_native.tally().as_dict()
    write_text(folder / "expected.json", json.dumps(expected, indent=2) + "\n")
    return expected


def main() -> None:
    """Parse the command line, generate and print one line a dataset."""
    parser = argparse.ArgumentParser(description="Write the raw sample datasets.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    arguments = parser.parse_args()
    for name, counts in generate(arguments.out).items():
        skipped = sum(counts["skipped"].values())
        print(f"{name:20} {counts['rows']:4} rows, {counts['usable']:3} usable, {skipped:2} to be skipped")


if __name__ == "__main__":
    main()
