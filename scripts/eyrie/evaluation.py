"""The figures of evaluation.json, from what was decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eyrie.acceptance import (
    Cycle,
    acceptance_by_position,
    acceptance_length,
    distinct_bigrams,
    full_cycles,
    predicted_speed_up,
)
from eyrie.gates import GateError
from eyrie.measuring import Costs, Decoded, Difference

# Below this share of distinct token pairs, outputs repeat themselves so much that drafting them is too easy.
_LOOPING = 0.5


def check_identical(found: Sequence[Difference]) -> None:
    """Stop where a drafted output is not the plain one, which rounding can't explain in float32."""
    if not found:
        return
    lines = "\n".join(
        f"    prompt {one.id} (dataset {one.dataset}), {one.draft_tokens} draft tokens: first at token "
        f"{one.position}, where the two best logits of plain decoding lie {one.margin:.2g} apart"
        for one in found
    )
    raise GateError(
        f"drafted decoding does not write what plain decoding writes\n"
        f"  seen: {len(found)} differences in float32\n{lines}\n"
        f"  expected: none, since every token is the target's own choice\n"
        f"  change: where the logits lie less than about 1e-4 apart, rounding decided between equals: take "
        f"another evaluation.threads or evaluation.max_new_tokens; otherwise the target's cache or its "
        f"attention is at fault, and the drafter should not be used with it"
    )


def acceptance_figures(decoded: Sequence[Decoded], lengths: Sequence[int]) -> dict[str, Any]:
    """Prompts, full cycles, acceptance length (in all and by dataset) and rates, by length of the drafts."""
    datasets = sorted({one.prompt.dataset for one in decoded})
    figures: dict[str, Any] = {
        "prompts": {},
        "cycles": {},
        "acceptance_length": {},
        "acceptance_by_position": {},
    }
    for length in lengths:
        key = str(length)
        cycles = _cycles(decoded, length)
        figures["prompts"][key] = dict(
            sorted(Counter(one.prompt.dataset for one in decoded if length in one.drafted).items())
        )
        figures["cycles"][key] = len(full_cycles(cycles, length))
        figures["acceptance_length"][key] = {
            "all": acceptance_length(cycles, length),
            **{name: acceptance_length(_cycles(decoded, length, {name}), length) for name in datasets},
        }
        figures["acceptance_by_position"][key] = acceptance_by_position(cycles, length)
    texts = [one.drafted[lengths[0]].token_ids for one in decoded]
    figures["distinct_bigrams"] = sum(map(distinct_bigrams, texts)) / len(texts)
    return figures


def family_figures(
    decoded: Sequence[Decoded], families: Sequence[str], lengths: Sequence[int]
) -> dict[str, Any] | None:
    """Acceptance in the datasets whose held-out groups are whole families; None without such a dataset."""
    names = sorted({one.prompt.dataset for one in decoded} & set(families))
    if not names:
        return None
    return {
        "datasets": names,
        "acceptance_length": {
            str(length): acceptance_length(_cycles(decoded, length, set(names)), length) for length in lengths
        },
    }


def _cycles(decoded: Sequence[Decoded], length: int, datasets: Collection[str] | None = None) -> list[Cycle]:
    return [
        cycle
        for one in decoded
        if length in one.drafted and (datasets is None or one.prompt.dataset in datasets)
        for cycle in one.drafted[length].cycles
    ]


def stored_answers_equal(decoded: Sequence[Decoded]) -> dict[str, int]:
    """How many plain outputs are the stored answers, as far as both go.

    Informative only: stored answers come from a batched pass, which rounds differently, or from sampling.
    """
    pairs = [(one.plain.token_ids, one.prompt.answer_ids) for one in decoded if one.plain is not None]
    equal = sum(all(a == b for a, b in zip(plain, stored, strict=False)) for plain, stored in pairs)
    return {"equal": equal, "total": len(pairs)}


def speed_figures(decoded: Sequence[Decoded], lengths: Sequence[int], costs: Costs | None) -> dict[str, Any]:
    """Tokens per second, speed-up and costs over the prompts that were decoded both ways.

    A speed-up compares the same prompts, plain and drafted. All three are None without costs: then no
    figure may depend on the clock.
    """
    if costs is None:
        return {"tokens_per_second": None, "speed_up": None, "costs": None}
    plain = [one for one in decoded if one.plain is not None]
    rates, prompts, speed_up, predicted = {}, {}, {}, {}
    for length in lengths:
        timed = [one for one in plain if length in one.drafted]
        key, prompts[str(length)] = str(length), len(timed)
        tokens = sum(len(one.drafted[length].token_ids) for one in timed)
        rates[key] = tokens / sum(one.drafted_seconds[length] for one in timed)
        speed_up[key] = rates[key] / _plain_rate(timed)
        mean = acceptance_length(_cycles(timed, length), length)
        predicted[key] = mean and predicted_speed_up(
            mean,
            length,
            costs.draft_step[length] / costs.plain_step,
            costs.verify_step[length] / costs.plain_step,
        )
    return {
        "tokens_per_second": {"plain": _plain_rate(plain), "drafted": rates, "prompts": prompts},
        "speed_up": speed_up,
        "costs": {
            "plain_step_ms": costs.plain_step,
            "verify_step_ms": {str(length): cost for length, cost in costs.verify_step.items()},
            "draft_step_ms": {str(length): cost for length, cost in costs.draft_step.items()},
            "predicted_speed_up": predicted,
        },
    }


def _plain_rate(decoded: Sequence[Decoded]) -> float:
    tokens = sum(len(one.plain.token_ids) for one in decoded if one.plain is not None)
    return tokens / sum(one.plain_seconds for one in decoded)


def equality_figures(decoded: Sequence[Decoded], found: Sequence[Difference]) -> dict[str, Any]:
    """How many drafted outputs were compared with plain ones, how many are equal, and where others differ."""
    total = sum(len(one.drafted) for one in decoded if one.plain is not None)
    return {"equal": total - len(found), "total": total, "differences": [asdict(one) for one in found]}


def warnings(figures: Mapping[str, Any]) -> list[str]:
    """What a reader should know before trusting the figures, in words."""
    found = []
    lengths = [value["all"] for value in figures["acceptance_length"].values()]
    if all(length is None for length in lengths):
        found.append(
            "No answer was long enough to offer the drafter a whole chain of drafts, so there is no "
            "acceptance length. Raise evaluation.max_new_tokens or lower evaluation.draft_tokens."
        )
    elif all(length in (None, 1.0) for length in lengths):
        found.append(
            "Not one drafted token was accepted. A drafter that learnt anything is right now and then; "
            "likely causes: features of other layers than it was trained on (layer ids), a vocabulary map "
            "that does not belong to it (d2t), or a state taken on the wrong side of the norm."
        )
    if figures["distinct_bigrams"] < _LOOPING:
        found.append(
            f"Only {figures['distinct_bigrams']:.0%} of the token pairs of an answer differ: the target "
            f"repeats itself, which is easy to draft. Livelier answers will be accepted less often."
        )
    return found
