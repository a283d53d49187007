"""Look the packages pinned in envs/ up in a database of known vulnerabilities.

    make audit

Each file is looked up as it is, without resolving or installing anything. The status is 0 where nothing was
found, 1 where something was, and 2 where the database did not answer for every package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def audit(file: Path) -> tuple[int, str]:
    """Status and words of one file's look-up."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(file), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "--progress-spinner", "off", "--timeout", "20", "--format", "json"],
        capture_output=True,
        text=True,
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return 2, f"NOT CHECKED: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"
    return judged(found)


def judged(found: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """Status and words for what pip-audit tells of each package.

    One that the database does not know is passed over by pip-audit, with a status as if it were good.
    """
    skipped = [one["name"] for one in found if "skip_reason" in one]
    faults = [
        f"  {one['name']} {one['version']}: {fault['id']}, mended in {fault['fix_versions'] or 'no version'}"
        for one in found
        for fault in one.get("vulns", ())
    ]
    if faults:
        return 1, "\n".join([f"{len(faults)} known vulnerabilities", *faults])
    if skipped:
        return (
            2,
            f"NOT CHECKED: {len(skipped)} of {len(found)} packages (no answer for {skipped[0]} and the like)",
        )
    return 0, f"{len(found)} packages, no known vulnerability"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="requirement files; by default all of envs/")
    arguments = parser.parse_args()
    worst = 0
    for file in arguments.files or sorted(Path("envs").glob("*.txt")):
        status, text = audit(file)
        print(f"{file}: {text}", flush=True)
        worst = max(worst, status)
    sys.exit(worst)


if __name__ == "__main__":
    main()
