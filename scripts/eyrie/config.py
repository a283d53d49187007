"""The configuration as models: the one source of every key, its default, and its meaning.

`config.yaml` and the files in `configs/` are checked here; `schemas/config.schema.json` is generated from
these models. A stage's script takes its part of the configuration as JSON (`--settings`) and checks it with
the same model, so that a command run by hand is held to the same rules. A raw dataset's settings are in
`dataset_settings.py`, how a drafter is judged in `judging_settings.py`, what all share in `settings.py`;
everything is imported from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyrie.dataset_settings import (
    MAX_EXPANSION,
    CountRange,
    DatasetSettings,
    DecontaminationSettings,
    ExpectedSamples,
    GateSettings,
    NearDuplicateSettings,
    SourceSettings,
)
from eyrie.judging_settings import (
    CostSettings,
    EvaluationSettings,
    ModelCardSettings,
    ScalingSettings,
    ServingSettings,
    StepCosts,
)
from eyrie.safe_values import FolderPath, unprintable, words_of
from eyrie.settings import (
    CONFIG_FILES_VARIABLE,
    ConfigError,
    Positive,
    Settings,
    Share,
    config_line,
    parse,
    parse_settings,
)

__all__ = [
    "CONFIG_FILES_VARIABLE",
    "MAX_EXPANSION",
    "Config",
    "ConfigError",
    "CostSettings",
    "CountRange",
    "DatasetSettings",
    "DecontaminationSettings",
    "DraftSettings",
    "DrafterSettings",
    "EngineSettings",
    "EvaluationSettings",
    "ExpectedSamples",
    "GateSettings",
    "HiddenStatesSettings",
    "ModelCardSettings",
    "NearDuplicateSettings",
    "SamplingSettings",
    "ScalingSettings",
    "ServingSettings",
    "Settings",
    "ShapeSettings",
    "SourceSettings",
    "SplitSettings",
    "StepCosts",
    "TargetSettings",
    "TrainingSettings",
    "config_line",
    "json_schema",
    "parse_config",
    "parse_settings",
]

NAMED_TARGETS = frozenset(
    {"all", "prompts", "responses", "hidden_states", "drafter", "evaluation", "report", "scaling", "serving"}
)


# Folders of work/ that no target may be called by: its own folder lies beside them.
RESERVED_FOLDERS = frozenset({"raw", "prompts", "store", "logs", "benchmarks"})


class ShapeSettings(Settings):
    """A target's shape, for who plans before the target is there."""

    hidden_size: Positive
    """Width of its hidden states."""
    layers: Positive
    """Number of its layers."""
    vocab_size: Positive
    """Tokens of its vocabulary."""

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden_size:,}, {self.vocab_size:,} tokens"


class TargetSettings(Settings):
    """The large model that is to be accelerated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the folder of everything that depends on the target: work/NAME/."""
    path: FolderPath
    """The folder with the target's weights, configuration and tokenizer. Weights are read from safetensors
    alone."""
    hub_id: str | None = None
    """Where the model comes from on the Hugging Face hub; a note for people and manifests."""
    revision: str | None = None
    """The hub's commit of `hub_id`; a note, too: what counts is the digest of the files in `path`."""
    trust_remote_code: bool = False
    """Run the Python that lies in `path` where the tokenizer needs it, as Kimi's does, and let the server do
    so by {trust_remote_code} in engine.command. It runs with all rights of the build: read it first. Needs
    `revision`, the whole commit that it comes from; the files are then held to their digests."""
    shape: ShapeSettings | None = None
    """What the target's config.json must tell of it; a plan counts bytes by it before the files are there.
    null: not asked."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The numbers that the in-process engine computes with."""

    @model_validator(mode="after")
    def _is_a_target_that_may_be(self) -> Self:
        if self.name in RESERVED_FOLDERS:
            raise ValueError(f"name: saw {self.name!r}, which is a folder of `work` already; choose another")
        if self.trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                "trust_remote_code: true needs revision, the 40 hex digits of the commit that the code was "
                f"read at; saw {self.revision!r}"
            )
        return self


class DraftSettings(Settings):
    """The drafter that a server must be speculating with, where it speculates at all."""

    algorithm: Literal["EAGLE3"] | None = None
    """What the server's speculation must be; null asks for a server without any. A server that was started
    with EAGLE in its place loads the same drafter, leaves half of it out, and says nothing."""
    hidden_width: Positive | None = None
    """Columns of the hidden states that the drafter is fed, three times the target's; null: not asked."""


