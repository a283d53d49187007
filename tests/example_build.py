"""The files of a small made-up build, with every kind of evidence, as the report reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eyrie.records import write_json, write_jsonl

NAMES = ["chat", "issues", "maths"]
EVIL = "<script>alert('x')</script>"
DRAFTER = "work/small/drafter"
HEADER = {
    "schema_version": 1,
    "recipe": {"threads": 2},
    "parents": {
        "work/small/target.json": "ab" * 32,
        f"{DRAFTER}/checkpoint/model.safetensors": "cd" * 32,
    },
    "versions": {"eyrie": "0.1.0"},
}


def write_build(folder: Path, names: list[str]) -> list[str]:
    """Write the files of a build of these datasets; returns the report's flags, as seen from the folder."""
    write_json(folder / "work/config.json", config(names))
    for rank, name in enumerate(names):
        _write_dataset(folder / "work", rank, name)
    coverage = {"train": 0.9871, "validation": 0.9583}
    write_json(
        folder / DRAFTER / "vocabulary.json",
        HEADER | {"draft_vocab_size": 4096, "vocab_size": 49152, "coverage": coverage},
    )
    parents = {f"work/small/hidden_states/{name}/manifest.json": "12" * 32 for name in names}
    parents |= {f"{DRAFTER}/vocabulary.json": "34" * 32}
    write_json(folder / DRAFTER / "checkpoint/training.json", HEADER | training() | {"parents": parents})
    write_jsonl(folder / DRAFTER / "training.jsonl", training_lines())
    write_json(folder / DRAFTER / "evaluation.json", HEADER | evaluation(names))
    arguments = ["--config", "work/config.json", "--vocabulary", f"{DRAFTER}/vocabulary.json"]
    arguments += ["--checkpoint", f"{DRAFTER}/checkpoint", "--training-log", f"{DRAFTER}/training.jsonl"]
    arguments += ["--evaluation", f"{DRAFTER}/evaluation.json", "--ledgers"]
    arguments += [f"work/prompts/{name}/ledger.json" for name in names]
    arguments += [f"work/small/tokenized/{name}/ledger.json" for name in names]
    arguments += ["--tokenized", *(f"work/small/tokenized/{name}/tokenized_data.jsonl" for name in names)]
    return [*arguments, "--manifests", *(f"work/small/hidden_states/{name}/manifest.json" for name in names)]


def write_evidence(folder: Path, names: list[str]) -> list[str]:
    """Write what not every build has; returns its flags."""
    files = {"acceptance": acceptance(names), "scaling": scaling(), "serving": serving(names)}
    for name, figures in files.items():
        write_json(folder / DRAFTER / f"{name}.json", HEADER | figures)
    pays = {"pays": paying()}
    write_json(folder / DRAFTER / "evaluation.json", HEADER | evaluation(names) | pays)
    return [word for name in files for word in (f"--{name}", f"{DRAFTER}/{name}.json")]


def _write_dataset(work: Path, rank: int, name: str) -> None:
    raw = 60 + 7 * rank
    skipped = {"duplicate_prompt": 3 + rank, "empty_prompt": 2} if rank != 1 else {}
    kept = raw - sum(skipped.values())
    source = {"files": [{"name": f"{name}.jsonl", "bytes": 10, "sha256": "ef" * 32}]}
    write_json(
        work / "raw" / name / "source.json",
        {"dataset": name, **source, "settings": {"files": [f"{name}.jsonl"], "format": "jsonl"}},
    )
    read = {"dataset": name, "stage": "prompts", "in": raw, "kept": kept, "skipped": skipped}
    read |= {"parents": {f"work/raw/{name}/source.json": "56" * 32}, "layout": "messages"}
    write_json(work / "prompts" / name / "ledger.json", read)
    # A reason may stop rows of both stages.
    lost = {"prompt_too_long": rank, "empty_prompt": 0} if rank else {}
    samples = kept - rank
    tokenized = work / "small/tokenized" / name
    write_json(
        tokenized / "ledger.json",
        HEADER
        | {
            "dataset": name,
            "stage": "answer_prompts",
            "in": kept,
            "kept": samples,
            "skipped": lost,
            "engines": [{"engine": "vllm", "version": "0.32.0", "dtype": "float32"}],
            "samples": {"train": samples - 10, "validation": 3, "held_out": 7},
            "supervised_tokens": {"train": 1900 + 130 * rank, "validation": 120, "held_out": 240},
            "parents": {f"work/prompts/{name}/prompts.jsonl": "78" * 32},
        },
    )
    write_jsonl(tokenized / "tokenized_data.jsonl", (row(name, i, rank) for i in range(samples)))
    states = {"dataset": name, "layer_ids": [2, 15, 27], "dtype": "bfloat16", "numbering": []}
    states["counts"] = {"samples": samples, "tokens": 7000 + 500 * rank}
    states["parents"] = {f"work/small/tokenized/{name}/tokenized_data.jsonl": "9a" * 32}
    write_json(work / "small/hidden_states" / name / "manifest.json", HEADER | states)


