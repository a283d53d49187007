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
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)

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

    on_fail: Literal["stop", "warn"] = "stop"
    """warn: say it in the log and the ledger and go on. A dataset of which nothing is left always stops."""
    min_kept: Positive = 1
    """Fewest rows that must be kept."""
    min_kept_share: Share = 0.5
    """Least share of the rows read that must be kept; rows left out by the build's own wish (duplicates, rows
    over a cap, contaminated rows) aside."""
    max_duplicate_share: Share = 0.98
    """Largest share of the readable rows whose prompt repeats another's. Above it, the first user turn is
    most likely one fixed text, and nearly all of the dataset would be lost to it."""
    max_empty_answer_share: Share = 0.5
    """native only: largest share of the rows without an answer."""
    max_unsupervised_share: Share = 0.0
    """native only: largest share of the conversations whose loss mask is all zero. They have an answer, so an
    empty mask says that rendering lost it."""
    max_truncated_share: Share = 1.0
    """prompts only: largest share of answers cut at max_new_tokens."""
    max_failed_share: Share = 0.0
    """prompts only: largest share of prompts without an answer."""


class CountRange(Settings):
    """How many there must be: an exact number, or {min, max}, either of which may be left out."""

    min: Annotated[int, Field(ge=0)] | None = None
    """The fewest."""
    max: Annotated[int, Field(ge=0)] | None = None
    """The most."""

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, value: Any) -> Any:
        return {"min": value, "max": value} if type(value) is int else value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("expected a number, or min or max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        exact = {"type": "integer", "minimum": 0}
        return {"anyOf": [exact, handler.resolve_ref_schema(handler(core_schema))]}

    def __contains__(self, count: int) -> bool:
        return (self.min is None or count >= self.min) and (self.max is None or count <= self.max)

    def __str__(self) -> str:
        if self.min == self.max:
            return f"{self.min:,}"
        if self.max is None:
            return f"at least {self.min:,}"
        return f"at most {self.max:,}" if self.min is None else f"{self.min:,} to {self.max:,}"


class SourceSettings(Settings):
    """Where a dataset's raw files come from: local files, or a pinned revision on the hub."""

    files: list[str] = []
    """Local: paths or globs. Hub: names or globs inside the repository, unless `split` names the files."""
    hub_id: str | None = None
    """The dataset on the Hugging Face hub, or the folder of a copy of such a repository (a path that begins
    with `.` or `/`); null for files by themselves."""
    revision: str | None = None
    """The hub's commit. A branch name is refused: the data under it may change."""
    config: str | None = None
    """With `split`: the configuration (subset) of the hub's dataset; null where it has only one."""
    split: str | None = None
    """In place of `files`: the split whose files are taken, as the dataset's own description divides them."""
    columns: list[str] | None = None
    """Parquet on the hub only: fetch these columns alone, streamed; null fetches the files as they are."""
    format: Literal["jsonl", "json", "parquet", "csv", "text"]
    """jsonl: one object a line; json: one array; parquet; csv: with a header line; text: one conversation a
    file. All but parquet may be compressed: a name that ends in .gz or .zst is read so."""
    expected_rows: CountRange | None = None
    """How many rows the files hold: a number, or {min, max}. Another release or a cut download differs."""

    @property
    def is_local(self) -> bool:
        """Whether the files lie on this machine already, by themselves or in a copy of a repository."""
        return self.hub_id is None or self.hub_id.startswith((".", "/"))

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.revision is not None and not re.fullmatch(r"[0-9a-f]{7,40}", self.revision):
            raise ValueError(f"revision: expected a commit's hex digits, saw {self.revision!r}")
        if self.is_local and self.revision is not None:
            raise ValueError("revision goes with a hub_id on the hub")
        if bool(self.files) == bool(self.split):
            raise ValueError("expected either files, or hub_id and split, which names them")
        if self.split is not None and self.hub_id is None:
            raise ValueError("split goes with hub_id")
        if self.config is not None and self.split is None:
            raise ValueError("config goes with split")
        if self.columns is not None and (self.hub_id is None or self.format != "parquet"):
            raise ValueError("columns goes with hub_id and format: parquet; other files are fetched whole")
        return self


class NearDuplicateSettings(Settings):
    """Prompts that say nearly the same are asked once."""

    threshold: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.8
    """Two prompts are near duplicates when they share this much of their shingles (Jaccard similarity)."""
    words: Positive = 5
    """Words of a shingle."""


class DecontaminationSettings(Settings):
    """Rows that share text with a benchmark are left out: a drafter must not be measured on what it saw."""

    files: Annotated[list[str], Field(min_length=1)]
    """The benchmarks' prompts: paths or globs of .jsonl, .json, .csv (each also .gz or .zst) or .parquet."""
    fields: list[str] | None = None
    """The columns that hold the prompts; null: every text in a row."""
    ngram: Positive = 13
    """Words in a row that must agree."""


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
    media: Literal["refuse", "text_only"] = "refuse"
    """Rows with images, video or audio. text_only: keep their text, as if nothing else had been there."""
    group_by: str | None = None
    """Column whose equal values must stay on one side of the split; null: each prompt by itself."""
    max_per_group: Positive | None = None
    """Cap on the rows of one group, such as one issue's trajectories, chosen by hash of the prompt."""
    near_duplicates: NearDuplicateSettings | None = None
    """Leave out prompts that nearly repeat another; null leaves out exact repetitions only."""
    decontaminate: DecontaminationSettings | None = None
    """Leave out rows that share text with a benchmark."""
    loss_on: Literal["assistant", "non_system", "all"] = "assistant"
    """native only: which tokens are supervised."""
    gates: GateSettings = GateSettings()
    """Conditions for this dataset."""

    @model_validator(mode="after")
    def _kind_and_model_agree(self) -> Self:
        if (self.kind == "native") != (self.native_model is not None):
            raise ValueError("native_model goes with kind: native, and kind: native needs it")
        if self.max_per_group is not None and self.group_by is None:
            raise ValueError("max_per_group goes with group_by")
        return self


class ExpectedSamples(Settings):
    """How many rows the whole build must select: a number, or {min, max}."""

    native: CountRange | None = None
    """Conversations of all native datasets."""
    prompts: CountRange | None = None
    """Prompts of all the other datasets."""


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
    licences: list[str] | None = None
    """The licences that datasets may have; any other is refused before anything runs. null allows all."""
    expected_samples: ExpectedSamples | None = None
    """How many rows must be selected in all: checked against the caps at the start, and against the ledgers
    before anything is trained."""

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

    @model_validator(mode="after")
    def _licences_are_allowed(self) -> Self:
        if self.licences is None:
            return self
        allowed = {name.casefold() for name in self.licences}
        refused = [
            f"{config_line(['datasets', name, 'licence'])}: saw {dataset.licence!r}, expected one of the "
            f"allowed licences: {', '.join(self.licences)}"
            for name, dataset in self.datasets.items()
            if dataset.licence.casefold() not in allowed
        ]
        if refused:
            raise ValueError("\n".join(refused))
        return self

    @model_validator(mode="after")
    def _caps_reach_what_is_expected(self) -> Self:
        for kind, expected in self.expected_by_kind().items():
            caps = {name: made.samples for name, made in self.datasets.items() if made.kind == kind}
            total = sum(cap or 0 for cap in caps.values())
            if None not in caps.values() and total not in expected:
                raise ValueError(
                    f"{config_line(['expected_samples', kind])}: expected {expected}, but the caps `samples` "
                    f"add up to {total:,}: {', '.join(f'{name} {cap}' for name, cap in caps.items())}"
                )
        return self

    def expected_by_kind(self) -> dict[str, CountRange]:
        """The expected number of selected rows for each kind of dataset of which one is given."""
        expected = self.expected_samples
        found = {} if expected is None else {"native": expected.native, "prompts": expected.prompts}
        return {kind: count for kind, count in found.items() if count is not None}


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
    if mistake["type"] == "value_error" and not path:
        # A check across the whole configuration names the key itself.
        return str(mistake["ctx"]["error"])
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
