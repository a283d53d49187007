"""The proof, before the first prompt, that a server is the one that was meant.

A server that serves another model, or this one with another configuration, answers just as well: days of
answers would be another model's. So it is asked what it is (model, revision, context, speculation, width of
its hidden states), whether it takes the recipe's sampling, and for a canary: the greedy answer to a fixed
prompt. The first canary is recorded beside the answers, and every later start must repeat it. Each check
raises IdentityError with what was seen, what was expected, and the flag to set.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import DraftSettings, SamplingSettings
from eyrie.engines.canary import ask_canary, compare_canary
from eyrie.engines.questions import IdentityError, Questions, mismatch
from eyrie.engines.replies import Dialect

_FLAGS = {
    "vllm": {
        "model": "--model, or --served-model-name",
        "context": "--max-model-len",
        "speculation": '--speculative-config \'{"method": "eagle3", ...}\'',
    },
    "sglang": {
        "model": "--model-path, or --served-model-name",
        "context": "--context-length",
        "speculation": "--speculative-algorithm EAGLE3 (not EAGLE)",
    },
}


@dataclass(frozen=True)
class Expected:
    """What a server must be. command: what started it, where that is known: it tells what no reply tells."""

    kind: str
    """vllm or sglang."""
    target: Mapping[str, Any]
    """What target.json holds."""
    path: Path
    """The target's folder."""
    sampling: SamplingSettings
    context: int
    """Tokens of the longest prompt and its answer."""
    served_model: str | None = None
    draft: DraftSettings | None = None
    command: str | None = None


@dataclass(frozen=True)
class _Facts:
    """What a server says of itself; {} and [] where it has no such page."""

    models: list[dict[str, Any]]
    info: dict[str, Any]
    version: str


def prove(
    url: str,
    dialect: Dialect,
    expected: Expected,
    canary_prompt: Sequence[int],
    records: Path,
    timeout: float,
) -> dict[str, Any]:
    """Check all of it and return what a manifest should tell of the server. Raises IdentityError.

    canary_prompt: token ids, of CANARY_MESSAGES. records: the folder of the canaries of these answers.
    """
    ask = Questions(url, timeout)
    facts = _facts(ask, expected.kind)
    model = _check_model(url, facts, expected)
    context = _check_context(url, facts, expected)
    speculation = _check_speculation(ask, facts, expected)
    # What the recipe samples with must be taken; it is also the first request that a new server gets.
    ask.answer(dialect, canary_prompt, expected.sampling.model_copy(update={"max_new_tokens": 1}))
    width = _check_hidden_width(ask, dialect, expected, canary_prompt)
    dtype = _dtype(facts, expected.command)
    canary = ask_canary(ask, dialect, expected.kind, canary_prompt)
    compare_canary(url, canary, records, f"{expected.kind}-{facts.version}", dtype)
    return {
        "engine": expected.kind,
        "version": facts.version,
        "model": model,
        "dtype": dtype,
        "context_length": context,
        "speculation": speculation,
        "hidden_width": width,
        # The template comes first: what it was filled with, a port, differs from one start to the next.
        "command": expected.command or facts.info.get("launch_command"),
        "canary": canary.token_ids,
    }


def _facts(ask: Questions, kind: str) -> _Facts:
    models = ask.get("/v1/models").get("data") or []
    if kind == "vllm":
        version, info = ask.get("/version").get("version"), {}
    else:
        info = {**ask.get("/model_info", "/get_model_info"), **ask.get("/server_info", "/get_server_info")}
        version = info.get("version")
    if not models or version is None:
        raise IdentityError(
            f"{ask.url} tells no {'version' if models else 'models'}\n"
            f"  expected: a server of kind {kind}\n"
            "  change: engine.kind, or engine.urls"
        )
    return _Facts(list(models), info, str(version))


def _check_model(url: str, facts: _Facts, expected: Expected) -> str:
    """The model's name; it must be the target's: by folder, by name, or by what the configuration says."""
    target, flag = expected.target, _FLAGS[expected.kind]["model"]
    ids = [str(model.get("id")) for model in facts.models]
    if expected.served_model is not None:
        if expected.served_model not in ids:
            raise mismatch(url, "another model", ", ".join(ids), expected.served_model, flag)
        return expected.served_model
    names = [*ids, *(str(model.get("root")) for model in facts.models)]
    names += [str(facts.info[key]) for key in ("model_path", "served_model_name") if key in facts.info]
    wanted = [name for name in (target["name"], target.get("hub_id")) if name]
    if not any(name in wanted or _same_folder(name, expected.path) for name in names):
        raise mismatch(
            url,
            "another model",
            ", ".join(dict.fromkeys(names)),
            " or ".join([*wanted, str(expected.path)]),
            f"the server's {flag} {target['name']} if it is the target all the same, or engine.served_model",
        )
    seen, revision = facts.info.get("revision"), target.get("hub_revision")
    if seen and revision and seen != revision:
        raise mismatch(url, "another revision", seen, revision, "the server's --revision")
    return ids[0]


