"""What each stage's result depends on, cut out of the configuration: the parameters of the rules.

Every function returns canonical JSON: equal settings give equal text whatever the order of the keys in the
file. A version is raised by hand when a stage's code changes in a way that must redo its work; a change that
keeps results leaves it alone.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from os.path import isfile
from typing import Any

from eyrie.config import (
    Config,
    DatasetSettings,
    GateSettings,
    SamplingSettings,
    Settings,
    SourceSettings,
    TargetSettings,
)
from eyrie.records import canonical_json

# What becomes of an answer, or how many are asked at once, is no part of what it is.
_NOT_OF_AN_ANSWER = {"keep_truncated", "drop_degenerate", "max_in_flight"}

ANSWERING_VERSION = 1
TOKENIZING_VERSION = 2
CAPTURE_VERSION = 1
TRAINING_VERSION = 3
EVALUATION_VERSION = 3
ESTIMATE_VERSION = 1
SCALING_VERSION = 1
REPORT_VERSION = 1
CARD_VERSION = 1
SERVING_VERSION = 1


# A gate concerns the stages that ask it: another threshold repeats their check and no other's.
_GATES_OF_ROWS = {"on_fail", "min_kept", "min_kept_share", "max_duplicate_share", "max_empty_answer_share"}
_GATES_OF_ANSWERS = {"on_fail", "min_kept", "min_kept_share", "max_truncated_share", "max_failed_share"}
_GATES_OF_TOKENS = {"on_fail", "min_kept", "min_kept_share", "max_unsupervised_share"}


def raw_files(source: SourceSettings) -> list[str]:
    """The local files of a source that exist; those on the hub, and those missing, are the job's matter."""
    if not source.is_local:
        return []
    if source.hub_id is None:
        return _existing(source.files)
    return _existing([f"{source.hub_id}/{pattern}" for pattern in source.files or ["**"]])


def benchmark_files(dataset: DatasetSettings) -> list[str]:
    """The benchmarks' files that a dataset is compared with and that exist."""
    return [] if dataset.decontaminate is None else _existing(dataset.decontaminate.files)


def source_settings(source: SourceSettings) -> str:
    """What is fetched; how many rows are expected of it is asked when they are read."""
    return canonical_json(_plain(source, leave_out={"expected_rows", "max_expansion"}))


def target_settings(target: TargetSettings) -> str:
    """What identifies the target; newer keys with their defaults are left out, as if they were not there."""
    return target.model_dump_json(exclude=_usual(target))


def prompts_settings(dataset: DatasetSettings) -> str:
    """A dataset's entry, less what only later stages ask for."""
    later = {"partition", "on_native_mismatch", "loss_on", "gates"}
    gates = _gates(dataset.gates, _GATES_OF_ROWS)
    settings = {**_plain(dataset, leave_out=later), "gates": gates}
    return canonical_json({**settings, "source": _source(dataset.source)})


def answering_recipe(config: Config, name: str) -> str:
    """What the target's answers to a dataset's prompts depend on."""
    dataset = config.datasets[name]
    return canonical_json(
        {
            "version": ANSWERING_VERSION,
            "dtype": config.target.dtype,
            "sampling": _plain(config.partitions[dataset.partition], leave_out={"max_in_flight"}),
            "split": _plain(config.split),
            "gates": _gates(dataset.gates, _GATES_OF_ANSWERS),
        }
    )


def answers_recipe(target: Mapping[str, Any], version: int, sampling: SamplingSettings) -> dict[str, Any]:
    """What an answer in the store depends on beside its prompt; `target` is what target.json holds."""
    return {
        "version": version,
        "target_revision": target["revision"],
        "template_sha256": target["template_sha256"],
        "sampling": _plain(sampling, leave_out=_NOT_OF_AN_ANSWER),
    }


def requests_in_flight(config: Config) -> str:
    """How many requests each dataset's job has at a server at once; no result depends on it."""
    return canonical_json(
        {name: config.partitions[made.partition].max_in_flight for name, made in config.datasets.items()}
    )


def answering_priority(config: Config, name: str) -> int:
    """How early a dataset is answered; the highest first, and native ones, which nobody answers, at 0.

    On a server those with shorter answers: most of what there is, and soon there. In process those of the
    long partition: a job has a core to itself, and the longest must not be left to run alone at the end.
    """
    dataset = config.datasets[name]
    if dataset.kind == "native":
        return 0
    if config.engine.kind == "in_process":
        return 2 if dataset.partition == "long" else 1
    lengths = {partition.max_new_tokens for partition in config.partitions.values()}
    return sum(length >= config.partitions[dataset.partition].max_new_tokens for length in lengths)


def tokenizing_recipe(config: Config, name: str) -> str:
    """What the samples of a native dataset depend on."""
    dataset = config.datasets[name]
    return canonical_json(
        {
            "version": TOKENIZING_VERSION,
            "loss_on": dataset.loss_on,
            "max_tokens": config.hidden_states.max_tokens,
            "native_model": dataset.native_model,
            "on_native_mismatch": dataset.on_native_mismatch,
            "split": _plain(config.split),
            "gates": _gates(dataset.gates, _GATES_OF_TOKENS),
        }
    )


def selection_recipe(config: Config) -> str:
    """How many rows the build's datasets of each kind must select together."""
    kinds = {
        kind: {
            "expected": _plain(expected),
            "datasets": sorted(name for name, made in config.datasets.items() if made.kind == kind),
        }
        for kind, expected in config.expected_by_kind().items()
    }
    return canonical_json(kinds)