class EngineSettings(Settings):
    """Who runs the target. None of it is in an answer's key: what the store has is never asked again."""

    kind: Literal["in_process", "vllm", "sglang"] = "in_process"
    """in_process: transformers, inside the job. vllm, sglang: a server, which the job starts by `command` or
    finds at `urls`."""
    threads: Positive = 1
    """in_process: threads of one answering or capture job. One a job uses the cores best, as the datasets'
    jobs run side by side; the sums of a matrix product, and so its last digits, depend on it."""
    batch_size: Positive = 32
    """in_process: sequences computed together."""
    batch_independent: bool = False
    """in_process: compute every sequence alone, so that no answer depends on its neighbours' rounding. For
    tests."""
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/@\s]+$")]] = Field(default=[])
    """Servers that are running already, used side by side: http://host:port. They come before `command`;
    EYRIE_SERVER_URLS, which with_server.py sets, comes before both."""
    command: str | None = None
    """The command that starts a server, as one line, which no shell reads; {python}, {model}, {host} and
    {port} are filled in, {trust_remote_code}, which is --trust-remote-code where the target's code is trusted
    and else nothing, and, for one that leaves hidden states, {states}, the folder, and {layer_ids}, the
    layers. It stands in logs and manifests: secrets belong into the environment, which the server gets."""
    python: str = "python"
    """The interpreter that {python} in `command` stands for: an engine pins other versions of what the build
    uses, so it is seldom the build's own. In an engine's own image: /usr/bin/python3."""
    capture: Literal["in_process", "server", "answers"] = "in_process"
    """Who makes hidden states. in_process: the job itself, by transformers. server: the capture jobs ask the
    engine's servers, of kind vllm and on the same host, whose command has them leave states:
    configs/vllm-capture.yaml shows one. answers: so, too, do the answering jobs, in the same pass, and the
    capture jobs ask for the others alone. An answer's states then have none for its last token: a row of
    zeros, which training refuses but with mask_shift: aligned."""
    served_model: str | None = None
    """The model's name in the server; null: the only one that it lists."""
    context_length: Positive | None = None
    """Tokens that the server must take, prompt and answer together; null: the longest that are asked for."""
    draft: DraftSettings | None = None
    """What a server's speculation must be; null: not asked."""
    ready_timeout: Annotated[float, Field(gt=0.0)] = 1800.0
    """Seconds until a server that was started must be ready, and how long all servers may be away."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that `command` started is started again after it died at work."""
    request_timeout: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds that one answer may take, from the request to its last byte."""
    retries: Annotated[int, Field(ge=0)] = 6
    """How often a prompt is asked again after a failure that may pass; then it counts as failed until the
    next run."""
    backoff: Annotated[float, Field(gt=0.0)] = 1.0
    """Seconds before the first repetition, about; they double with each, up to a minute."""
    stop_grace: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds that unfinished answers get after Ctrl-C or SIGTERM."""

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if self.command is not None:
            words_of(self.command)
        if self.kind != "in_process" and "{port}" not in (self.command or "{port}"):
            raise ValueError(f"command: saw no {{port}} in {self.command!r}; the job chooses a free one")
        if self.capture != "in_process" and self.kind != "vllm":
            raise ValueError(f"capture: saw {self.capture} with kind {self.kind}, expected kind vllm")
        return self


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
    drop_degenerate: bool = False
    """Leave out answers that end in a loop: somewhere before the end, of 32 or more runs of four tokens up to
    it at most an eighth are different ones. They are counted in any case."""
    max_in_flight: Positive = 200
    """Requests at once to each server; changes no answer's key."""


