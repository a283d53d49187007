"""The README of a checkpoint's folder: what the drafter is for, what made it, its figures, how to serve it.

In the form of a Hugging Face model card: a head of YAML that the hub reads, then Markdown. It holds no time
and no path, so that the same build writes the same card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from eyrie.config import ConfigError
from eyrie.eagle3.checkpoint import AS_IS_SINCE, engine_layer_ids
from eyrie.engines.commands import for_a_shell, sglang_command, vllm_command

FOLDER = "PATH/TO/THIS/FOLDER"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class CardInputs:
    """What a card is made of, as the build's files hold it.

    recipe: what recipes.card_recipe gives. target: target.json. model_type: the target's, of its text
    configuration. drafter, training: config.json and training.json of the checkpoint. ledgers: of both row
    stages, by dataset: rows read and rows tokenized.
    """

    recipe: Mapping[str, Any]
    target: Mapping[str, Any]
    model_type: str
    drafter: Mapping[str, Any]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    samples: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        """What the target is called where it comes from."""
        return str(self.target.get("hub_id") or self.target["name"])

    @property
    def layer_ids(self) -> list[int]:
        """The captured layers."""
        return list(self.drafter["eagle_config"][_LAYER_IDS])


def model_card(inputs: CardInputs) -> str:
    """The card's text."""
    parts = [
        f"---\n{yaml.safe_dump(_metadata(inputs), sort_keys=False, allow_unicode=True)}---",
        f"# EAGLE-3 drafter for {inputs.name}",
        f"It proposes tokens that {inputs.name} then checks, so that the output is the target's own; it is "
        "of no use with any other model.",
        _table(["", ""], _facts(inputs)),
        "## Serving",
        *_serving(inputs),
        "## Acceptance",
        *_acceptance(inputs),
        "## Data",
        *_data(inputs),
        "## Training",
        *_training(inputs),
        "## Limits",
        "\n".join(f"* {limit}" for limit in _limits(inputs)),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(inputs: CardInputs) -> dict[str, Any]:
    hubs = sorted({made["hub_id"] for made in inputs.recipe["datasets"].values() if made["hub_id"]})
    head: dict[str, Any] = {"license": inputs.recipe["licence"] or "other"}
    if inputs.recipe["licence"] is None:
        head["license_name"] = "those-of-target-and-data"
    head |= {
        "base_model": inputs.name,
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "vllm", "sglang"],
    }
    return head | ({"datasets": hubs} if hubs else {})


def _facts(inputs: CardInputs) -> Iterator[tuple[str, str]]:
    target, drafter = inputs.target, inputs.drafter
    yield "target", inputs.name
    if target.get("hub_revision"):
        yield "its revision on the hub", f"`{target['hub_revision']}`"
    yield "digest of its files", f"`{target['revision']}`"
    yield "captured layers", f"{inputs.layer_ids}, counted as Hugging Face's `hidden_states`"
    yield "draft vocabulary", f"{drafter['draft_vocab_size']:,} of {drafter['vocab_size']:,} tokens"
    yield "positions", f"{drafter['max_position_embeddings']:,}"
    yield "weights", "bfloat16, one Llama layer, without the embedding, which is the target's"


def _serving(inputs: CardInputs) -> Iterator[str]:
    draft_tokens = int(inputs.recipe["draft_tokens"])
    yield f"vLLM (the layer ids are read from config.json: {inputs.layer_ids}):"
    yield f"```\n{for_a_shell(vllm_command(inputs.name, FOLDER, draft_tokens))}\n```"
    yield "SGLang:"
    yield f"```\n{for_a_shell(sglang_command(inputs.name, FOLDER, draft_tokens))}\n```"
    yield sglang_note(inputs.model_type, inputs.layer_ids)
    yield (
        "The method is `eagle3`, the algorithm `EAGLE3`: with `--speculative-algorithm EAGLE` SGLang serves "
        "without an error, leaves half of the drafter out and accepts nothing."
    )


