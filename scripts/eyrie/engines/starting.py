"""The server that the engine settings name, started for as long as it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from eyrie.config import EngineSettings, HiddenStatesSettings
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm
from eyrie.serving import HOST, Server, arriving_files, fill_command, free_port
from eyrie.states import command_values


@contextmanager
def started(
    settings: EngineSettings,
    command: str,
    target_path: Path,
    states: HiddenStatesSettings,
    arriving: Path,
    log: Path,
    trusted: bool,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[Server]:
    """The server of `command`, on a free port and ready; it ends with the block.

    arriving: the folder where it leaves hidden states, if it is to leave any; emptied at both ends of the
    block. trusted: whether it may run Python of the target's folder. on_wait: see Server. Raises ServerError
    where it ends, or is not ready in time.
    """
    port = free_port()
    values: dict[str, object] = {
        "python": settings.python,
        "model": target_path,
        "host": HOST,
        "port": port,
        "trust_remote_code": "--trust-remote-code" if trusted else "",
    }
    files: AbstractContextManager[object] = nullcontext()
    if settings.capture != "in_process":
        values |= command_values(states, target_path, arriving)
        files = arriving_files(arriving)
    with (
        files,
        Server(
            fill_command(command, **values),
            f"http://{HOST}:{port}",
            log=log,
            ready_timeout=settings.ready_timeout,
            stop_grace=settings.stop_grace,
            health_path=(Sglang if settings.kind == "sglang" else Vllm).health_path,
            on_wait=on_wait,
            restarts=settings.restarts,
        ) as server,
    ):
        yield server
