"""A docker daemon of the tests' own, and the commands of the Makefile in it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from workspace import ROOT

# The client of Debian's docker.io, wherever another one comes first.
CLIENT = "/usr/bin/docker"
BASE, IMAGE, NAME = "localhost/base:test", "eyrie", "eyrie"
# Who builds in the container, neither root nor a user that the image knows.
CALLER = 12345
REVISION = "0123456789abcdef0123456789abcdef01234567"
SECRET = "hf_not_to_be_seen"
WAIT = 1500.0
# Thread counts are the configuration's and this one, and kernels are chosen alike, on both sides.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
NUMERICAL = ("OPENBLAS_CORETYPE",)
# Says that docker may be asked for GPUs, as the real one does, and injects nothing.
_HOOK = "#!/bin/sh\ncat >/dev/null\n"


@dataclass(frozen=True)
class Build:
    """A build in a container, started by `make run`."""

    process: subprocess.Popen[bytes]
    output: Path

    def end(self) -> tuple[int, str]:
        """Wait for its end; returns make's status and all that was said."""
        status = self.process.wait(timeout=WAIT)
        return status, self.output.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Image:
    """An image in a running docker."""

    socket: str
    digest: str

    def docker(self, *arguments: str, check: bool = True) -> str:
        """A docker command; returns what it printed."""
        command = [CLIENT, "--host", self.socket, *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True).stdout.strip()

    def build(self, folder: Path, arguments: str) -> Build:
        """`make run` in a folder, without a network, by a caller who isn't root."""
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "DOCKER": CLIENT, "DOCKER_HOST": self.socket}
        environment |= {name: os.environ[name] for name in NUMERICAL if name in os.environ}
        environment |= ENVIRONMENT | {"HF_TOKEN": SECRET}
        output = folder.parent / f"{folder.name}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["make", "run", f"ARGS={arguments}", 'RUN_ARGS=--docker-args "--network none"'],
                cwd=folder,
                env=environment,
                user=CALLER,
                group=CALLER,
                extra_groups=[],
                stdout=file,
                stderr=file,
            )
        return Build(process, output)


@contextmanager
def dockerd(state: Path) -> Iterator[str]:
    """Run a docker daemon without a network; yields its socket."""
    hooks = state / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "nvidia-container-runtime-hook").write_text(_HOOK)
    (hooks / "nvidia-container-runtime-hook").chmod(0o755)
    where = ["--data-root", state / "data", "--exec-root", state / "exec", "--pidfile", state / "pid"]
    network = ["--iptables=false", "--ip-masq=false", "--bridge=none"]
    socket = f"unix://{state}/socket"
    environment = {**os.environ, "PATH": f"{hooks}:{os.environ['PATH']}"}
    with (state / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *where, "--host", socket, *network], stdout=log, stderr=log, env=environment
        )
    try:
        _await_docker(socket, daemon, state / "log")
        (state / "socket").chmod(0o666)
        yield socket
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=120)
        for mount in (state / "exec/netns").glob("*"):
            subprocess.run(["umount", mount], check=False, capture_output=True)


def _await_docker(socket: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the daemon answers. One that ends at once can't run on this kind of machine."""
    deadline = time.monotonic() + 120
    while subprocess.run([CLIENT, "--host", socket, "version"], capture_output=True).returncode != 0:
        if daemon.poll() is not None:
            pytest.skip(f"dockerd ended with {daemon.returncode}: {log.read_text()[-400:]}")
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)


def quietly(*command: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command; returns what it said, and shows that when it fails."""
    everything = {**os.environ, **(environment or {})}
    result = subprocess.run(command, cwd=cwd, env=everything, capture_output=True, text=True, timeout=1800)
    said = result.stdout + result.stderr
    assert result.returncode == 0, f"{command} ended with {result.returncode}\n{said[-12000:]}"
    return result.stdout
