"""The tiny random target and the stages' commands, run in this process or, to be killed, in another."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyrie.records import content_key, read_json, read_jsonl, write_jsonl
from make_tiny_target import write_target

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
DATASET = "questions"
RECIPE: dict[str, Any] = {
    "version": 1,
    "dtype": "float32",
    "sampling": {"max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0, "keep_truncated": True},
    "split": {"validation": 0.1, "held_out": 0.2, "seed": 0},
    "gates": {},
}
LAYER_IDS = [1, 3, 5]
STATES: dict[str, Any] = {"layer_ids": LAYER_IDS, "dtype": "bfloat16", "max_tokens": 512}
ENGINE = {"threads": 1, "batch_size": 2, "batch_independent": True}


@functools.cache
def tiny_target() -> Path:
    """The folder of the tiny target, made once for all tests of a run."""
    folder = Path(tempfile.mkdtemp(prefix="eyrie-tiny-target-"))
    write_target(folder)
    return folder


def question(number: int) -> dict[str, Any]:
    """A row of prompts.jsonl."""
    words = ["How do I sort", "What is", "Explain the error in", "Write a function for", "Please add"]
    text = f"{words[number % len(words)]} number {number}" + " and the old one" * (number % 4)
    key = content_key("prompt", text)
    return {"id": key, "dataset": DATASET, "group": key, "messages": [{"role": "user", "content": text}]}


def forbid_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a stage that opens an engine or loads the target fails."""

    def no_model(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("answer_prompts.open_engine", no_model)
    monkeypatch.setattr("eyrie.target.Target", no_model)


class Stages:
    """A folder in which the stages run on the tiny target, with paths as short as in a build."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "target").exists():
            (folder / "target").symlink_to(tiny_target())
        self.run(
            "identify_target",
            *("--settings", json.dumps({"name": "tiny", "path": "target"}), "--out", "target.json"),
        )

    def run(self, command: str, *arguments: str) -> None:
        """Run a stage's main function in this process."""
        with self._monkeypatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [command, *arguments])
            importlib.import_module(command).main()

    def start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a stage as a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(SCRIPTS / f"{command}.py"), *arguments],
            cwd=self.folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stderr=subprocess.PIPE,
        )

    def write_prompts(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write prompts.jsonl."""
        write_jsonl(self.folder / "prompts.jsonl", sorted(rows, key=lambda row: str(row["id"])))

    def answering(
        self, recipe: Mapping[str, Any] = RECIPE, engine: Mapping[str, Any] = ENGINE
    ) -> Sequence[str]:
        """The command line of answer_prompts."""
        return [
            *("--dataset", DATASET, "--prompts", "prompts.jsonl", "--target", "target.json"),
            *("--target-path", "target", "--recipe", json.dumps(recipe)),
            *("--states", json.dumps(STATES), "--engine", json.dumps(engine)),
            *("--store", "store", "--out", "tokenized_data.jsonl", "--ledger", "ledger.json"),
        ]

    def answer(self, recipe: Mapping[str, Any] = RECIPE, engine: Mapping[str, Any] = ENGINE) -> None:
        """Answer the prompts."""
        self.run("answer_prompts", *self.answering(recipe, engine))

    def capturing(self, engine: Mapping[str, Any] = ENGINE, **more: Any) -> Sequence[str]:
        """The command line of capture_states; more: of its recipe."""
        recipe = {"version": 1, "dtype": RECIPE["dtype"], "hidden_states": STATES} | more
        return [
            *("--dataset", DATASET, "--tokenized", "tokenized_data.jsonl", "--target", "target.json"),
            *("--target-path", "target", "--recipe", json.dumps(recipe), "--engine", json.dumps(engine)),
            *("--store", "store", "--out", "manifest.json"),
        ]

    def capture(self, engine: Mapping[str, Any] = ENGINE, **more: Any) -> None:
        """Capture the states of the samples."""
        self.run("capture_states", *self.capturing(engine, **more))

    def results(self) -> dict[str, bytes]:
        """The bytes of what the stages wrote beside the store."""
        return {
            name: (self.folder / name).read_bytes()
            for name in ("tokenized_data.jsonl", "ledger.json", "manifest.json")
        }

    def samples(self) -> list[dict[str, Any]]:
        """The rows of tokenized_data.jsonl."""
        return list(read_jsonl(self.folder / "tokenized_data.jsonl"))

    def ledger(self) -> dict[str, Any]:
        """What ledger.json holds."""
        return read_json(self.folder / "ledger.json")

    def journal(self) -> list[bytes]:
        """The whole lines of the answers journal; empty before the first."""
        paths = list((self.folder / "store/answers").glob(f"*/{DATASET}.jsonl"))
        return paths[0].read_bytes().split(b"\n")[:-1] if paths else []
