"""What is wrong with a drafter that is served, in words, and what to look at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyrie.serving_check.servers import same_folder

# Served or decoded, a drafter that keeps less than this share of what it gained in the evaluation is not the
# one that was evaluated: other prompts of the same datasets explain far less.
_LEAST_OF_EVALUATED = 0.5


def findings(
    figures: Mapping[str, Any],
    layer_ids: Sequence[int],
    checkpoint: Path,
    tolerance: float,
    evaluated: float | None,
) -> list[str]:
    """Everything that makes the check fail, the likeliest cause first; empty where all is well.

    figures: what serving.json holds. layer_ids: those of the checkpoint. evaluated: the acceptance length in
    evaluation.json at as many draft tokens, where it is known.
    """
    return [
        *_of_the_report(figures, layer_ids, checkpoint),
        *_of_acceptance(figures["acceptance_length"], figures["draft_tokens"], tolerance),
        *_of_the_checkpoint(figures["acceptance_length"]["eyrie"], evaluated),
        *_of_outputs(figures["identical_outputs"], figures["engine"]["dtype"]),
        *_of_the_target(figures["outputs_as_eyrie"], figures["engine"]["dtype"]),
    ]


def _of_the_report(figures: Mapping[str, Any], layer_ids: Sequence[int], checkpoint: Path) -> Iterator[str]:
    told = figures["reported"]
    if told["layer_ids"] not in (None, list(layer_ids)):
        yield (
            f"The server captures layers {told['layer_ids']}, and the checkpoint was trained on "
            f"{list(layer_ids)}. Change eagle_config.eagle_aux_hidden_state_layer_ids in its config.json."
        )
    if told["draft_tokens"] not in (None, figures["draft_tokens"]):
        yield (
            f"The server drafts {told['draft_tokens']} tokens a step, not {figures['draft_tokens']}. Change "
            "num_speculative_tokens in serving.drafted_command."
        )
    if told["drafter"] is not None and not same_folder(told["drafter"], checkpoint):
        yield (
            f"The server drafts with {told['drafter']}, not with {checkpoint}. Change "
            "serving.drafted_command."
        )


def _of_acceptance(lengths: Mapping[str, Any], draft_tokens: int, tolerance: float) -> Iterator[str]:
    served, own = lengths["server"], lengths["eyrie"]
    if served is None:
        yield (
            "The server drafted nothing. Likely causes: it was started without --speculative-config, or its "
            "answers end with the first token (another target, or other end tokens)."
        )
    elif served == 1.0:
        yield (
            f"The server accepted not one of its drafts of {draft_tokens} tokens: acceptance length exactly "
            "1.0. Likely causes, in this order: the method (EAGLE in place of EAGLE3 leaves fc out), a head "
            "that is missing or random (lm_head.weight), a map that is missing or holds the target's ids "
            "(d2t), other layers than it was trained on (layer ids, or the blocks of fc in another order), "
            "another target." + _eyrie_says(own)
        )
    elif own is not None and abs(served - own) > tolerance * own:
        yield (
            f"The server's acceptance length is {served:.3f} where Eyrie has {own:.3f} on the same prompts: "
            f"{served / own - 1:+.1%}, and {tolerance:.0%} is allowed. Likely causes: other layers in the "
            "server than in the checkpoint's config.json, other numbers (--dtype, quantization) than "
            f"serving.dtype, another drafter than {draft_tokens} tokens a step."
        )


def _eyrie_says(own: float | None) -> str:
    if own is None or own == 1.0:
        return " Eyrie accepts none either: it is the checkpoint, and not the server."
    return f" Eyrie accepts {own:.3f} with the same file: it is how the server reads it."


def _of_the_checkpoint(own: float | None, evaluated: float | None) -> Iterator[str]:
    if own is not None and evaluated is not None and own - 1 < _LEAST_OF_EVALUATED * (evaluated - 1):
        yield (
            f"Eyrie's own acceptance length with this checkpoint is {own:.3f}, and evaluation.json tells "
            f"{evaluated:.3f}: these are not the weights that were evaluated, or not with this target. "
            "Likely causes: the blocks of fc in another order, other layer ids, another head or map. Run "
            "scripts/lint_checkpoint.py, or train anew: a finished training is only written out again."
        )


def _of_outputs(equality: Mapping[str, Any], dtype: str) -> Iterator[str]:
    if dtype != "float32":
        return
    for one in equality["differences"]:
        margin = "unknown" if one["margin"] is None else f"{one['margin']:.2g}"
        yield (
            f"Prompt {one['id']} (dataset {one['dataset']}): with the drafter the answer is another from "
            f"token {one['position']} on, where the best two log-probabilities lie {margin} apart. In "
            "float32 none may differ; below about 1e-4 it was rounding between equals, and another "
            "serving.max_new_tokens may pass. Otherwise the server does not verify what it accepts."
        )


def _of_the_target(as_eyrie: Mapping[str, int], dtype: str) -> Iterator[str]:
    if dtype == "float32" and 2 * as_eyrie["equal"] < as_eyrie["total"]:
        yield (
            f"Without the drafter the server writes what Eyrie writes for only {as_eyrie['equal']} "
            f"of {as_eyrie['total']} prompts: it serves another target, or computes in other numbers. Change "
            "--target-path, or serving.command."
        )
