"""What a result's recipe would be by the present configuration, and where two recipes differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from eyrie.config import Config
from eyrie.recipes import (
    answering_recipe,
    capture_recipe,
    drafter_recipe,
    prompts_settings,
    source_settings,
    tokenizing_recipe,
)

_ABSENT = "not given"


def settings_now(
    file: str, manifest: Mapping[str, Any], config: Config
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings that a manifest records and those of the configuration; both empty where it records none.

    file: the name of the result that the manifest tells of.
    """
    recipe, name = manifest.get("recipe"), manifest.get("dataset", "")
    if file == "target.json":
        target = config.target
        now = {"name": target.name, "hub_id": target.hub_id, "hub_revision": target.revision}
        return {key: manifest[key] for key in now}, now
    if file == "source.json":
        return manifest["settings"], json.loads(source_settings(config.datasets[name].source))
    if recipe is None:
        return {}, {}
    if file == "vocabulary.json":
        return recipe, {"draft_vocab_size": config.drafter.draft_vocab_size}
    texts = {
        "prompts": lambda: prompts_settings(config.datasets[name]),
        "answer_prompts": lambda: answering_recipe(config, name),
        "tokenize_conversations": lambda: tokenizing_recipe(config, name),
        "hidden_states": lambda: capture_recipe(config),
        "drafter": lambda: drafter_recipe(config),
    }
    text = texts.get(manifest["stage"])
    if text is None:
        return {}, {}
    now = json.loads(text())
    if manifest["stage"] == "drafter":
        # How often a run is saved changes nothing, and training.json does not record it.
        now["training"].pop("checkpoint_every", None)
    return _comparable(recipe, now), now


def differences(
    recorded: Mapping[str, Any], now: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Each key whose values differ, with both as text."""
    for key in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{path}{key}.")
        elif before != after:
            yield f"{path}{key}", _text(before), _text(after)


def _text(value: object) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _comparable(recipe: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe without what its manifest fills in and its stage does not go by.

    That is how many requests run at once, and gates that only other stages ask.
    """
    parts = dict(recipe)
    if "sampling" in now:
        parts["sampling"] = {
            key: value for key, value in recipe["sampling"].items() if key != "max_in_flight"
        }
    if "gates" in now and "gates" in recipe:
        parts["gates"] = {key: value for key, value in recipe["gates"].items() if key in now["gates"]}
    return parts