def capture_recipe(config: Config) -> str:
    """What the hidden states of given tokens depend on."""
    return canonical_json(
        {
            "version": CAPTURE_VERSION,
            "dtype": config.target.dtype,
            "hidden_states": config.hidden_states.as_recipe(),
        }
    )


# What trains, and what is written on the way, changes no result; files count by their content, as inputs.
_TRAINING_ASIDE = {"checkpoint_every", "device", "processes", "tensorboard"}
_TRAINING_FILES = {"warm_start"}
_OF_THE_VOCABULARY = {"vocabulary", "min_coverage"}
# Newer keys: where one has its default the recipe is what it was before, and so is the trained drafter's key.
_NEWER_TRAINING_KEYS = {
    "micro_batch_tokens",
    "validate_every",
    "keep",
    "early_stop",
    "loss_normalisation",
    "position_mask",
}


def drafter_recipe(config: Config) -> str:
    """What the drafter depends on beside its samples: shape and training, less how often it is saved."""
    training = config.training
    usual = {
        key
        for key in _NEWER_TRAINING_KEYS
        if getattr(training, key) == type(training).model_fields[key].default
    }
    return canonical_json(
        {
            "version": TRAINING_VERSION,
            "drafter": _plain(config.drafter, leave_out=_OF_THE_VOCABULARY),
            "training": _plain(training, leave_out=_TRAINING_ASIDE | _TRAINING_FILES | usual),
        }
    )


def estimate_recipe(config: Config) -> str:
    """What the estimate of acceptance depends on beside drafter, samples and states."""
    return canonical_json(
        {
            "version": ESTIMATE_VERSION,
            "draft_tokens": config.evaluation.draft_tokens,
            "rows_per_dataset": config.evaluation.estimate_rows,
            "datasets": {
                name: {"kind": made.kind, "partition": made.partition}
                for name, made in config.datasets.items()
            },
        }
    )


def share_recipe(config: Config, share: str) -> str:
    """What a drafter of a share of the training groups depends on."""
    return canonical_json({**json.loads(drafter_recipe(config)), "group_share": share})


def scaling_recipe(config: Config) -> str:
    """What the fit over the shares depends on beside their drafters."""
    return canonical_json(
        {
            "version": SCALING_VERSION,
            "draft_tokens": config.evaluation.draft_tokens[0],
            "acceptance_lengths": config.scaling.acceptance_lengths,
        }
    )


def training_aside(config: Config) -> str:
    """The training's settings that change no result."""
    return canonical_json(config.training.model_dump(mode="json", include=_TRAINING_ASIDE))


def pinned_vocabulary(config: Config) -> list[str]:
    """The file that a pinned draft vocabulary is read from; none where it is chosen."""
    pinned = config.drafter.vocabulary
    if pinned is None:
        return []
    return [str(pinned if pinned.suffix == ".json" else pinned / "model.safetensors")]


def warm_start_files(config: Config) -> list[str]:
    """The files of the checkpoint that training starts from."""
    folder = config.training.warm_start
    return [] if folder is None else [str(folder / name) for name in ("config.json", "model.safetensors")]


def result_settings(config: Config) -> dict[str, Any]:
    """The configuration without what changes no result: engine, folder, how often training is saved."""
    settings = config.model_dump(mode="json", exclude={"engine", "work", "serving", "model_card"})
    settings["hidden_states"] = config.hidden_states.as_recipe()
    settings["target"] = _plain(config.target, leave_out=_usual(config.target))
    for name, dataset in config.datasets.items():
        settings["datasets"][name]["source"] = _source(dataset.source)
    for key in _TRAINING_ASIDE:
        del settings["training"][key]
    for sampling in settings["partitions"].values():
        del sampling["max_in_flight"]
    return settings


def report_recipe(config: Config) -> str:
    """What the report tells of the configuration."""
    return canonical_json({"version": REPORT_VERSION, "config": result_settings(config)})


def card_recipe(config: Config) -> str:
    """What the model card tells of the configuration."""
    datasets = {
        name: {"hub_id": made.source.hub_id, "revision": made.source.revision, "kind": made.kind}
        for name, made in config.datasets.items()
    }
    partitions = {made.partition for made in config.datasets.values() if made.kind == "prompts"}
    return canonical_json(
        {
            "version": CARD_VERSION,
            "licence": config.model_card.licence,
            "draft_tokens": config.serving.draft_tokens,
            "longest_answers": max(
                (config.partitions[name].max_new_tokens for name in partitions), default=None
            ),
            "datasets": datasets,
        }
    )


def _existing(patterns: list[str]) -> list[str]:
    found = {name for pattern in patterns for name in glob.glob(pattern, recursive=True)}
    return sorted(filter(isfile, found))


def _gates(gates: GateSettings, asked: set[str]) -> dict[str, object]:
    return gates.model_dump(mode="json", include=asked)


def _usual(target: TargetSettings) -> set[str]:
    return {key for key in ("trust_remote_code", "shape") if not getattr(target, key)}


def _source(source: SourceSettings) -> dict[str, object]:
    usual = source.max_expansion == SourceSettings.model_fields["max_expansion"].default
    return _plain(source, leave_out={"max_expansion"} if usual else set())


def _plain(settings: Settings, leave_out: set[str] | None = None) -> dict[str, object]:
    return settings.model_dump(mode="json", exclude=leave_out)
