"""SIGKILL at random moments of a training; after each the same command is run again.

EYRIE_KILLS is how often (3 by default). The run saves after each step, so that many of the kills hit a save.
The last test is of torchrun and two processes, of which one is killed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tiny_eagle3 import TinyBuild, make_tiny_build, tiny_recipe
from training_runs import files, run, start

KILLS = int(os.environ.get("EYRIE_KILLS", "3"))

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    build = make_tiny_build(tmp_path_factory.mktemp("tiny"))
    # Long enough that each kill finds something left to do.
    build.recipe = tiny_recipe(
        epochs=4 + 4 * KILLS, checkpoint_every=1, validate_every=3, keep="best", initialise="least_squares"
    )
    return build


def arguments(build: TinyBuild, out: Path, store: Path) -> list[str]:
    store.mkdir(exist_ok=True)
    if not (store / "hidden_states").exists():
        (store / "hidden_states").symlink_to(build.store / "hidden_states")
    return [*build.arguments(out, store), "--training-log", str(out / "training.jsonl")]


def test_a_training_killed_at_any_moment_ends_with_the_same_bytes(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, arguments(build, tmp_path / "undisturbed", tmp_path / "store"))
    again = arguments(build, tmp_path / "killed", tmp_path / "killed-store")
    draw = random.Random(int(os.environ.get("EYRIE_KILL_SEED", "0")))
    hits = 0
    for _ in range(KILLS):
        saved = state_of(tmp_path / "killed-store")
        with start(again) as process:
            wait(
                lambda saved=saved: state_of(tmp_path / "killed-store") > saved or process.poll() is not None
            )
            time.sleep(draw.uniform(0.0, 0.4))
            hits += process.poll() is None
            process.kill()
            process.communicate()
    assert hits, "no kill came before the training's end"
    run(monkeypatch, again)
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")


def state_of(store: Path) -> int:
    """When the run was last saved, in nanoseconds; 0 before the first time."""
    return max((path.stat().st_mtime_ns for path in store.glob("drafters/*/state.safetensors")), default=0)


def wait(reached: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_processes_end_when_one_is_killed_and_go_on_when_run_again(
    build: TinyBuild, tmp_path: Path
) -> None:
    again = arguments(build, tmp_path / "out", tmp_path / "store")
    with start(again, processes=2) as launcher:
        wait(lambda: state_of(tmp_path / "store") > 0 or launcher.poll() is not None)
        trainers = [
            child
            for child in psutil.Process(launcher.pid).children(recursive=True)
            if any("train_drafter.py" in word for word in child.cmdline())
        ]
        assert len(trainers) == 2
        os.kill(trainers[1].pid, signal.SIGKILL)
        _, said = launcher.communicate(timeout=120)
        assert launcher.returncode != 0, said
    assert not [child for child in trainers if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    with start(again, processes=2) as launcher:
        _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, said
    assert "going on after step" in said
    assert (tmp_path / "out" / "model.safetensors").exists()