def row(name: str, number: int, rank: int) -> dict[str, Any]:
    """A row of tokenized_data.jsonl: its prompt has 3 + number tokens, its answer 2 + rank + number % 7."""
    prompt, answer = 3 + number, 2 + rank + number % 7
    return {
        "id": f"{name}{number}",
        "dataset": name,
        "group": str(number),
        "split": "train",
        "input_ids": list(range(prompt + answer)),
        "loss_mask": [0] * prompt + [1] * answer,
        "finish_reason": "stop",
        "greedy": True,
    }


def config(names: list[str]) -> dict[str, Any]:
    dataset = {
        "source": {"files": ["rows.jsonl"], "format": "jsonl"},
        "licence": "Apache-2.0",
        "layout": "messages",
        "kind": "prompts",
    }
    return {
        "target": {"name": "small", "path": "models/x", "hub_id": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "partitions": {"short": {"max_new_tokens": 64}},
        "datasets": dict.fromkeys(names, dataset),
    }


def training() -> dict[str, Any]:
    counts = {"train_rows": 640, "train_places": 20000, "epochs": 10, "steps": 490, "validation_rows": 20}
    return {"counts": counts}


def training_lines() -> list[dict[str, Any]]:
    """training.jsonl: 490 steps and a validation after every 49th."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 491):
        loss = 4.0 / (1 + step / 60) + 2.1 + (step % 5) / 20
        right = [round(0.6 - 0.1 * rank - 0.3 / (1 + step / 40), 4) for rank in range(3)]
        lines.append({"step": step, "epoch": 1, "loss": loss, "right_by_step": right, "tokens": 40})
        if step % 49 == 0:
            length = 2.0 - 1 / (1 + step / 49)
            figures = {"rows": 20, "acceptance_length": length, "accepted_at": [0.5, 0.3, length - 1.8]}
            lines.append({"step": step, "epoch": 1, "validation": figures})
    return lines


def evaluation(names: list[str]) -> dict[str, Any]:
    lengths = {
        key: {"all": 1.9 + offset, **{name: 1.6 + offset + 0.08 * i for i, name in enumerate(names)}}
        for key, offset in (("3", 0.0), ("5", 0.07))
    }
    text = "Here is a function that adds two numbers :\n\ndef add ( a , b ) :\n return a + b\n"
    words = re.findall(r"\S+\s*", text)
    tokens = [[word, "accepted" if i % 5 in (1, 2) else "target"] for i, word in enumerate(words)]
    tokens[8].append("the sum of ")
    return {
        "acceptance_length": lengths,
        "acceptance_by_position": {"3": [0.54, 0.31, 0.17], "5": [0.53, 0.3, 0.17, 0.09, 0.04]},
        "prompts": {"3": dict.fromkeys(names, 4), "5": dict.fromkeys(names, 2)},
        "cycles": {"3": 700, "5": 300},
        "unseen_families": {"datasets": names[1:2], "acceptance_length": {"3": 1.7, "5": 1.8}},
        "identical_outputs": {"dtype": "float32", "equal": 20, "total": 20, "differences": []},
        "stored_answers_equal": {"equal": 12, "total": 20},
        "tokens_per_second": {
            "plain": 25.1,
            "drafted": {"3": 37.9, "5": 36.0},
            "prompts": {"3": 20, "5": 10},
        },
        "speed_up": {"3": 1.51, "5": 1.43},
        "costs": {
            "plain_step_ms": 39.8,
            "verify_step_ms": {"3": 48.1, "5": 52.0},
            "draft_step_ms": {"3": 2.2, "5": 2.1},
            "predicted_speed_up": {"3": 1.55, "5": 1.46},
        },
        "bfloat16": {
            "equal": 3,
            "total": 4,
            "differences": [
                {"id": "ab12", "dataset": names[0], "draft_tokens": 3, "position": 17, "margin": 0.125}
            ],
        },
        "without_prompt": {},
        "distinct_bigrams": 0.8,
        "samples": [
            {
                "id": name,
                "dataset": name,
                "draft_tokens": 3,
                "prompt": f"<user>{EVIL}",
                "tokens": [*tokens, [EVIL, "accepted"]],
            }
            for name in names
        ],
        "warnings": [],
    }


def acceptance(names: list[str]) -> dict[str, Any]:
    """acceptance.json: greedy and sampled walks with intervals."""

    def figures(length: float, drafted: int) -> dict[str, Any]:
        rates = [round((length - 1) * 0.6 / (1 + rank), 4) for rank in range(drafted)]
        known = {"low": length - 0.1, "high": length + 0.15, "cycles": 400, "groups": 30}
        return {"acceptance_length": length, **known, "by_position": rates}

    def walk(length: float, drafted: int) -> dict[str, Any]:
        return {
            "all": figures(length, drafted),
            "datasets": {name: figures(length + 0.1 * i, drafted) for i, name in enumerate(names)},
            "partitions": {"short": figures(length, drafted)},
            "kinds": {"prompts": figures(length, drafted)},
            "answer_position": [
                {"from": 16 * i, "to": 16 * (i + 1), **figures(length - 0.05 * i, drafted)} for i in range(4)
            ],
        }

    return {
        "draft_tokens": [3, 5],
        "walk": {
            str(drafted): {"greedy": walk(1.85 + extra, drafted), "sampled": walk(1.7 + extra, drafted)}
            for drafted, extra in ((3, 0.0), (5, 0.08))
        },
        "all_positions": {"3": {"greedy": 2.05, "sampled": 1.9}, "5": {"greedy": 2.12, "sampled": 1.97}},
        "unique_ngrams": {
            "n": 4,
            "all": 0.83,
            "datasets": dict.fromkeys(names, 0.83),
            "degenerate_samples": 2,
            "without_degenerate": {"3": 1.82},
        },
        "warnings": [],
    }


def paying() -> dict[str, Any]:
    return {
        "costs": {
            "source": "measured",
            "target_step_ms": 39.8,
            "draft_step": {"3": 0.055, "5": 0.053},
            "verify_step": {"3": 1.21, "5": 1.31},
        },
        "speed_up": {"1": 1.21, "2": 1.34, "3": 1.38, "4": 1.37, "5": 1.29},
        "best_draft_tokens": 3,
        "break_even": {"3": 1.375, "5": 1.575},
        "margin": {"3": 0.525, "5": 0.395},
        "pays": True,
    }


def scaling() -> dict[str, Any]:

    def point(doublings: int) -> dict[str, Any]:
        length = 1.4 + 0.165 * doublings
        known = {"acceptance_length": length, "low": length - 0.08, "high": length + 0.09}
        return {"tokens": 2500 * 2**doublings, **known}

    shares = ("1/8", "1/4", "1/2", "1")
    points = [{**point(i), "share": share, "groups": 80 * 2**i} for i, share in enumerate(shares)]
    curve = [point(doublings) for doublings in range(6)]
    return {
        "points": points,
        "draft_tokens": 3,
        "fit": {"form": "a - b * tokens ** -c", "parameters": {"a": 4.0, "b": 6.0, "c": 0.1}, "curve": curve},
        "needed": {
            "acceptance_length": {"2.0": {"tokens": 31000, "low": 24000, "high": 52000}},
            "break_even": {"tokens": 2400, "low": 2000, "high": 2900},
        },
        "prediction_of_last": {"predicted": 1.93, "low": 1.81, "high": 2.07, "truth": 1.9},
    }


def serving(names: list[str]) -> dict[str, Any]:
    rounds = [{"plain": 29.0 + i, "drafted": 52.0 + i, "speed_up": (52.0 + i) / (29.0 + i)} for i in range(3)]
    return {
        "engine": {
            "name": "vLLM",
            "version": "0.32.0",
            "command": ["vllm", "serve", "models/x", "--speculative-config", '{"method": "eagle3"}'],
            "command_plain": ["vllm", "serve", "models/x"],
            "dtype": "float32",
        },
        "draft_tokens": 3,
        "prompts": 20,
        "acceptance_length": {"server": 2.09, "eyrie": 2.1, "relative_difference": -0.0048},
        "acceptance_by_position": {"server": [0.55, 0.33, 0.21], "eyrie": [0.56, 0.33, 0.21]},
        "counters": {"drafts": 873, "draft_tokens": 2619, "accepted_tokens": 954},
        "reported": {},
        "tokens_per_second": {"plain": 30.0, "drafted": 53.0},
        "rounds": rounds,
        "speed_up": rounds[1]["speed_up"],
        "identical_outputs": {
            "equal": 19,
            "total": 20,
            "differences": [{"id": "ab12", "dataset": names[0], "position": 17, "margin": 0.00002}],
        },
        "findings": [],
        "passed": True,
    }
