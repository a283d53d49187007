"""Check what a build needs of this machine, before it needs it: each fault with its mend.

    python scripts/preflight.py -- --configfile configs/kimi-k2.5.yaml
    make preflight ARGS="--profile profiles/gpu-host --configfile configs/kimi-k2.5.yaml"

After -- stands what Snakemake would be started with. Nothing is started or changed. The status is 0 where
nothing stands against the build (warnings do not), 1 where a check found a fault, or the configuration is
wrong.
"""

from __future__ import annotations

import argparse
import sys

from eyrie.config_files import read_config_of
from eyrie.console import run_command
from eyrie.machine import Machine
from eyrie.planning import Assumptions, plan_build
from eyrie.preflight import Asked, all_findings


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("snakemake", nargs="*", help="after --: what Snakemake is started with")
    arguments = parser.parse_args()
    config = read_config_of(arguments.snakemake)
    findings = all_findings(Asked(config, plan_build(config, Assumptions()), Machine()))
    for one in findings:
        print(f"{one.state:7}  {one.name}: {one.seen}" + (f"\n         mend: {one.mend}" if one.mend else ""))
    faults = sum(one.state == "fault" for one in findings)
    print(f"{faults} faults, {sum(one.state == 'warning' for one in findings)} warnings")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    run_command(main)