def _same_folder(name: str, path: Path) -> bool:
    return os.path.isdir(name) and os.path.realpath(name) == os.path.realpath(path)


def _check_context(url: str, facts: _Facts, expected: Expected) -> int | None:
    """The tokens that it takes; None where it does not say."""
    told = [model.get("max_model_len") for model in facts.models] + [facts.info.get("context_length")]
    context = next((int(length) for length in told if length), None)
    if context is not None and context < expected.context:
        flag = _FLAGS[expected.kind]["context"]
        raise mismatch(
            url,
            "too short a context",
            f"{context} tokens",
            f"{expected.context} tokens for the longest prompt and its answer",
            f"the server's {flag} {expected.context}, or the partition's max_new_tokens",
        )
    return context


def _check_speculation(ask: Questions, facts: _Facts, expected: Expected) -> str | None:
    """The algorithm; what it is is asked only where the configuration says what it must be."""
    if expected.draft is None:
        return None
    if expected.kind == "sglang":
        seen = facts.info.get("speculative_algorithm")
    else:
        seen = _vllm_speculation(ask, expected.command)
    seen = str(seen).upper() if seen else None
    if seen != expected.draft.algorithm:
        flag = _FLAGS[expected.kind]["speculation"]
        value = f" {expected.draft.algorithm}" if expected.kind == "sglang" else ""
        change = (
            f"the server's {flag}{value}" if expected.draft.algorithm else f"leave out the server's {flag}"
        )
        raise mismatch(
            ask.url, "another speculation", seen or "none", expected.draft.algorithm or "none", change
        )
    return seen


def _vllm_speculation(ask: Questions, command: str | None) -> str | None:
    """vLLM tells that it speculates, and how only in its development mode; else the command tells."""
    told = ask.get("/server_info?config_format=json").get("vllm_config")
    if isinstance(told, dict):
        return (told.get("speculative_config") or {}).get("method")
    if command is not None:
        setting = _option(command, "--speculative-config", "--speculative_config")
        return None if setting is None else json.loads(setting).get("method")
    if "spec_decode" not in ask.get_text("/metrics"):
        return None
    raise IdentityError(
        f"{ask.url} speculates and does not tell how\n"
        "  expected: its configuration at /server_info\n"
        "  change: start the server with VLLM_SERVER_DEV_MODE=1, or leave out engine.draft"
    )


def _option(command: str, *names: str) -> str | None:
    """The value of an option in a command line."""
    words = shlex.split(command)
    for at, word in enumerate(words):
        name, given, value = word.partition("=")
        if name in names:
            return value if given else next(iter(words[at + 1 :]), None)
    return None


def _dtype(facts: _Facts, command: str | None) -> str:
    """The numbers that the server computes with, as far as that is known: float32, bfloat16, ... or auto."""
    told = facts.info.get("dtype") or (_option(command, "--dtype") if command else None) or "auto"
    return {"float": "float32", "half": "float16"}.get(str(told), str(told))


def _check_hidden_width(
    ask: Questions, dialect: Dialect, expected: Expected, prompt: Sequence[int]
) -> int | None:
    """Columns of a reply's hidden states, where the configuration says how many there must be."""
    wanted = None if expected.draft is None else expected.draft.hidden_width
    if wanted is None:
        return None
    if expected.kind != "sglang":
        raise IdentityError(
            f"engine.draft.hidden_width: {expected.kind} puts no hidden states into its replies\n"
            "  expected: it with kind sglang only\n  change: leave out the key"
        )
    more = {"return_hidden_states": True}
    _, reply = ask.answer(dialect, prompt, SamplingSettings(max_new_tokens=1), more)
    columns = len(_first_row(reply["meta_info"].get("hidden_states")))
    if columns != wanted:
        raise mismatch(
            ask.url,
            "hidden states of another width",
            f"{columns} columns",
            f"{wanted} columns",
            "the server's --enable-return-hidden-states, and for three layers side by side "
            "--speculative-algorithm EAGLE3 (not EAGLE) or --enable-return-aux-hidden-states",
        )
    return wanted


def _first_row(states: Any) -> Sequence[Any]:
    """The first row of numbers in lists of any depth: prompts come as matrices, generated tokens as rows."""
    while isinstance(states, list) and states and isinstance(states[0], list):
        states = states[0]
    return states if isinstance(states, list) else []
