"""What each stage's result depends on, cut out of the configuration: the parameters of the rules.

Every function returns canonical JSON: equal settings give equal text whatever the order of the keys in the
file. A version is raised by hand when a stage's code changes in a way that must redo its work; a change that
keeps results leaves it alone.
"""

from __future__ import annotations

import glob

from eyrie.config import Config, DatasetSettings, Settings, SourceSettings
from eyrie.records import canonical_json

ANSWERING_VERSION = 1
TOKENIZING_VERSION = 1
CAPTURE_VERSION = 1
TRAINING_VERSION = 1
EVALUATION_VERSION = 1
REPORT_VERSION = 1


def raw_files(source: SourceSettings) -> list[str]:
    """The local files of a source that exist; those on the hub, and those missing, are the job's matter."""
    if source.hub_id is not None:
        return []
    return sorted({name for pattern in source.files for name in glob.glob(pattern)})


def prompts_settings(dataset: DatasetSettings) -> str:
    """A dataset's entry, less what only later stages ask for."""
    return canonical_json(_plain(dataset, leave_out={"partition", "on_native_mismatch", "loss_on"}))


def answering_recipe(config: Config, name: str) -> str:
    """What the target's answers to a dataset's prompts depend on."""
    dataset = config.datasets[name]
    return canonical_json(
        {
            "version": ANSWERING_VERSION,
            "dtype": config.target.dtype,
            "sampling": _plain(config.partitions[dataset.partition], leave_out={"max_in_flight"}),
            "split": _plain(config.split),
            "gates": _plain(dataset.gates),
        }
    )


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
            "gates": _plain(dataset.gates),
        }
    )


def capture_recipe(config: Config) -> str:
    """What the hidden states of given tokens depend on."""
    return canonical_json(
        {
            "version": CAPTURE_VERSION,
            "dtype": config.target.dtype,
            "hidden_states": _plain(config.hidden_states),
        }
    )


def drafter_recipe(config: Config) -> str:
    """What the drafter depends on beside its samples: shape and training, less how often it is saved."""
    return canonical_json(
        {
            "version": TRAINING_VERSION,
            "drafter": _plain(config.drafter),
            "training": _plain(config.training, leave_out={"checkpoint_every"}),
        }
    )


def report_recipe(config: Config) -> str:
    """What the report tells of the configuration: all but the engine, which changes no result."""
    return canonical_json({"version": REPORT_VERSION, "config": _plain(config, leave_out={"engine", "work"})})


def _plain(settings: Settings, leave_out: set[str] | None = None) -> dict[str, object]:
    return settings.model_dump(mode="json", exclude=leave_out)
