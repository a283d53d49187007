"""Start the server that the configuration names, run a command, and stop the server.

    python scripts/with_server.py -- snakemake --cores all responses
    python scripts/with_server.py --config config.yaml configs/vllm.yaml -- COMMAND ARGUMENT...

The command finds the server's address in EYRIE_SERVER_URLS, and so do all jobs that it starts: one start
serves all datasets. Ctrl-C, SIGTERM and SIGHUP are handed to the command's processes, which finish what is
running; what has not ended engine.stop_grace and a minute later is stopped. When the server ends first the
command is stopped. The status is the command's, or 1 where the server failed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from eyrie.config import Config, ConfigError
from eyrie.config_files import read_config
from eyrie.console import run_command, start_log
from eyrie.engines.starting import started
from eyrie.serving import URLS_VARIABLE, Kept, Server

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a command has beyond the grace of its jobs to end after a signal.
_SECONDS_TO_END = 60.0


@contextmanager
def server_of(config: Config) -> Iterator[Server]:
    """The server that the configuration's engine section starts. Raises ConfigError where it starts none."""
    engine = config.engine
    if engine.kind == "in_process" or engine.command is None:
        raise ConfigError(
            f"engine: saw kind {engine.kind} and command {engine.command}\n"
            "  expected: a server's kind (vllm, sglang) and the command that starts it\n"
            "  change: engine.kind and engine.command, or run the command without with_server.py"
        )
    # Where the server leaves hidden states until the jobs take them.
    arriving = config.work / "store" / "arriving" / "shared"
    log = config.work / "logs" / "server.log"
    target = config.target
    with started(
        engine, engine.command, target.path, config.hidden_states, arriving, log, target.trust_remote_code
    ) as server:
        yield server


class Beside:
    """A command that runs beside the server, for as long as both run."""

    def __init__(self, server: Server, command: list[str], grace: float) -> None:
        self._server = server
        self._command = command
        self._grace = grace
        self._deadline = math.inf

    def run(self) -> int:
        """Run it; returns its status. Raises ServerError if the server ends for good."""
        environment = {**os.environ, URLS_VARIABLE: self._server.url}
        with Kept(self._command, self._grace, environment=environment) as kept, self._handed_to(kept):
            while (status := kept.poll()) is None:
                self._server.check()
                if time.monotonic() > self._deadline:
                    break
                time.sleep(0.2)
            else:
                return status
        # Leaving the block has stopped it.
        return kept.poll() or 1

    @contextmanager
    def _handed_to(self, kept: Kept) -> Iterator[None]:
        """Hand signals to the command rather than end by them; it then has its time to end."""

        def hand_on(number: int, frame: FrameType | None) -> None:
            kept.send(signal.Signals(number))
            self._deadline = min(self._deadline, time.monotonic() + self._grace + _SECONDS_TO_END)

        former = {number: signal.signal(number, hand_on) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--config",
        type=Path,
        nargs="+",
        default=[Path("config.yaml")],
        help="configuration files, each laid over those before it; by default config.yaml",
    )
    parser.add_argument("command", nargs="+", help="after --: what to run")
    arguments = parser.parse_args()
    start_log("with_server", None)
    config = read_config(arguments.config)
    with server_of(config) as server:
        status = Beside(server, arguments.command, config.engine.stop_grace).run()
    sys.exit(status)


if __name__ == "__main__":
    run_command(main)
