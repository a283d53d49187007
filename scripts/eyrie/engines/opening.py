"""From the settings to an engine that is ready: weights loaded, or servers found and proved to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.config import (
    ConfigError,
    EngineSettings,
    HiddenStatesSettings,
    SamplingSettings,
    config_line,
)
from eyrie.engines import Capture, Engine
from eyrie.engines.identity import Expected, prove
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.sglang import Sglang
from eyrie.engines.starting import started
from eyrie.engines.vllm import Vllm, served_model
from eyrie.remote_code import trusted_code
from eyrie.serving import server_urls
from eyrie.states import served_layer_ids, wanted_layer_ids
from eyrie.stopping import StopRequest, unless_stopped

if TYPE_CHECKING:
    from eyrie.engines.in_process import InProcessEngine
    from eyrie.engines.state_files import StateReader
    from eyrie.target_weights import TargetWeights


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
    """Which states a pass leaves."""
    sampling: SamplingSettings
    context: int
    """Tokens of the longest prompt and its answer."""
    canary_prompt: Sequence[int]
    """Token ids of CANARY_MESSAGES."""
    canaries: Path
    """The folder where the servers' canaries are recorded, beside the answers."""
    server_log: Path
    """Where a server that is started here writes its log."""
    arriving: Path
    """The folder where a server that is started here leaves hidden states."""


@contextmanager
def open_engine(settings: EngineSettings, wanted: Wanted, stop: StopRequest) -> Iterator[Engine]:
    """The engine that the settings name, ready to answer; what was started for it ends with the block.

    Raises BuildError where it can't be had or is not what was asked for.
    """
    if settings.kind == "in_process":
        yield _in_process(settings, wanted, stop)
        return
    reader = None
    if settings.capture == "answers":
        reader = _state_reader(wanted, with_answer=True)
    with _requesting(settings, wanted, stop, reader) as engine:
        yield engine


@contextmanager
def open_capture(
    settings: EngineSettings, wanted: Wanted, stop: StopRequest
) -> Iterator[tuple[Capture, dict[str, Any]]]:
    """What captures finished samples, and what it is; what was started for it ends with the block.

    Raises BuildError where it can't be had or is not what was asked for.
    """
    if settings.capture == "in_process":
        running = _in_process(settings, wanted, stop)
        yield running, running.described()
        return
    from eyrie.engines.capturing import ServerCapture  # noqa: PLC0415

    with _requesting(settings, wanted, stop, _state_reader(wanted, with_answer=False)) as engine:
        head = _weights(wanted).head()
        yield ServerCapture(engine, head, wanted.sampling.max_in_flight), engine.described()


def _in_process(settings: EngineSettings, wanted: Wanted, stop: StopRequest) -> InProcessEngine:
    # The target's library takes seconds to load, and servers need nothing of it.
    from eyrie.engines.in_process import InProcessEngine  # noqa: PLC0415
    from eyrie.target import Target  # noqa: PLC0415

    target = Target(wanted.path, wanted.dtype, wanted.states.layer_ids)
    return InProcessEngine(target, settings, wanted.states.computed_dtype, stop)


def _weights(wanted: Wanted) -> TargetWeights:
    from eyrie.target_weights import TargetWeights  # noqa: PLC0415 - loads torch

    return TargetWeights(wanted.path, wanted.target["files"])


def _state_reader(wanted: Wanted, with_answer: bool) -> StateReader:
    """Reads what the servers leave, with what of the target's weights that takes."""
    from eyrie.engines.state_files import StateReader  # noqa: PLC0415 - loads torch
    from eyrie.target import DTYPES, read_text_config  # noqa: PLC0415

    weights, config = _weights(wanted), read_text_config(wanted.path)
    layers = wanted.target["layers"]
    layer_ids = wanted_layer_ids(wanted.states, layers)
    return StateReader(
        layer_ids=layer_ids,
        served=served_layer_ids(layer_ids, layers),
        dtype=DTYPES[wanted.states.computed_dtype],
        embedding=weights.embedding(),
        norm=weights.final_norm(),
        epsilon=config.rms_norm_eps,
        with_answer=with_answer,
    )


@contextmanager
def _requesting(
    settings: EngineSettings, wanted: Wanted, stop: StopRequest, reader: StateReader | None
) -> Iterator[RequestingEngine]:
    """The engine that asks servers, each of them proved to be the right one."""
    with _servers(settings, wanted, stop) as (urls, command, watch):
        dialect = _dialect(settings, wanted, urls, reader)
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

        proved = unless_stopped(stop, lambda: [verify(url) for url in urls])
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

    with started(
        settings,
        settings.command,
        wanted.path,
        wanted.states,
        wanted.arriving,
        wanted.server_log,
        trusted_code(wanted.target, wanted.path),
        leave_off_when_asked,
    ) as server:
        yield [server.url], settings.command, server.check


def _dialect(
    settings: EngineSettings, wanted: Wanted, urls: list[str], reader: StateReader | None
) -> Dialect:
    rules = AnswerRules(wanted.target["vocab_size"], frozenset(wanted.target["eos_ids"]))
    if settings.kind == "sglang":
        return Sglang(rules)
    return Vllm(served_model(urls[0], settings.served_model), rules, reader)
