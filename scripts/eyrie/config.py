"""The configuration as models: the one source of every key, its default, and its meaning.

`config.yaml` and the files in `configs/` are checked here; `schemas/config.schema.json` is generated from
these models. A stage's script takes its part of the configuration as JSON (`--settings`) and checks it with
the same model, so that a command run by hand is held to the same rules.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eyrie.errors import BuildError

NAMED_TARGETS = frozenset(
    {"all", "prompts", "responses", "hidden_states", "drafter", "evaluation", "report", "scaling"}
)
CONFIG_FILES_VARIABLE = "EYRIE_CONFIG_FILES"

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]


class ConfigError(BuildError):
    """A mistake in the configuration, in words: which key, what was seen, what was expected."""


class Settings(BaseModel):
    """A part of the configuration: unknown keys are refused, values are never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


SettingsType = TypeVar("SettingsType", bound=Settings)


class TargetSettings(Settings):
    """The large model that is to be accelerated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the folder of everything that depends on the target: work/NAME/."""
    path: Path
    """The folder with the target's weights, configuration and tokenizer."""
    hub_id: str | None = None
    """Where the model comes from on the Hugging Face hub; a note for people and manifests."""
    revision: str | None = None
    """The hub's commit of `hub_id`; a note, too: what counts is the digest of the files in `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The numbers that the in-process engine computes with."""


class EngineSettings(Settings):
    """Who runs the target."""

    kind: Literal["in_process"] = "in_process"
    """in_process: transformers, inside the job."""
    threads: Positive = 1
    """Threads of one answering or capture job. One a job uses the cores best, as the datasets' jobs run side
    by side; the sums of a matrix product, and so its last digits, depend on it."""
    batch_size: Positive = 32
    """Sequences computed together."""
    batch_independent: bool = False
    """Compute every sequence alone, so that no answer depends on its neighbours' rounding. For tests."""


class SamplingSettings(Settings):
    """How the target answers the prompts of one partition."""

    max_new_tokens: Positive
    """An answer is cut there and then counted as `length`."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample among the most likely tokens that hold this much probability."""
    keep_truncated: bool = True
    """Keep answers that were cut at max_new_tokens; the drafter learns from their tokens all the same."""
    max_in_flight: Positive = 200
    """Requests at once to a server; changes no answer's key."""


