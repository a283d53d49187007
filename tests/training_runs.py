"""Runs of train_drafter.py on a tiny build, in this process and by the command line."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train_drafter
from eyrie.console import run_command
from tiny_eagle3 import TinyBuild

ROOT = Path(__file__).resolve().parent.parent


def run(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    """Run the command here."""
    monkeypatch.setattr(sys, "argv", ["train_drafter.py", *arguments])
    train_drafter.main()


def command(arguments: Sequence[str], processes: int = 1) -> list[str]:
    """The command line that trains, by torchrun where there are several processes."""
    script = str(ROOT / "scripts/train_drafter.py")
    if processes == 1:
        return [sys.executable, script, *arguments]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, script, *arguments]


def start(arguments: Sequence[str], processes: int = 1) -> subprocess.Popen[str]:
    """Start the command as processes of their own, on one thread each."""
    return subprocess.Popen(
        command(arguments, processes),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def forked(arguments: Sequence[str], count: int, folder: Path) -> list[tuple[int, str]]:
    """The command in so many processes that train together, copies of this one: it has loaded torch already.

    Returns each one's exit status and what it said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    said = [folder / f"said-{rank}.txt" for rank in range(count)]
    processes = [
        context.Process(target=_train_as, args=(rank, count, port, arguments, said[rank]))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    return [(process.exitcode or 0, text.read_text()) for process, text in zip(processes, said, strict=True)]


def _train_as(rank: int, count: int, port: int, arguments: Sequence[str], said: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train_drafter.py", *arguments]
    with said.open("w") as sys.stderr:
        run_command(train_drafter.main)


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of a folder's files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def trained(build: TinyBuild) -> dict[str, torch.Tensor]:
    """The float32 weights of the one run in a build's store."""
    (path,) = build.store.glob("drafters/*/state.safetensors")
    tensors = load_file(path)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("best.", "exp_avg"))}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any two weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def settings(build: TinyBuild, **training: Any) -> None:
    """Change the build's training settings."""
    build.recipe["training"] |= training
