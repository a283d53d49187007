"""From the settings to an engine that is ready: weights loaded, or servers found and proved to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.config import EngineSettings, HiddenStatesSettings
from eyrie.engines import Engine
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm, served_model
from eyrie.stopping import StopRequest


@dataclass(frozen=True)
class Served:
    """The target that is to answer: what target.json holds, its folder, and the in-process numbers."""

    target: Mapping[str, Any]
    path: Path
    dtype: str
    states: HiddenStatesSettings
    """Which states an in-process pass leaves; servers leave none."""


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
    else:
        urls = settings.urls
        yield RequestingEngine(urls, _dialect(settings, served, urls), settings, stop)


def _dialect(settings: EngineSettings, served: Served, urls: list[str]) -> Dialect:
    rules = AnswerRules(served.target["vocab_size"], frozenset(served.target["eos_ids"]))
    if settings.kind == "sglang":
        return Sglang(rules)
    return Vllm(served_model(urls[0], settings.served_model), rules)
