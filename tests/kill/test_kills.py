"""SIGKILL at random moments, to the job, to Snakemake and to the server; after each the build is run again.

EYRIE_KILLS is how often (5 by default). The server stands in for vLLM; the target's tokenizer, the job and
Snakemake are the real ones. The answers come slowly enough that each kill hits some that are on their way.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from workspace import ROOT, Workspace, _environment, tiny_workspace

KILLS = int(os.environ.get("EYRIE_KILLS", "5"))
IN_FLIGHT = 6
# Of many kills each must find prompts that have no answer yet.
DELAY = 0.5 if KILLS <= 10 else 12.0
DATASETS = ("openthoughts", "sharegpt")
VICTIMS = ("job", "snakemake", "server")
DATASETS = ("openthoughts", "sharegpt")
VICTIMS = ("job", "snakemake", "server")
# Asked and not yet in the journal: those on their way, and as many again that came back meanwhile.
UNSAFE = len(DATASETS) * 2 * IN_FLIGHT

pytestmark = pytest.mark.build


def test_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    made = tiny_workspace(tmp_path / "killed")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    write_config(made, port)
    # All that comes before the answers, so that the kills hit those.
    made.build("prompts", "work/tiny/target.json", config="kills.yaml")
    undisturbed = made.copy(tmp_path / "undisturbed")
    target = json.loads(made.read("work/tiny/target.json"))
    server = Server(port, target, undisturbed.folder / "asked.txt")
    with server:
        undisturbed.build("responses", config="kills.yaml")
    expected = rows(undisturbed)
    assert set(server.asked().values()) == {1}

    draw = random.Random(int(os.environ.get("EYRIE_KILL_SEED", "0")))
    server = Server(port, target, made.folder / "asked.txt")
    with server:
        victims = [VICTIMS[number % 3] for number in range(KILLS)]
        lost = sum(kill_once(made, server, victim, draw) for victim in victims)
        before = set(journal(made))
        made.run("scripts/unlock.py")
        made.build("responses", config="kills.yaml")
    assert rows(made) == expected
    lines = journal(made)
    assert set(lines) >= before
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == sum(map(len, expected.values()))
    again = sum(times - 1 for times in server.asked().values())
    assert again <= lost
    assert processes_in(made.folder) == []


def kill_once(made: Workspace, server: Server, victim: str, draw: random.Random) -> int:
    """Start the build and kill the victim a random time after the first answer of this run; nothing is ended
    gently, and nothing is cleaned up. Returns how many answers were lost: asked, and not in the journal.

    When the server is killed it is started again and the build goes on, until Snakemake is killed, too.
    """
    lost = 0
    before = len(journal(made))
    made.run("scripts/unlock.py")
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "responses", "--configfile", "kills.yaml"]
    with subprocess.Popen(
        command, cwd=made.folder, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as build:
        deadline = time.monotonic() + 600
        while len(journal(made)) <= before and build.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 0.5))
        if victim == "server":
            server.kill()
            lost += unsafe(made, server)
            time.sleep(draw.uniform(0.0, 0.5))
            server.start()
            time.sleep(draw.uniform(0.0, 0.5))
        if victim == "job":
            for job in jobs_of(build.pid):
                job.kill()
        else:
            build.kill()
        build.wait(timeout=600)
    # A job whose build is gone ends by itself, within the grace that its answers have.
    deadline = time.monotonic() + 120
    while left := processes_in(made.folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return lost + unsafe(made, server)


def unsafe(made: Workspace, server: Server) -> int:
    """How many prompts the server was asked that have no answer in the journal."""
    asked, safe = set(server.asked()), {json.loads(line)["key"] for line in journal(made)}
    assert len(asked - safe) <= UNSAFE, f"{len(asked)} asked, {len(asked & safe)} of {len(safe)} safe"
    return len(asked - safe)


class Server:
    """The stand-in as a process on a fixed port, whose record outlives it."""

    def __init__(self, port: int, target: dict[str, object], record: Path) -> None:
        self._record = record
        settings = {
            "vocab_size": target["vocab_size"],
            "eos_ids": target["eos_ids"],
            "model": "tiny",
            "delay": DELAY,
            "record": str(record),
        }
        self._command = [sys.executable, str(ROOT / "tests/fault_server.py"), "--port", str(port)]
        self._command += ["--settings", json.dumps(settings)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, cwd="/")
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith(b"http://")

    def kill(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def asked(self) -> Counter[str]:
        """How often each prompt was asked, by all of its lives."""
        words = (line.split() for line in self._record.read_text().splitlines())
        return Counter(name for event, name in words if event == "asked")


def write_config(made: Workspace, port: int) -> None:
    """The tiny build, answered by a server, with nothing in it but what is needed for its answers."""
    config = yaml.safe_load(made.read("configs/tiny.yaml"))
    config["engine"] = {
        "kind": "vllm",
        "urls": [f"http://127.0.0.1:{port}"],
        "backoff": 0.05,
        "retries": 30,
        "ready_timeout": 120.0,
        "request_timeout": 120.0,
        "stop_grace": 1.0,
    }
    for sampling in config["partitions"].values():
        sampling["max_in_flight"] = IN_FLIGHT
    config["datasets"] = {name: {**config["datasets"][name], "samples": 80} for name in DATASETS}
    (made.folder / "kills.yaml").write_text(yaml.safe_dump(config))


def rows(made: Workspace) -> dict[str, list[bytes]]:
    folder = made.folder / "work/tiny/tokenized"
    return {
        name: (folder / name / "tokenized_data.jsonl").read_bytes().splitlines(keepends=True)
        for name in DATASETS
    }


def journal(made: Workspace) -> list[bytes]:
    return [line for lines in made.journal_lines().values() for line in lines]


def jobs_of(pid: int) -> Iterator[psutil.Process]:
    """The answering jobs below a process."""
    with suppress(psutil.NoSuchProcess):  # all was answered, and the build ended
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                if any("answer_prompts.py" in word for word in child.cmdline()):
                    yield child


def processes_in(folder: Path) -> list[str]:
    """The processes that work in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder:
                found.append(f"{process.pid} {process.cmdline()}")
    return found
