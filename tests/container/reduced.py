"""The default build on so few rows that it takes a minute: its target, every stage, two of its datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

NAME = "configs/reduced.yaml"
ROWS = 12
DATASETS = ("kimi_native", "openthoughts")
CHANGES: dict[str, dict[str, Any]] = {
    # Killed anywhere, the build ends with the bytes of an undisturbed one.
    "engine": {"batch_independent": True, "batch_size": 3, "threads": 1},
    "partitions": {"short": {"max_new_tokens": 24, "temperature": 0.0}},
    "hidden_states": {"max_tokens": 512},
    "split": {"validation": 0.1, "held_out": 0.3},
    "drafter": {"draft_vocab_size": 1024, "min_coverage": None},
    "training": {"epochs": 1, "tokens_per_step": 64, "warmup_steps": 2, "checkpoint_every": 2, "threads": 1},
    "evaluation": {
        "draft_tokens": [3],
        "prompts_per_dataset": 1,
        "max_new_tokens": 12,
        "exact_prompts": 2,
        "bfloat16_prompts": 0,
        "threads": 1,
        "measure_speed": False,
    },
}


def write(folder: Path) -> None:
    """Write it beside the configurations of a copy of the repository."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    for section, changes in CHANGES.items():
        config[section] |= changes
    config["datasets"] = {name: config["datasets"][name] | {"samples": ROWS} for name in DATASETS}
    (folder / NAME).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
