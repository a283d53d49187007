"""Secrets in the environment appear nowhere: not in the work folder, not in a log, not in a command line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from workspace import Workspace, tiny_workspace

pytestmark = pytest.mark.build

# Made anew in each run, so that no file of the repository holds them.
SECRETS = {
    "HF_TOKEN": f"hf_{uuid.uuid4().hex}",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{uuid.uuid4().hex}",
    "OPENAI_API_KEY": f"sk-{uuid.uuid4().hex}",
    "VLLM_API_KEY": uuid.uuid4().hex,
    "WANDB_API_KEY": uuid.uuid4().hex,
    "MY_PASSWORD": uuid.uuid4().hex,
}
# A server that asks for what the environment has and ends with an error, as servers do.
FAILING = "import os, sys; assert os.environ['VLLM_API_KEY']; sys.exit('no GPU: ' + str(len(sys.argv)))"


@contextmanager
def watched_command_lines() -> Iterator[set[bytes]]:
    """All command lines of this machine's processes that hold a planted secret, looked at again and again."""
    found: set[bytes] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.3):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes()
                except OSError:
                    continue
                found.update(value.encode() for value in SECRETS.values() if value.encode() in words)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def build(workspace: Workspace, config: str, expected: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", "--verbose", "--configfile", config],
        cwd=workspace.folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **SECRETS},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_planted_secret_appears_nowhere(tmp_path: Path) -> None:
    """After a build with a dataset that can't be had and a server that fails, and after a whole one."""
    workspace = tiny_workspace(tmp_path)
    whole = yaml.safe_load(workspace.read("configs/tiny.yaml"))
    whole["datasets"] = {name: whole["datasets"][name] for name in ("kimi_native", "openthoughts")}
    files = {"files": ["x.json"], "format": "json", "hub_id": "nobody/nothing", "revision": "0123456789"}
    command = f'{sys.executable} -c "{FAILING}" --port {{port}}'
    broken = {**whole, "work": "work-broken", "engine": {"kind": "vllm", "command": command}}
    broken["datasets"] = {
        **whole["datasets"],
        "missing": {**whole["datasets"]["openthoughts"], "source": files},
    }
    for name, data in (("broken", broken), ("whole", whole)):
        (workspace.folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    with watched_command_lines() as in_command_lines:
        said = build(workspace, "broken.yaml", expected=1)
        said += build(workspace, "whole.yaml", expected=0)
    assert "no GPU: 3" in said, "the server was to fail in its own words"
    assert "nobody/nothing" in said
    assert in_command_lines == set()
    written = [path for path in workspace.folder.rglob("*") if path.is_file()]
    assert any("logs" in path.parts for path in written)
    for name, value in SECRETS.items():
        assert value not in said, name
        assert [path for path in written if value.encode() in path.read_bytes()] == [], name


def test_the_watch_sees_a_secret_that_is_there() -> None:
    with watched_command_lines() as found:
        value = SECRETS["HF_TOKEN"]
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)", value], check=True)
    assert found == {value.encode()}
