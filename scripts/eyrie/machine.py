"""What can be asked of the machine that a build is to run on; tests put another in its place."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyrie.budget import free_bytes

_SECONDS = 60.0


@dataclass(frozen=True)
class Machine:
    """This machine. root: where /proc, /sys and /dev are looked for."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Status and output of a command; 127 where there is no such command."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SECONDS,
            )
        except FileNotFoundError:
            return 127, ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return 126, str(error)
        return done.returncode, done.stdout

    def has(self, command: str) -> bool:
        """Whether there is such a command."""
        return shutil.which(command) is not None

    def read(self, path: str) -> str | None:
        """The text of a file of the kernel; None where it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def limit(self, name: str) -> int:
        """A soft limit of this process, such as NOFILE; -1 is none."""
        return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]

    def free(self, folder: Path) -> int:
        """Bytes free where a folder lies, or will lie."""
        return free_bytes(folder)

    def size(self, folder: str) -> int | None:
        """Bytes that a file system takes in all; None where there is none."""
        path = self.root / folder.lstrip("/")
        return shutil.disk_usage(path).total if path.exists() else None

    def answers(self, host: str, port: int) -> bool:
        """Whether somebody listens there."""
        try:
            with socket.create_connection((host, port), timeout=3.0):
                return True
        except OSError:
            return False

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def why_not_on_the_hub(self, hub_id: str, revision: str) -> str | None:
        """Why a dataset can't be had from the hub at a commit, in words; None where it can."""
        if importlib.util.find_spec("huggingface_hub") is None:
            return "huggingface_hub is not installed"
        import huggingface_hub  # noqa: PLC0415 - only sources on the hub need it

        try:
            huggingface_hub.HfApi().dataset_info(hub_id, revision=revision, timeout=20.0)
        except Exception as error:
            # Whatever it is (no network, no such dataset, terms not accepted), its first line tells.
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None
