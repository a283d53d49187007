"""Say which target this is: a digest of its files, its shape, its end tokens.

    python scripts/identify_target.py --settings '{"name": ..., "path": ...}' --out work/NAME/target.json

Everything that depends on the target depends on this small file, and so on what the target's files hold: a
touched or moved folder changes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from eyrie.chat import Chat
from eyrie.config import ConfigError, ShapeSettings, TargetSettings, parse_settings
from eyrie.console import run_command, start_log
from eyrie.records import content_key, sha256_file, write_json
from eyrie.states import default_layer_ids
from eyrie.target import read_eos_ids, read_text_config

# Weights, configuration, tokenizer and template, and the Python that some targets bring along; not the
# licence, the model card or a note of where the files came from.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.py",
    "*.safetensors",
    "*.safetensors.index.json",
)


def digest_files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the target that matters, by name. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            f"target.path: {folder} is not a folder; expected the target's weights, configuration and "
            "tokenizer. Put them there (scripts/fetch_target.py gets the default target) or change the key"
        )
    paths = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    names = [path.name for path in paths]
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"target.path: {folder} holds {', '.join(names) or 'none of the files of a model'}; "
            "expected config.json, *.safetensors and the tokenizer's files"
        )
    if not any(name.startswith("tokenizer") for name in names):
        raise ConfigError(
            f"target.path: {folder} has no tokenizer; expected tokenizer.json beside the weights"
        )
    return {path.name: sha256_file(path) for path in paths}


def describe_target(settings: TargetSettings) -> dict[str, Any]:
    """What target.json holds. Raises ConfigError where a part of the target is missing."""
    files = digest_files(settings.path)
    config = read_text_config(settings.path)
    check_shape(settings, config)
    return {
        "name": settings.name,
        "hub_id": settings.hub_id,
        "hub_revision": settings.revision,
        "revision": content_key("target", files),
        "files": files,
        "template_sha256": Chat(settings.path, settings.trust_remote_code).template_sha256,
        "architecture": (config.architectures or [config.model_type])[0],
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_ids": read_eos_ids(settings.path),
        "layer_ids_default": _default_layer_ids(config.num_hidden_layers),
        # Left out where it is false, as it was before there was such a key.
        **({"trust_remote_code": True} if settings.trust_remote_code else {}),
    }


def check_shape(settings: TargetSettings, config: Any) -> None:
    """Refuse a folder of another shape than the configuration says. Raises ConfigError."""
    if settings.shape is None:
        return
    seen = ShapeSettings(
        hidden_size=config.hidden_size, layers=config.num_hidden_layers, vocab_size=config.vocab_size
    )
    if seen != settings.shape:
        raise ConfigError(
            f"target.shape: {settings.path} holds a model of {seen}\n  expected: {settings.shape}\n"
            "  change: target.path to the folder of that model, or target.shape"
        )


def _default_layer_ids(layers: int) -> list[int] | None:
    """The default, where the target has layers enough; else the configuration must name some."""
    try:
        return default_layer_ids(layers)
    except ConfigError:
        return None


def main() -> None:
    """Read the arguments, describe the target, write target.json."""
    parser = argparse.ArgumentParser(description="Write what identifies the target model.")
    parser.add_argument("--settings", required=True, help="the config's target section as JSON")
    parser.add_argument("--out", type=Path, required=True, help="target.json")
    parser.add_argument("--log", type=Path, help="log file")
    arguments = parser.parse_args()
    log = start_log("identify_target", arguments.log)
    settings = parse_settings(TargetSettings, arguments.settings)
    target = describe_target(settings)
    write_json(arguments.out, target)
    log.info(
        "%s: %s of %d layers, %d files, revision %s",
        settings.name,
        target["architecture"],
        target["layers"],
        len(target["files"]),
        target["revision"],
    )


if __name__ == "__main__":
    run_command(main)
