"""A real vLLM on the CPU serves a drafter; the serve check holds it to what Eyrie measures.

The target is the tiny random one, so that all of it takes a minute; the drafter is untrained: the target's
last layer and head. What is compared is the engine's part: which layers it captures, how it maps tokens,
what it counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eyrie.config import DrafterSettings
from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.eagle3.initialise import drafter_config, initialise_from_target, initialise_randomly
from eyrie.eagle3.model import Drafter
from eyrie.records import read_json, write_jsonl
from eyrie.target import read_text_config
from eyrie.target_weights import TargetWeights
from make_tiny_target import write_target

pytestmark = [pytest.mark.vllm]

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-vllm/bin/python"


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        ids = torch.randint(10, 200, (12,), generator=generator).tolist()
        name = f"row-{number}"
        common = {"id": name, "dataset": "any", "group": name, "split": "held_out", "finish_reason": "length"}
        made.append({**common, "input_ids": ids, "loss_mask": [0] * 10 + [1] * 2})
    return made


def write_drafter(target: Path, folder: Path, eos_ids: list[int]) -> None:
    """A drafter whose layer and head are the target's last ones, and whose vocabulary leaves tokens out."""
    text_config, weights = read_text_config(target), TargetWeights(target, None)
    token_ids = list(range(0, text_config.vocab_size, 2))
    settings = DrafterSettings(draft_vocab_size=len(token_ids))
    shape = drafter_config(settings, text_config, [1, 3, 5], eos_ids)
    drafter = Drafter(shape, token_ids, weights.embedding())
    initialise_randomly(drafter, 0)
    initialise_from_target(drafter, weights, text_config.num_hidden_layers, text_config.tie_word_embeddings)
    save_checkpoint(folder, drafter, {})


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )


def test_the_whole_check_passes_on_a_real_vllm(tmp_path: Path) -> None:
    if not (ROOT / ".venv-vllm/.ready").exists():
        pytest.skip("vLLM is not there: `make vllm-env` sets it up")
    write_target(tmp_path / "target")
    identify = ["--settings", json.dumps({"name": "tiny", "path": "target"}), "--out", "target.json"]
    assert run(tmp_path, str(ROOT / "scripts/identify_target.py"), *identify).returncode == 0
    eos_ids = read_json(tmp_path / "target.json")["eos_ids"]
    write_drafter(tmp_path / "target", tmp_path / "checkpoint", eos_ids)
    write_jsonl(tmp_path / "rows.jsonl", rows(6))
    (tmp_path / ".venv-vllm").symlink_to(ROOT / ".venv-vllm")
    settings = yaml.safe_load((ROOT / "config.yaml").read_text())["serving"]
    settings |= {"prompts_per_dataset": 6, "rounds": 1, "max_new_tokens": 24, "ready_timeout": 1200}
    said = run(
        tmp_path,
        *(str(ROOT / "scripts/serve_check.py"), "--checkpoint", "checkpoint", "--tokenized", "rows.jsonl"),
        *("--target", "target.json", "--target-path", "target", "--out", "serving.json"),
        *("--settings", json.dumps(settings)),
    )
    assert said.returncode == 0, said.stdout
    figures = read_json(tmp_path / "serving.json")
    assert figures["passed"] and figures["engine"]["version"]
    assert figures["reported"]["algorithm"] == "EAGLE3"
    assert figures["reported"]["layer_ids"] == [1, 3, 5]
    assert figures["identical_outputs"]["equal"] == 6 == figures["outputs_as_eyrie"]["equal"]
    assert figures["acceptance_length"]["server"] > 1.0
    assert abs(figures["acceptance_length"]["relative_difference"]) <= 0.03
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
