"""Have a real vLLM serve the drafter, and hold what it does to what Eyrie measures.

    make serve-check        # sets up vLLM's environment and builds work/TARGET/drafter/serving.json

First the checkpoint is looked over as by lint_checkpoint.py. Then two servers are started side by side, one
with the drafter and one without, and answer the same held-out prompts greedily, one at a time, in turns.
Their answers must be the same (in float32 each difference fails, in fewer bits it is listed), and the
acceptance length by the server's own counts must be Eyrie's on the same prompts. Both servers end with the
check, also when it fails or is interrupted. serving.json is written where the servers could be asked;
status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyrie.config import ServingSettings, parse_settings
from eyrie.console import Progress, run_command, start_log
from eyrie.eagle3.linting import lint, read_lint_target
from eyrie.gates import GateError
from eyrie.held_out import HeldOutPrompt, choose_prompts, read_held_out, round_robin
from eyrie.provenance import manifest_header
from eyrie.records import read_json, write_json
from eyrie.serving_check.counters import Counters, parse_counters, settled
from eyrie.serving_check.findings import findings
from eyrie.serving_check.own import decode_as_served
from eyrie.serving_check.rounds import ask_in_turns, equality_figures, speed_figures
from eyrie.serving_check.servers import Running, Subject, both_servers, reported


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter's checkpoint")
    parser.add_argument("--tokenized", type=Path, nargs="+", required=True, help="tokenized_data.jsonl files")
    parser.add_argument("--target", type=Path, required=True, help="target.json")
    parser.add_argument("--target-path", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--evaluation", type=Path, help="evaluation.json of this checkpoint")
    parser.add_argument("--settings", default="{}", help="JSON of the `serving` part of the configuration")
    parser.add_argument("--out", type=Path, required=True, help="serving.json")
    parser.add_argument("--log", type=Path, help="log file; the servers' logs are written beside it")
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = _arguments()
    log = start_log("serve_check", args.log)
    settings = parse_settings(ServingSettings, args.settings)
    torch.set_num_threads(settings.threads)
    held_out = read_held_out(args.tokenized)
    prompts = round_robin(choose_prompts(held_out.prompts, settings.prompts_per_dataset))
    # Near the end of an answer a server drafts beyond it.
    room = settings.max_new_tokens + settings.draft_tokens + 1
    context = max(len(prompt.prompt_ids) for prompt in prompts) + room
    _check_files(args.checkpoint, args.target_path, context)

    subject = Subject(read_json(args.target), args.target_path, args.checkpoint, context)
    logs = args.out.parent if args.log is None else args.log.parent
    figures = _figures(settings, subject, prompts, logs, log)
    layer_ids = read_json(args.checkpoint / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    evaluated = _evaluated(args.evaluation, settings.draft_tokens)
    figures["findings"] = findings(figures, layer_ids, args.checkpoint, settings.tolerance, evaluated)
    figures["passed"] = not figures["findings"]
    parents = [args.checkpoint / "model.safetensors", args.checkpoint / "config.json", args.target]
    header = manifest_header(
        "serving", settings.model_dump(mode="json"), parents + args.tokenized, ["torch", "transformers"]
    )
    write_json(args.out, header | figures)
    log_figures(log, figures)
    if figures["findings"]:
        raise GateError("the drafter is not served as it should be\n" + _listed(figures["findings"]))


def _figures(
    settings: ServingSettings,
    subject: Subject,
    prompts: Sequence[HeldOutPrompt],
    logs: Path,
    log: logging.Logger,
) -> dict[str, Any]:
    """What both servers did, and Eyrie's own decoding after they have ended."""
    with both_servers(settings, subject, prompts[0].prompt_ids, logs) as (plain, drafted):
        before = _counted(drafted)
        progress = Progress(len(prompts) * settings.rounds, "prompts", log)
        rounds = ask_in_turns(plain, drafted, prompts, settings.max_new_tokens, settings.rounds, progress)
        progress.close()
        served = _counted(drafted).since(before)
        equality = equality_figures(plain, prompts, rounds)
        told = reported(drafted, subject.target["hidden_size"])
    own = decode_as_served(
        subject.target_path,
        subject.checkpoint,
        settings.dtype,
        prompts,
        settings.max_new_tokens,
        settings.draft_tokens,
    )
    pairs = zip(rounds[0].plain.token_ids, own.token_ids, strict=True)
    return {
        "engine": {
            "name": drafted.facts["engine"],
            "version": drafted.facts["version"],
            "command": drafted.server.command,
            "command_plain": plain.server.command,
            "dtype": settings.dtype,
        },
        "draft_tokens": settings.draft_tokens,
        "prompts": len(prompts),
        "acceptance_length": _compared(served, own.counters),
        "acceptance_by_position": {"server": served.rates(), "eyrie": own.counters.rates()},
        "counters": {
            "drafts": served.drafts,
            "draft_tokens": served.draft_tokens,
            "accepted_tokens": served.accepted,
        },
        "reported": told,
        **speed_figures(rounds),
        "identical_outputs": equality,
        "outputs_as_eyrie": {"equal": sum(one == other for one, other in pairs), "total": len(prompts)},
    }


