"""How the configuration describes the judging of a drafter; everything is imported from eyrie.config."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyrie.settings import NonNegative, Positive, Settings, Share

GroupShare = Annotated[str, Field(pattern=r"^[1-9][0-9]*/[1-9][0-9]*$")]


class StepCosts(Settings):
    """What the steps of a cycle cost where the drafter is to be served."""

    target_step_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Milliseconds of the target over one token; a note: speed-ups are ratios."""
    draft_step: NonNegative | Annotated[dict[Positive, NonNegative], Field(min_length=1)]
    """Of drafting one token, in target steps; or so by number of drafted tokens."""
    verify_step: NonNegative | Annotated[dict[Positive, NonNegative], Field(min_length=1)]
    """Of the target's pass over the drafted tokens and one more, in target steps; or so by number of them."""


class CostSettings(StepCosts):
    """The same, where the target answers one request and several at once."""

    batch_sizes: dict[Positive, StepCosts] = Field(default={})
    """Costs at other numbers of requests at once; a target step is then the step over so many."""


class EvaluationSettings(Settings):
    """How the drafter is judged on the held-out share."""

    draft_tokens: list[Positive] = Field(default=[3, 5])
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
    costs: CostSettings | None = None
    """Costs of the host that is to serve the drafter, for the question whether it pays. null: those measured
    here, where speed is measured."""
    estimate_rows: Positive | None = None
    """Held-out samples of each dataset whose stored states acceptance is estimated on; null: all."""


class ScalingSettings(Settings):
    """The target `scaling`: drafters on shares of the training groups, to tell what more data would bring."""

    shares: Annotated[list[GroupShare], Field(min_length=2)] = Field(default=["1/8", "1/4", "1/2"])
    """Shares beside the whole, rising; each holds the groups of those before it."""
    acceptance_lengths: list[Annotated[float, Field(gt=1.0)]] = Field(default=[2.0, 2.5, 3.0])
    """Acceptance lengths whose need of training tokens is told."""

    @field_validator("shares")
    @classmethod
    def _rising(cls, value: list[str]) -> list[str]:
        parts = [Fraction(share) for share in value]
        if parts != sorted(set(parts)) or not 0 < parts[0] <= parts[-1] < 1:
            raise ValueError(f"expected rising shares between 0 and 1, such as 1/8, 1/4, 1/2; saw {value}")
        return value


class ModelCardSettings(Settings):
    """What the model card tells that no other key says."""

    licence: str | None = None
    """The licence under which the drafter is passed on, as the hub writes it: apache-2.0, mit, ... null:
    other, with the licences of target and data to look up."""


# Released vLLMs start by `vllm serve`, too; the module is what every build of it has.
_SERVE = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --host {host} --port {port} "
    "--dtype {dtype} --max-model-len {context} --generation-config vllm --no-enable-prefix-caching"
)


class ServingSettings(Settings):
    """The serve check (`snakemake serving`): a vLLM with the drafter beside one without."""

    python: Path = Path(".venv-vllm/bin/python")
    """The interpreter of vLLM's environment; a path without a folder is looked up in PATH."""
    command: str = _SERVE
    """The command that starts the server without a drafter, as one line; {python}, {model}, {host}, {port},
    {dtype} and {context}, the tokens that it must take, are filled in."""
    drafted_command: str | None = None
    """That of the server with the drafter; {drafter} and {draft_tokens} are filled in, too. null: `command`
    with vLLM's --speculative-config."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Numbers that both servers and Eyrie's own decoding compute with. Equal outputs are promised in float32
    only; with fewer bits each difference is reported."""
    draft_tokens: Positive = 3
    """Length of the drafted chains."""
    prompts_per_dataset: Positive = 2
    """Held-out prompts of each dataset, the first of those that the evaluation takes."""
    max_new_tokens: Positive = 64
    """Tokens of an answer."""
    rounds: Positive = 3
    """How often both servers answer all prompts, in turns; the speed-up is the rounds' median."""
    tolerance: Share = 0.03
    """By how much of it the server's acceptance length may differ from Eyrie's own on the same prompts."""
    threads: Positive = 2
    """CPU threads of Eyrie's own decoding."""
    ready_timeout: Annotated[float, Field(gt=0.0)] = 1800.0
    """Seconds until a server must be ready."""
    request_timeout: Annotated[float, Field(gt=0.0)] = 900.0
    """Seconds that one answer may take."""

    @model_validator(mode="after")
    def _has_a_port(self) -> Self:
        for name in ("command", "drafted_command"):
            value = getattr(self, name)
            if value is not None and "{port}" not in value:
                raise ValueError(
                    f"serving.{name}: saw no {{port}} in {value!r}; the check chooses a free one"
                )
        return self