class HiddenStatesSettings(Settings):
    """What is captured of the target's forward pass."""

    layer_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices into Hugging Face's hidden_states; null is [2, n//2, n-3] for n layers."""
    dtype: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    """How states are stored. float8 is e4m3 with a scale for each token and layer, half of bfloat16; the last
    state, where it is stored, is then bfloat16."""
    top_tokens: Positive | None = None
    """null: store the last state, from which training computes the target's distribution. A number: store
    that distribution instead, cut to so many likeliest tokens of the draft vocabulary, with the mass of the
    others; capturing then waits until every dataset is tokenized and the vocabulary is known."""
    max_tokens: Positive = 4096
    """A longer native conversation is skipped and counted as too_long."""
    disk_reserve: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Bytes to leave free on the store's disk: a job whose states would not fit beside them never begins.
    Changes no result."""

    @field_validator("layer_ids")
    @classmethod
    def _three_different(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (len(value) != 3 or value != sorted(set(value))):
            raise ValueError(f"expected three layer ids in rising order, saw {value}")
        return value

    @property
    def computed_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """What the states are in memory before they are stored, and the last state in the store."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    def as_recipe(self) -> dict[str, Any]:
        """What results depend on; a way of storing that is not used is left out, as if it were not there."""
        unused = {"top_tokens"} if self.top_tokens is None else set()
        return self.model_dump(mode="json", exclude={"disk_reserve", *unused})


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
    vocabulary: FolderPath | None = None
    """A vocabulary.json or a checkpoint's folder whose tokens are taken as they are, in place of the most
    frequent ones: what a warm start needs. null: chosen from the training rows."""
    min_coverage: Share | None = 0.8
    """Smallest share of the validation rows' supervised tokens that the draft vocabulary must hold: what it
    lacks can never be accepted. null: not asked."""
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
    """Weight of unrolled step i is step_decay ** i: 0.8 as published (EAGLE's traineagle3/main.py); 1.0 is
    speculators' default."""
    mask_shift: Literal["aligned", "shifted", "legacy"] = "aligned"
    """Which token's mask rules a prediction. aligned: that of the predicted token; shifted: that of the token
    before it, whose state the target predicts from, as in speculators 0.9.0 (eagle3/data.py) and SpecForge's
    pull request 895; legacy: that of the token before that, as published (EAGLE's dataprepare, SpecForge's
    target_head.py)."""
    initialise: Literal["target_layer", "least_squares", "random"] = "target_layer"
    """target_layer: start from the target's last layer and head; least_squares: from there, with what least
    squares fit to the training states, which saves a pass or two over a small dataset; random: from scratch,
    as published."""
    loss_normalisation: Literal["supervised", "positions"] = "supervised"
    """What a step's summed loss is divided by. supervised: the positions that have a loss at that step, as in
    speculators 0.9.0; positions: all tokens of the batch, as published (the mean over batch and sequence in
    EAGLE's traineagle3/cnets.py, and in SpecForge), where long prompts make the loss small."""
    position_mask: bool = True
    """true: no loss where the target's most likely token is outside the draft vocabulary, as published
    (EAGLE's traineagle3/cnets.py, SpecForge); false: a loss there, too, as in speculators 0.9.0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the matrix products; the weights themselves are float32."""
    threads: Positive = 2
    """CPU threads; fixed, since the sums depend on it."""
    checkpoint_every: Positive = 200
    """Steps between resumable checkpoints."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What trains; auto: a CUDA device where there is one. Its kind changes the sums' last digits, so a run
    that was begun on one kind is not gone on with on the other."""
    processes: Positive = 1
    """Processes that share each step, one a device; more than one are started by torchrun. The result is
    the same but for the last digits of the sums."""
    micro_batch_tokens: Positive | None = None
    """Supervised positions computed at once, about: a step's gradients are added up part by part, which
    takes less memory. null: a process computes all that it has of a step at once."""
    validate_every: Positive | None = None
    """Steps between validations, besides the one after each epoch; null: only those."""
    keep: Literal["last", "best"] = "last"
    """Which weights become the checkpoint: the last ones, or those of the validation with the longest
    acceptance length. Both are in the store, so another choice trains nothing again."""
    early_stop: Positive | None = None
    """Epochs without a longer acceptance length after which training ends; null: all epochs are trained."""
    warm_start: FolderPath | None = None
    """The folder of a checkpoint with the same shape, layers and draft vocabulary, whose weights training
    starts from; `initialise` then counts for nothing. null: no such start."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, beside the run in the store."""
    seed: int = 0
    """Order of the samples and random weights."""


class Config(Settings):
    """A whole build."""

    work: FolderPath = Path("work")
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
    scaling: ScalingSettings = ScalingSettings()
    serving: ServingSettings = ServingSettings()
    model_card: ModelCardSettings = ModelCardSettings()
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
    def _code_is_trusted_in_one_place(self) -> Self:
        words = [] if self.engine.command is None else words_of(self.engine.command)
        if "--trust-remote-code" in words and not self.target.trust_remote_code:
            raise ValueError(
                f"{config_line(['engine', 'command'])}: saw --trust-remote-code with "
                "target.trust_remote_code: false; write {trust_remote_code} in its place, so that one key "
                "says whether code may run"
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
    mistakes = [
        f"{config_line(path)}: saw {text!r}; expected text without control characters"
        for path, text in unprintable(data)
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return parse(Config, data)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    return Config.model_json_schema()