def sglang_note(model_type: str, layer_ids: Sequence[int]) -> str:
    """Whether SGLang takes the ids in config.json for the same layers, and what to do where it does not."""
    try:
        ids = engine_layer_ids("sglang", model_type, layer_ids)
    except ConfigError as error:
        return f"Not for SGLang: {str(error).splitlines()[0]}."
    if ids == list(layer_ids):
        return (
            f"SGLang counts the layers as written here (Kimi's and DeepSeek's: builds since {AS_IS_SINCE})."
        )
    return (
        "SGLang counts this target's layers from the other side: in a copy of this folder for SGLang, set "
        f"`{_LAYER_IDS}` in config.json to `{ids}`."
    )


def _acceptance(inputs: CardInputs) -> Iterator[str]:
    evaluation = inputs.evaluation
    lengths = list(evaluation["acceptance_length"])
    prompts = sum(evaluation["prompts"][lengths[0]].values())
    yield (
        f"Tokens written for each pass of the target (accepted ones and its own), decoding {prompts} "
        "held-out prompts greedily. They are of no group that was trained on."
    )
    names = ["all", *sorted(set(evaluation["acceptance_length"][lengths[0]]) - {"all"})]
    rows = [
        (name, *(_number(evaluation["acceptance_length"][length].get(name)) for length in lengths))
        for name in names
    ]
    yield _table(["held-out prompts of", *(f"{length} draft tokens" for length in lengths)], rows)
    for length in lengths:
        rates = evaluation["acceptance_by_position"][length]
        yield f"By position, {length} drafted: {', '.join(f'{rate:.3f}' for rate in rates) or 'none'}."
    equal = evaluation["identical_outputs"]
    yield (
        f"Outputs with the drafter and without it: {equal['equal']} of {equal['total']} are equal, token for "
        f"token, in {equal['dtype']}."
    )


def _data(inputs: CardInputs) -> Iterator[str]:
    yield (
        "Every answer that was trained on was written by the target itself, but for the rows of kind native, "
        "which keep the answers that they came with."
    )
    rows = []
    for name, made in sorted(inputs.recipe["datasets"].items()):
        read, kept = inputs.rows[name], inputs.samples[name]
        source = made["hub_id"] or "local files"
        if made["revision"]:
            source += f" at {made['revision'][:12]}"
        rows.append(
            (
                name,
                source,
                read["licence"],
                made["kind"],
                f"{read['in']:,}",
                f"{kept['samples'].get('train', 0):,}",
                f"{kept['supervised_tokens'].get('train', 0):,}",
            )
        )
    yield _table(
        ["dataset", "source", "licence", "kind", "raw rows", "rows trained on", "tokens trained on"], rows
    )


def _training(inputs: CardInputs) -> Iterator[str]:
    counts, recipe = inputs.training["counts"], inputs.training["recipe"]["training"]
    yield (
        f"{counts['train_rows']:,} rows with {counts['train_places']:,} supervised positions, "
        f"{counts['epochs']} epochs, {counts['steps']:,} steps."
    )
    yield _table(["setting", "value"], [(name, f"`{value}`") for name, value in sorted(recipe.items())])
    last = inputs.training.get("kept") or (inputs.training["validation"] or [{}])[-1]
    length = last.get("acceptance_length")
    if length is not None:
        yield (
            f"On {last['rows']} validation rows the acceptance length, replayed from stored states at 3 "
            f"draft tokens, is {length:.3f}."
        )
    yield "training.json holds all settings, the curves, and the digests of what was written."


def _limits(inputs: CardInputs) -> Iterator[str]:
    supervised = sum(kept["supervised_tokens"].get("train", 0) for kept in inputs.samples.values())
    yield f"It has seen {supervised:,} tokens of answers, to prompts of the kinds above; others accept less."
    longest = inputs.recipe["longest_answers"]
    yield f"Answers were cut at {longest} tokens: further on in a longer one, less may be accepted."
    left = inputs.drafter["vocab_size"] - inputs.drafter["draft_vocab_size"]
    yield f"{left:,} of the target's tokens can't be proposed at all."
    yield "Acceptance was measured greedily; sampling accepts less."
    yield from inputs.evaluation.get("warnings", [])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