class HiddenStatesSettings(Settings):
    """What is captured of the target's forward pass."""

    layer_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices into Hugging Face's hidden_states; null is [2, n//2, n-3] for n layers."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """How states are stored."""
    max_tokens: Positive = 4096
    """A longer native conversation is skipped and counted as too_long."""

    @field_validator("layer_ids")
    @classmethod
    def _three_different(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (len(value) != 3 or value != sorted(set(value))):
            raise ValueError(f"expected three layer ids in rising order, saw {value}")
        return value


class SplitSettings(Settings):
    """Which groups train, which choose settings, which are reported. A group is never divided."""

    validation: Share = 0.05
    """Share of the groups that training watches; look at these while tuning."""
    held_out: Share = 0.1
    """Share of the groups that only the evaluation sees."""
    seed: int = 0
    """Changes who is in which share."""

    @model_validator(mode="after")
    def _leaves_training_rows(self) -> Self:
        if self.validation + self.held_out >= 1.0:
            raise ValueError("validation and held_out together leave no group to train on")
        return self


class DrafterSettings(Settings):
    """The drafter's shape. What is null is taken from the target."""

    draft_vocab_size: Positive = 32000
    """How many of the target's tokens the drafter can propose; the most frequent supervised ones."""
    intermediate_size: Positive | None = None
    """Width of the MLP."""
    num_attention_heads: Positive | None = None
    """Query heads of the one layer."""
    num_key_value_heads: Positive | None = None
    """Key and value heads of the one layer."""
    head_dim: Positive | None = None
    """Width of a head."""
    rope_theta: float | None = None
    """Base of the rotary positions."""
    rms_norm_eps: float | None = None
    """Epsilon of the norms."""
    max_position_embeddings: Positive | None = None
    """Written to the checkpoint: engines refuse or break beyond it, so it should be the target's own."""


class TrainingSettings(Settings):
    """How the drafter is trained."""

    epochs: Positive = 10
    """Passes over the training split."""
    tokens_per_step: Positive = 256
    """Supervised positions of one optimiser step, about."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-3
    """Peak of the schedule."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Linear rise to the peak; a cosine falls from there to 2 % of it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of a step's gradient."""
    ttt_steps: Positive = 3
    """Steps of the training-time test: how often the drafter is fed its own states."""
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of unrolled step i is step_decay ** i."""
    mask_shift: Literal["aligned", "legacy"] = "aligned"
    """aligned: the loss mask is about the token that is predicted; legacy: as published, one position off."""
    initialise: Literal["target_layer", "random"] = "target_layer"
    """target_layer: start from the target's last layer and head; random: from scratch, as published."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the matrix products; the weights themselves are float32."""
    threads: Positive = 2
    """CPU threads; fixed, since the sums depend on it."""
    checkpoint_every: Positive = 200
    """Steps between resumable checkpoints."""
    seed: int = 0
    """Order of the samples and random weights."""


class EvaluationSettings(Settings):
    """How the drafter is judged on the held-out share."""

    draft_tokens: list[Positive] = [3, 5]
    """Lengths of the drafted chains."""
    prompts_per_dataset: Positive = 4
    """Held-out prompts of each dataset."""
    max_new_tokens: Positive = 64
    """Tokens decoded for a prompt."""
    exact_prompts: Positive | Literal["all"] = 20
    """Prompts whose drafted output is compared with plain greedy decoding, token by token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of target and drafter; exactness is promised in float32."""
    bfloat16_prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts decoded once more in bfloat16, where each first difference is reported with its margin."""
    threads: Positive = 2
    """CPU threads."""
    measure_speed: bool = True
    """Write tokens per second; false leaves out all that no second run would repeat."""


class GateSettings(Settings):
    """Conditions that stop a dataset, since what follows would be built on sand."""

    min_kept: Positive = 1
    """Fewest rows that must be kept."""
    min_kept_share: Share = 0.5
    """Least share of the rows read that must be kept, duplicates and rows over the cap aside."""
    max_truncated_share: Share = 1.0
    """Largest share of answers cut at max_new_tokens."""
    max_failed_share: Share = 0.0
    """Largest share of prompts without an answer."""


class SourceSettings(Settings):
    """Where a dataset's raw files come from: local files, or a pinned revision on the hub."""

    files: Annotated[list[str], Field(min_length=1)]
    """Local: paths or globs. Hub: names or globs inside the repository."""
    hub_id: str | None = None
    """The dataset on the Hugging Face hub; null for local files."""
    revision: str | None = None
    """The hub's commit. A branch name is refused: the data under it may change."""
    format: Literal["jsonl", "json", "parquet"]
    """jsonl: one object a line; json: one array; parquet."""

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.revision is not None and not re.fullmatch(r"[0-9a-f]{7,40}", self.revision):
            raise ValueError(f"revision: expected a commit's hex digits, saw {self.revision!r}")
        if self.hub_id is None and self.revision is not None:
            raise ValueError("revision goes with hub_id")
        return self


class DatasetSettings(Settings):
    """One raw dataset and how it is read."""

    source: SourceSettings
    """Its files."""
    licence: str
    """SPDX name, or the source's own words; goes into every manifest."""
    layout: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """The module of eyrie/layouts that reads its rows."""
    fields: dict[str, str] = {}
    """Column names for layouts that take them, such as pairs: {prompt: input, response: output}."""
    kind: Literal["native", "prompts"]
    """native: the answers are a model's own and are kept; prompts: the target answers anew."""
    native_model: str | None = None
    """native only: the model that wrote the answers."""
    on_native_mismatch: Literal["refuse", "warn"] = "refuse"
    """What to do when native_model is not the target."""
    partition: str = "short"
    """Which of `partitions` samples its answers."""
    samples: Positive | None = None
    """Cap on kept rows, chosen by hash of the prompt; null keeps all."""
    prompt: Literal["first_user", "system_and_first_user"] = "first_user"
    """What is asked: the first user turn alone, or with the row's system turn before it."""
    group_by: str | None = None
    """Column whose equal values must stay on one side of the split; null: each prompt by itself."""
    loss_on: Literal["assistant", "non_system", "all"] = "assistant"
    """native only: which tokens are supervised."""
    gates: GateSettings = GateSettings()
    """Conditions for this dataset."""

    @model_validator(mode="after")
    def _kind_and_model_agree(self) -> Self:
        if (self.kind == "native") != (self.native_model is not None):
            raise ValueError("native_model goes with kind: native, and kind: native needs it")
        return self


class Config(Settings):
    """A whole build."""

    work: Path = Path("work")
    """Folder of all results."""
    target: TargetSettings
    engine: EngineSettings = EngineSettings()
    partitions: Annotated[dict[str, SamplingSettings], Field(min_length=1)]
    """Sampling by partition; a dataset names its own."""
    hidden_states: HiddenStatesSettings = HiddenStatesSettings()
    split: SplitSettings = SplitSettings()
    drafter: DrafterSettings = DrafterSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    datasets: Annotated[dict[str, DatasetSettings], Field(min_length=1)]
    """The datasets by name; each name is a target of the build."""

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        for name, dataset in self.datasets.items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in NAMED_TARGETS:
                raise ValueError(
                    f"datasets.{name}: expected a name of lower-case letters, digits and underscores "
                    f"other than {', '.join(sorted(NAMED_TARGETS))}"
                )
            if dataset.partition not in self.partitions:
                raise ValueError(
                    f"datasets.{name}.partition: saw {dataset.partition!r}, expected one of "
                    f"{', '.join(sorted(self.partitions))}"
                )
        return self


def parse_config(data: Mapping[str, Any]) -> Config:
    """The configuration from its data. Raises ConfigError, one line a mistake."""
    return _parse(Config, data)


def parse_settings(model: type[SettingsType], text: str) -> SettingsType:
    """A stage's settings from the JSON text of `--settings`. Raises ConfigError."""
    return _parse(model, json.loads(text))


def _parse(model: type[SettingsType], data: object) -> SettingsType:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_in_words(model, dict(mistake)) for mistake in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _in_words(model: type[BaseModel], mistake: dict[str, Any]) -> str:
    path = [str(part) for part in mistake["loc"]]
    where = config_line(path) if path else "the configuration"
    if mistake["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _known_keys(model, path[:-1]), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: unknown key {path[-1]!r}{hint}"
    if mistake["type"] == "missing":
        return f"{where}: missing; it has no default"
    return f"{where}: saw {mistake['input']!r}; {mistake['msg']}"


def _known_keys(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """The keys of the model that a path leads to; mappings with free names count as one step."""
    fields = model.model_fields
    for part in path:
        field = fields.get(part)
        if field is None:
            continue
        arguments = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        fields = inner[0].model_fields
    return list(fields)


def config_line(path: Iterable[str], files: Iterable[Path] | None = None) -> str:
    """Names a key for an error message: `config.yaml:57 datasets.openthoughts.layout`.

    The files are those of the running build (Snakefile puts them into the environment, the last one wins);
    without them, or where the key is a default, the key alone is named. This is looked up when something
    failed and never before, so that moving a line in the file makes nothing stale.
    """
    parts = list(path)
    if files is None:
        files = [Path(name) for name in os.environ.get(CONFIG_FILES_VARIABLE, "").split(os.pathsep) if name]
    found = ""
    for file in files:
        line = _line_of(file, parts)
        if line is not None:
            found = f"{file}:{line} "
    return found + ".".join(parts)


def _line_of(file: Path, parts: list[str]) -> int | None:
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    line = None
    for part in parts:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        match = next((pair for pair in pairs if pair[0].value == part), None)
        if match is None:
            break
        line, node = match[0].start_mark.line + 1, match[1]
    return line


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    return Config.model_json_schema()
