"""From the settings to an engine that is ready: weights loaded, or servers found and proved to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import ConfigError, EngineSettings, HiddenStatesSettings, config_line
from eyrie.engines import Engine
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm, served_model
from eyrie.serving import HOST, Server, fill_command, free_port, server_urls
from eyrie.stopping import StopRequest


@dataclass(frozen=True)
class Served:
    """The target that is to answer: what target.json holds, its folder, and the in-process numbers."""

    target: Mapping[str, Any]
    path: Path
    dtype: str
    states: HiddenStatesSettings
    """Which states an in-process pass leaves; servers leave none."""
    server_log: Path
    """Where a server that is started here writes its log."""


@contextmanager
def open_engine(settings: EngineSettings, served: Served, stop: StopRequest) -> Iterator[Engine]:
    """The engine that the settings name, ready to answer; what was started for it ends with the block.

    Raises BuildError where it can't be had or is not what was asked for.
    """
    if settings.kind == "in_process":
        # The target's library takes seconds to load, and servers need nothing of it.
        from eyrie.engines.in_process import InProcessEngine  # noqa: PLC0415
        from eyrie.target import Target  # noqa: PLC0415

        target = Target(served.path, served.dtype, served.states.layer_ids)
        yield InProcessEngine(target, settings, served.states.dtype, stop)
        return
    with _servers(settings, served, stop) as (urls, watch):
        yield RequestingEngine(urls, _dialect(settings, served, urls), settings, stop, watch=watch)


@contextmanager
def _servers(
    settings: EngineSettings, served: Served, stop: StopRequest
) -> Iterator[tuple[list[str], Callable[[], None] | None]]:
    """The addresses of the servers, and what looks after one that was started here. Raises BuildError."""
    urls = server_urls() or settings.urls
    if urls:
        yield urls, None
        return
    if settings.command is None:
        raise ConfigError(
            f"{config_line(['engine'])}: kind {settings.kind} without urls or command
"
            "  expected: the addresses of running servers, or the command that starts one
"
            "  change: engine.urls or engine.command, or run the build by scripts/with_server.py"
        )

    def leave_off_when_asked() -> None:
        if stop.requested:
            raise stop.stopped()

    port = free_port()
    with Server(
        fill_command(settings.command, model=served.path, host=HOST, port=port),
        f"http://{HOST}:{port}",
        log=served.server_log,
        ready_timeout=settings.ready_timeout,
        stop_grace=settings.stop_grace,
        health_path=(Sglang if settings.kind == "sglang" else Vllm).health_path,
        on_wait=leave_off_when_asked,
    ) as server:
        yield [server.url], server.check


def _dialect(settings: EngineSettings, served: Served, urls: list[str]) -> Dialect:
    rules = AnswerRules(served.target["vocab_size"], frozenset(served.target["eos_ids"]))
    if settings.kind == "sglang":
        return Sglang(rules)
    return Vllm(served_model(urls[0], settings.served_model), rules)
