"""The settings of a raw dataset: where it comes from, how it is read, which rows are taken, what stops it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator

from eyrie.settings import Positive, Settings, Share

# How many times as large as itself a compressed file may become.
MAX_EXPANSION = 200


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

    files: list[str] = Field(default=[])
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
    max_expansion: Positive = MAX_EXPANSION
    """How many times as large as itself a compressed file may become, beyond 64 MB; what exceeds that is made
    to fill memory or a disk. Parquet is judged by what it declares. Changes no result."""
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
    fields: dict[str, str] = Field(default={})
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
    turns: Literal["first", "all"] = "first"
    """prompts only. all: later user turns and results of tools are asked as well, each once the target has
    answered what comes before it."""
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
        if self.kind == "native" and self.turns == "all":
            raise ValueError("turns goes with kind: prompts; a native conversation keeps all of its turns")
        if self.max_per_group is not None and self.group_by is None:
            raise ValueError("max_per_group goes with group_by")
        return self


class ExpectedSamples(Settings):
    """How many rows the whole build must select: a number, or {min, max}."""

    native: CountRange | None = None
    """Conversations of all native datasets."""
    prompts: CountRange | None = None
    """Prompts of all the other datasets."""