def _check_files(checkpoint: Path, target_path: Path, context: int) -> None:
    """What lint_checkpoint.py finds stops the check before a server is started. Raises GateError."""
    faults = lint(checkpoint, read_lint_target(target_path), context)
    if faults:
        raise GateError(
            f"{checkpoint} has faults that engines pass over in silence; no server was started\n"
            + _listed(fault.in_words().replace("\n", "\n    ") for fault in faults)
        )


def _listed(texts: Iterable[str]) -> str:
    return "\n".join(f"  * {text}" for text in texts)


def _counted(drafted: Running) -> Counters:
    """The server's counts, once they stand still. Raises GateError where it has none."""
    found = settled(lambda: parse_counters(drafted.ask.get_text("/metrics")))
    if found is None:
        raise GateError(
            f"{drafted.ask.url}/metrics counts no drafts\n"
            "  expected: vllm:spec_decode_num_drafts_total and what belongs to it\n"
            "  change: leave --disable-log-stats out of serving.command"
        )
    return found


def _compared(served: Counters, own: Counters) -> dict[str, float | None]:
    server, eyrie = served.acceptance_length(), own.acceptance_length()
    difference = None if server is None or eyrie is None else server / eyrie - 1
    return {"server": server, "eyrie": eyrie, "relative_difference": difference}


def _evaluated(evaluation: Path | None, draft_tokens: int) -> float | None:
    if evaluation is None:
        return None
    lengths = read_json(evaluation)["acceptance_length"].get(str(draft_tokens)) or {}
    return lengths.get("all")


def log_figures(log: logging.Logger, figures: Mapping[str, Any]) -> None:
    """The figures for a reader."""
    engine, lengths = figures["engine"], figures["acceptance_length"]
    log.info(
        "%s %s in %s, %d prompts", *(engine[k] for k in ("name", "version", "dtype")), figures["prompts"]
    )
    if lengths["relative_difference"] is not None:
        log.info(
            "acceptance length at %d draft tokens: %.3f by the server, %.3f by Eyrie (%+.1f %%)",
            figures["draft_tokens"],
            lengths["server"],
            lengths["eyrie"],
            100 * lengths["relative_difference"],
        )
    for name, rates in figures["acceptance_by_position"].items():
        log.info("  by position, %s: %s", name, " ".join(f"{rate:.3f}" for rate in rates))
    speed = figures["tokens_per_second"]
    log.info(
        "tokens/s: %.1f without the drafter, %.1f with it; speed-up by round %s, median %.2f",
        speed["plain"],
        speed["drafted"],
        " ".join(f"{one['speed_up']:.2f}" for one in figures["rounds"]),
        figures["speed_up"],
    )
    equal = figures["identical_outputs"]
    log.info("identical outputs: %d of %d", equal["equal"], equal["total"])
    for one in equal["differences"]:
        log.info("  %s %s: token %d, margin %s", *(one[k] for k in ("dataset", "id", "position", "margin")))


if __name__ == "__main__":
    run_command(main)
