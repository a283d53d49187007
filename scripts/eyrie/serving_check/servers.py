"""The two servers of the check, and what the one with the drafter tells of its speculation."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import DraftSettings, SamplingSettings, ServingSettings
from eyrie.engines.commands import vllm_speculation
from eyrie.engines.identity import Expected, prove
from eyrie.engines.questions import Questions
from eyrie.engines.replies import AnswerRules
from eyrie.engines.vllm import Vllm, served_model
from eyrie.serving import HOST, Server, fill_command, free_port

# Unfinished answers are of no use once the check ends.
_STOP_GRACE = 10.0
# vLLM tells the layers that it captures in its log alone.
_LAYERS = re.compile(r"auxiliary layers from speculative config: \(([\d, ]*)\)")


@dataclass(frozen=True)
class Subject:
    """What is served: the target (its folder, and what target.json holds), the checkpoint's folder, and how
    many tokens a server must take."""

    target: Mapping[str, Any]
    target_path: Path
    checkpoint: Path
    context: int


@dataclass(frozen=True)
class Running:
    """A server that is ready and is what it should be. facts: what identity.prove tells of it."""

    server: Server
    ask: Questions
    dialect: Vllm
    facts: dict[str, Any]


@contextmanager
def both_servers(
    settings: ServingSettings, subject: Subject, canary_prompt: Sequence[int], logs: Path
) -> Iterator[tuple[Running, Running]]:
    """The server without the drafter and the one with it, both ready and proved; they end with the block.

    Raises ServerError and IdentityError.
    """
    with ExitStack() as stack:
        found = []
        for name, words in (("plain", plain_words), ("drafted", drafted_words)):
            port = free_port()
            log = logs / f"serve_check.{name}.log"
            # An earlier start's log tells of earlier layers.
            log.unlink(missing_ok=True)
            server = Server(
                # In this mode vLLM tells its configuration.
                ["env", "VLLM_SERVER_DEV_MODE=1", *words(settings, subject, port)],
                f"http://{HOST}:{port}",
                log=log,
                ready_timeout=settings.ready_timeout,
                stop_grace=_STOP_GRACE,
            )
            stack.enter_context(server)
            found.append(_proved(server, name == "drafted", settings, subject, canary_prompt))
        yield found[0], found[1]


def plain_words(settings: ServingSettings, subject: Subject, port: int) -> list[str]:
    """The words of the command without a drafter."""
    return fill_command(settings.command, **_values(settings, subject, port))


def drafted_words(settings: ServingSettings, subject: Subject, port: int) -> list[str]:
    """The words of the command with the drafter."""
    if settings.drafted_command is None:
        speculation = vllm_speculation(subject.checkpoint, settings.draft_tokens)
        return [*plain_words(settings, subject, port), *speculation]
    drafting = {"drafter": subject.checkpoint, "draft_tokens": settings.draft_tokens}
    return fill_command(settings.drafted_command, **_values(settings, subject, port), **drafting)


def _values(settings: ServingSettings, subject: Subject, port: int) -> dict[str, object]:
    return {
        "python": settings.python,
        "model": subject.target_path,
        "host": HOST,
        "port": port,
        "dtype": settings.dtype,
        "context": subject.context,
    }


def _proved(
    server: Server, drafts: bool, settings: ServingSettings, subject: Subject, canary_prompt: Sequence[int]
) -> Running:
    rules = AnswerRules(subject.target["vocab_size"], frozenset(subject.target["eos_ids"]))
    dialect = Vllm(served_model(server.url, None), rules)
    expected = Expected(
        kind="vllm",
        target=subject.target,
        path=subject.target_path,
        sampling=SamplingSettings(max_new_tokens=settings.max_new_tokens),
        context=subject.context,
        draft=DraftSettings(algorithm="EAGLE3" if drafts else None),
    )
    # Outputs are compared one by one later, so the canaries of the two servers are not.
    with tempfile.TemporaryDirectory() as records:
        facts = prove(server.url, dialect, expected, canary_prompt, Path(records), settings.request_timeout)
    return Running(server, Questions(server.url, settings.request_timeout), dialect, facts)


def reported(drafted: Running, hidden_size: int) -> dict[str, Any]:
    """What the server tells of its speculation; None where it does not tell.

    algorithm: vLLM's method in capitals. drafter: its folder. layer_ids: the layers that it captures, from
    its log. hidden_width: the columns that they make, H a layer.
    """
    page = drafted.ask.get("/server_info?config_format=json").get("vllm_config") or {}
    told = (page.get("speculative_config") if isinstance(page, dict) else None) or {}
    layer_ids = captured_layers(drafted.server.log.read_text(encoding="utf-8", errors="replace"))
    return {
        "algorithm": drafted.facts["speculation"],
        "draft_tokens": told.get("num_speculative_tokens"),
        "drafter": told.get("model"),
        "layer_ids": layer_ids,
        "hidden_width": None if layer_ids is None else len(layer_ids) * hidden_size,
    }


def captured_layers(log: str) -> list[int] | None:
    """The layers that the latest start in a vLLM's log says it captures; None where it says nothing."""
    found = _LAYERS.findall(log)
    return [int(layer) for layer in re.findall(r"\d+", found[-1])] if found else None


def same_folder(one: str, other: Path) -> bool:
    """Whether a server's name for a folder is that folder."""
    return os.path.realpath(one) == os.path.realpath(other)
