"""SIGKILL to capture_states at random moments; after each it is run again. EYRIE_KILLS is how often (3)."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from eyrie.records import write_jsonl
from tiny_target import Stages

KILLS = int(os.environ.get("EYRIE_KILLS", "3"))
# Two samples a shard. Each kill must find some that are not captured, and a few are lost with it.
SAMPLES = 40 * (KILLS + 1)

pytestmark = pytest.mark.build


def test_kills_lose_no_finished_shard_and_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = new_build(tmp_path / "undisturbed", monkeypatch)
    undisturbed.capture()
    killed = new_build(tmp_path / "killed", monkeypatch)
    draw = random.Random(int(os.environ.get("EYRIE_KILL_SEED", "0")))
    hits = 0
    for _ in range(KILLS):
        before, finished = index_lines(killed), shards(killed)
        hits += kill_once(killed, draw)
        assert index_lines(killed)[: len(before)] == before
        assert finished.items() <= shards(killed).items()
    assert hits == KILLS, "a run ended before it was killed; there are too few samples"
    before = index_lines(killed)
    killed.capture()
    lines = index_lines(killed)
    assert lines[: len(before)] == before
    # Nothing that was finished was captured again.
    assert Counter(json.loads(line)["key"] for line in lines).most_common(1)[0][1] == 1
    assert len(lines) == SAMPLES
    manifest = "manifest.json"
    assert (killed.folder / manifest).read_bytes() == (undisturbed.folder / manifest).read_bytes()


def new_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """A folder with random samples, a few of them as long as others."""
    stages = Stages(folder, monkeypatch)
    draw = random.Random(1)
    rows = []
    for number in range(SAMPLES):
        ids = [draw.randrange(3, 600) for _ in range(draw.randrange(8, 120))]
        mask = [0] * 4 + [1] * (len(ids) - 4)
        rows.append({"id": f"{number:04}", "input_ids": ids, "loss_mask": mask, "greedy": False})
    write_jsonl(folder / "tokenized_data.jsonl", rows)
    return stages


def kill_once(stages: Stages, draw: random.Random) -> bool:
    """Kill a run once it has stored a random number of shards; whether it was still running."""
    start = len(index_lines(stages))
    wanted = start + 2 * draw.randrange(0, 12)
    with stages.start("capture_states", *stages.capturing()) as job:
        deadline = time.monotonic() + 300
        # From the first shard of this run on; with none wanted, at any moment of the start.
        if wanted == start:
            time.sleep(draw.uniform(0.0, 3.0))
        while len(index_lines(stages)) < wanted and job.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.01))
        running = job.poll() is None
        job.kill()
    return running


def index_lines(stages: Stages) -> list[bytes]:
    """The whole lines of the index of shards."""
    paths = list((stages.folder / "store/hidden_states").glob("*/index-*.jsonl"))
    return paths[0].read_bytes().split(b"\n")[:-1] if paths else []


def shards(stages: Stages) -> dict[str, tuple[int, int]]:
    """Number and time of change of every shard that the index names."""
    named = {json.loads(line)["shard"] for line in index_lines(stages)}
    found = {}
    for path in (stages.folder / "store/hidden_states").glob("*/*.safetensors"):
        if path.name in named:
            found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found
