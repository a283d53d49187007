"""Judge a drafter on held-out prompts by decoding with it: acceptance, exactness and speed.

Reads the rows whose split is held_out and no others. Every chosen prompt is decoded with the drafter, some
of them by the target alone, too: in float32 the two must agree token for token, or the build stops.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyrie.chat.encoders import load_tokenizer
from eyrie.config import EvaluationSettings, parse_settings
from eyrie.console import Progress, run_command, start_log
from eyrie.decoding import DraftedOutput
from eyrie.evaluation import (
    acceptance_figures,
    check_identical,
    equality_figures,
    family_figures,
    speed_figures,
    stored_answers_equal,
    warnings,
)
from eyrie.held_out import HeldOutPrompt, choose_prompts, read_held_out, round_robin
from eyrie.measuring import Decoded, decode_prompts, differences, load_pair, measure_costs
from eyrie.paying import in_words, pays_figures
from eyrie.provenance import manifest_header
from eyrie.records import read_json, write_json
from eyrie.remote_code import trusted_code

_WARM_UP_TOKENS = 8
_SAMPLES = 10
_PROMPT_CHARACTERS = 600


def main() -> None:
    """Run the command."""
    args = _arguments()
    log = start_log("evaluate_drafter", args.log)
    settings = parse_settings(EvaluationSettings, args.settings)
    torch.set_num_threads(settings.threads)
    lengths = list(dict.fromkeys(settings.draft_tokens))
    held_out = read_held_out(args.tokenized)
    prompts = round_robin(choose_prompts(held_out.prompts, settings.prompts_per_dataset))
    exact = len(prompts) if settings.exact_prompts == "all" else settings.exact_prompts

    target, drafter = load_pair(args.target_path, args.checkpoint, settings.dtype)
    decode_prompts(target, drafter, prompts[:1], 1, lengths, _WARM_UP_TOKENS)
    progress = Progress(len(prompts), "prompts", log)
    decoded = decode_prompts(target, drafter, prompts, exact, lengths, settings.max_new_tokens, progress)
    seconds = progress.close()
    found = differences(target, decoded)
    if settings.dtype == "float32":
        check_identical(found)
    costs = measure_costs(target, drafter, prompts[0].prompt_ids, lengths) if settings.measure_speed else None
    del target, drafter

    acceptance = acceptance_figures(decoded, lengths)
    rates = {length: acceptance["acceptance_by_position"][str(length)] for length in lengths}
    figures = {
        **acceptance,
        "unseen_families": family_figures(decoded, held_out.families, lengths),
        "identical_outputs": {"dtype": settings.dtype, **equality_figures(decoded, found)},
        "stored_answers_equal": stored_answers_equal(decoded),
        **speed_figures(decoded, lengths, costs),
        "pays": pays_figures(rates, costs, settings.costs),
        "bfloat16": _in_bfloat16(args, settings, prompts[: settings.bfloat16_prompts], lengths),
        "without_prompt": held_out.without_prompt,
        "samples": list(_samples(args, decoded, lengths[0])),
    }
    figures["warnings"] = warnings(figures)
    parents = [args.checkpoint / "model.safetensors", args.checkpoint / "config.json", args.target]
    header = manifest_header(
        "evaluation", settings.model_dump(mode="json"), parents + args.tokenized, ["torch", "transformers"]
    )
    write_json(args.out, header | figures)
    log_figures(log, figures)
    tokens = sum(len(output.token_ids) for one in decoded for output in one.drafted.values())
    log.info(
        "%d prompts, %d drafted tokens, %.0f s, %.1f tokens/s -> %s",
        len(prompts),
        tokens,
        seconds,
        tokens / seconds,
        args.out,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter's checkpoint")
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target model")
    parser.add_argument(
        "--settings", required=True, help="JSON of the `evaluation` part of the configuration"
    )
    parser.add_argument("--out", type=Path, required=True, help="evaluation.json")
    parser.add_argument("--log", type=Path, help="also write the log there")
    return parser.parse_args()


def _in_bfloat16(
    args: argparse.Namespace,
    settings: EvaluationSettings,
    prompts: Sequence[HeldOutPrompt],
    lengths: Sequence[int],
) -> dict[str, Any] | None:
    """The first prompts decoded once more in bfloat16, where differences are reported and stop nothing."""
    if not prompts:
        return None
    target, drafter = load_pair(args.target_path, args.checkpoint, "bfloat16")
    decoded = decode_prompts(target, drafter, prompts, len(prompts), lengths, settings.max_new_tokens)
    return equality_figures(decoded, differences(target, decoded))


def _samples(args: argparse.Namespace, decoded: Sequence[Decoded], length: int) -> Iterator[dict[str, Any]]:
    """Decoded examples for a reader, one of each dataset, with where each token came from."""
    trusted = trusted_code(read_json(args.target), args.target_path)
    tokenizer = load_tokenizer(args.target_path, trusted)
    datasets = {one.prompt.dataset: one for one in reversed(decoded)}
    for name in sorted(datasets)[:_SAMPLES]:
        prompt, output = datasets[name].prompt, datasets[name].drafted[length]
        yield {
            "id": prompt.id,
            "dataset": name,
            "draft_tokens": length,
            "prompt": tokenizer.decode(prompt.prompt_ids)[-_PROMPT_CHARACTERS:],
            "tokens": shown_tokens(tokenizer, output),
        }


def shown_tokens(tokenizer: Any, output: DraftedOutput) -> list[list[str]]:
    """[text, "accepted" or "target"] for each token; where drafts were refused for it also their text."""
    shown = []
    for place, text in enumerate(token_texts(tokenizer, output.token_ids)):
        token = [text, "accepted" if output.from_drafter[place] else "target"]
        if place in output.refused:
            # With what stands before them, since a token's text depends on its neighbours.
            drafted = output.token_ids[:place] + output.refused[place]
            token.append("".join(token_texts(tokenizer, drafted)[place:]))
        shown.append(token)
    return shown


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes whole with its last."""
    texts, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], clean_up_tokenization_spaces=False)
        unfinished = text.endswith("\ufffd") and end < len(token_ids)
        texts.append("" if unfinished else text[len(shown) :])
        shown = shown if unfinished else text
    return texts


