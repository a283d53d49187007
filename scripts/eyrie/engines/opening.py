"""From the settings to an engine that is ready: weights loaded, or servers found and proved to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import (
    ConfigError,
    EngineSettings,
    HiddenStatesSettings,
    SamplingSettings,
    config_line,
)
from eyrie.engines import Engine
from eyrie.engines.identity import Expected, prove
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm, served_model
from eyrie.serving import HOST, Server, fill_command, free_port, server_urls
from eyrie.stopping import StopRequest


@dataclass(frozen=True)
class Wanted:
    """The target that is to answer, and how."""

    target: Mapping[str, Any]
    """What target.json holds."""
    path: Path
    """The target's folder."""
    dtype: str
    """The numbers that an in-process pass computes with."""
    states: HiddenStatesSettings
    """Which states an in-process pass leaves; servers leave none."""
    sampling: SamplingSettings
    context: int
    """Tokens of the longest prompt and its answer."""
    canary_prompt: Sequence[int]
    """Token ids of CANARY_MESSAGES."""
    canaries: Path
    """The folder where the servers' canaries are recorded, beside the answers."""
    server_log: Path
    """Where a server that is started here writes its log."""


@contextmanager
def open_engine(settings: EngineSettings, wanted: Wanted, stop: StopRequest) -> Iterator[Engine]:
    """The engine that the settings name, ready to answer; what was started for it ends with the block.

    Raises BuildError where it can't be had or is not what was asked for.
    """
    if settings.kind == "in_process":
        # The target's library takes seconds to load, and servers need nothing of it.
        from eyrie.engines.in_process import InProcessEngine  # noqa: PLC0415
        from eyrie.target import Target  # noqa: PLC0415

        target = Target(wanted.path, wanted.dtype, wanted.states.layer_ids)
        yield InProcessEngine(target, settings, wanted.states.computed_dtype, stop)
        return
    with _servers(settings, wanted, stop) as (urls, command, watch):
        dialect = _dialect(settings, wanted, urls)
        expected = Expected(
            kind=settings.kind,
            target=wanted.target,
            path=wanted.path,
            sampling=wanted.sampling,
            context=settings.context_length or wanted.context,
            served_model=settings.served_model,
            draft=settings.draft,
            command=command,
        )

        def verify(url: str) -> dict[str, Any]:
            timeout = min(settings.request_timeout, settings.ready_timeout)
            return prove(url, dialect, expected, wanted.canary_prompt, wanted.canaries, timeout)

        proved = [verify(url) for url in urls]
        yield RequestingEngine(urls, dialect, settings, stop, verify, watch, proved[0])


@contextmanager
def _servers(
    settings: EngineSettings, wanted: Wanted, stop: StopRequest
) -> Iterator[tuple[list[str], str | None, Callable[[], None] | None]]:
    """The servers' addresses, what started them if that is known, and what looks after one started here.

    Raises BuildError.
    """
    if server_urls():
        yield server_urls(), settings.command, None
        return
    if settings.urls:
        yield settings.urls, None, None
        return
    if settings.command is None:
        raise ConfigError(
            f"{config_line(['engine'])}: kind {settings.kind} without urls or command\n"
            "  expected: the addresses of running servers, or the command that starts one\n"
            "  change: engine.urls or engine.command, or run the build by scripts/with_server.py"
        )

    def leave_off_when_asked() -> None:
        if stop.requested:
            raise stop.stopped()

    port = free_port()
    with Server(
        fill_command(settings.command, model=wanted.path, host=HOST, port=port),
        f"http://{HOST}:{port}",
        log=wanted.server_log,
        ready_timeout=settings.ready_timeout,
        stop_grace=settings.stop_grace,
        health_path=(Sglang if settings.kind == "sglang" else Vllm).health_path,
        on_wait=leave_off_when_asked,
    ) as server:
        yield [server.url], settings.command, server.check


def _dialect(settings: EngineSettings, wanted: Wanted, urls: list[str]) -> Dialect:
    rules = AnswerRules(wanted.target["vocab_size"], frozenset(wanted.target["eos_ids"]))
    if settings.kind == "sglang":
        return Sglang(rules)
    return Vllm(served_model(urls[0], settings.served_model), rules)
