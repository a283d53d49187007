"""A copy of this repository to build in, as a fresh clone would be, and the words for what a build did."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = "configs/tiny.yaml"


@dataclass(frozen=True)
class Workspace:
    """A folder with the repository's files in it."""

    folder: Path

    @classmethod
    def clone(cls, folder: Path) -> Workspace:
        """The files that git tracks or would track, in their present state."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        return cls(folder)

    def copy(self, folder: Path) -> Workspace:
        """The whole folder with results, times and Snakemake's own notes."""
        shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        return Workspace(folder)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a Python module or script in the folder; its output is shown when it fails unexpectedly."""
        result = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        if check and result.returncode != 0:
            raise AssertionError(
                f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
            )
        return result

    def build(self, *arguments: str, config: str = TINY, check: bool = True) -> str:
        """A build; returns all that it said."""
        result = self.run(*_snakemake(config, *arguments), check=check)
        assert check or result.returncode != 0, "expected the build to fail"
        return result.stdout + result.stderr

    def plan(self, *arguments: str, config: str = TINY) -> set[tuple[str, str]]:
        """The jobs (rule, dataset) that a build would run now, without the rules that only collect."""
        said = self.build("--dry-run", *arguments, config=config)
        jobs = set()
        for block in re.split(r"\n(?=(?:local)?rule )", said)[1:]:
            rule = re.match(r"(?:local)?rule (\w+):", block)
            dataset = re.search(r"wildcards: dataset=(\w+)", block)
            assert rule is not None
            if "    output: " in block:
                jobs.add((rule[1], dataset[1] if dataset else ""))
        return jobs

    def build_until(self, reached: Callable[[], bool], *arguments: str) -> None:
        """Start a build, and kill its whole process group without warning once `reached` says so."""
        with subprocess.Popen(
            [sys.executable, *_snakemake(TINY, *arguments)],
            cwd=self.folder,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            deadline = time.monotonic() + 300
            while not reached():
                assert process.poll() is None, "the build ended before it could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)

    def read(self, name: str) -> str:
        """A file's text."""
        return (self.folder / name).read_text(encoding="utf-8")

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that stands in a file at least once."""
        text = self.read(name)
        assert old in text, f"{old!r} is not in {name}"
        (self.folder / name).write_text(text.replace(old, new), encoding="utf-8")

    def results(self) -> dict[str, bytes]:
        """The bytes of all targets: what is below work/ but store, logs and times."""
        work = self.folder / "work"
        return {
            str(path.relative_to(work)): path.read_bytes()
            for path in sorted(work.rglob("*"))
            if path.is_file() and path.relative_to(work).parts[0] not in {"store", "logs", "benchmarks"}
        }

    def journal_lines(self) -> dict[str, list[bytes]]:
        """The whole lines of every answers journal."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes().split(b"\n")[:-1]
            for path in sorted((self.folder / "work/store/answers").glob("*/*.jsonl"))
        }


def tiny_workspace(folder: Path) -> Workspace:
    """A clone with the tiny target in place."""
    workspace = Workspace.clone(folder)
    workspace.run("scripts/make_tiny_target.py", "--out", "models/tiny")
    return workspace


def jobs_of(dataset: str, rules: Iterable[str]) -> set[tuple[str, str]]:
    """The jobs of some rules for one dataset."""
    return {(rule, dataset) for rule in rules}


def _snakemake(config: str, *arguments: str) -> list[str]:
    return ["-m", "snakemake", "--cores", "2", *arguments, "--configfile", config]


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