def log_figures(log: logging.Logger, figures: Mapping[str, Any]) -> None:
    """The figures as a table for a reader."""
    lengths = list(figures["acceptance_length"])
    log.info("acceptance length by dataset, with drafts of %s tokens:", " and ".join(lengths))
    for name in figures["acceptance_length"][lengths[0]]:
        cells = (figures["acceptance_length"][length][name] for length in lengths)
        log.info("  %-24s%s", name, "".join("       -" if x is None else f"{x:8.2f}" for x in cells))
    for length in lengths:
        rates = figures["acceptance_by_position"][length]
        log.info("  by position, %s drafted: %s", length, " ".join(f"{rate:.3f}" for rate in rates))
    equal = figures["identical_outputs"]
    log.info("identical outputs: %d of %d in %s", equal["equal"], equal["total"], equal["dtype"])
    if figures["bfloat16"]:
        log.info("  in bfloat16: %d of %d", figures["bfloat16"]["equal"], figures["bfloat16"]["total"])
    if figures["speed_up"]:
        speed, costs = figures["tokens_per_second"], figures["costs"]
        log.info(
            "plain: %.1f tokens/s, %.1f ms a step",
            speed["plain"],
            costs["plain_step_ms"],
        )
        for length in lengths:
            log.info(
                "%s drafted: %.1f tokens/s on %d prompts, speed-up %.2f, predicted %.2f "
                "(verify %.1f, draft %.1f ms)",
                length,
                speed["drafted"][length],
                speed["prompts"][length],
                figures["speed_up"][length],
                costs["predicted_speed_up"][length] or 0.0,
                costs["verify_step_ms"][length],
                costs["draft_step_ms"][length],
            )
    for line in in_words(figures["pays"]) if figures["pays"] else []:
        log.info("%s", line)
    for warning in figures["warnings"]:
        log.warning("warning: %s", warning)


if __name__ == "__main__":
    run_command(main)
