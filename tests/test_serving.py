"""Servers here are scripts of a few lines with workers of their own: what matters is what lives on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

import with_server
from eyrie import keeper
from eyrie.serving import (
    HOST,
    URLS_VARIABLE,
    Kept,
    Server,
    ServerError,
    end_leftovers,
    fill_command,
    free_port,
    server_urls,
)
from workspace import TINY, Workspace

ROOT = Path(__file__).resolve().parent.parent

# Starts two workers, one of which leaves the group, writes all numbers to a file, and serves /health.
SERVER = """
import http.server, os, signal, subprocess, sys, time

port, pids, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sleep = [sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
         "print('up', flush=True); time.sleep(600)"]
workers = [subprocess.Popen(sleep, stdout=subprocess.PIPE, start_new_session=away) for away in (False, True)]
for worker in workers:
    worker.stdout.readline()
with open(pids + ".tmp", "w") as file:
    print(os.getpid(), *(worker.pid for worker in workers), file=file)
os.rename(pids + ".tmp", pids)
print("loading", flush=True)
if mode == "fails":
    print("out of memory: 3 of 5 blocks", file=sys.stderr)
    sys.exit(7)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "never":
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        if self.path == "/die":
            os._exit(3)
        self.send_response(200 if Handler.asked > 2 else 503)
        self.end_headers()

    def log_message(self, *arguments):
        pass


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# A job that starts such a server and then works, as answer_prompts does.
JOB = """
import sys, time
from pathlib import Path
from eyrie.serving import Server

folder, port, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
command = [sys.executable, str(folder / "server.py"), port, str(folder / "pids"), mode]
with Server(command, "http://127.0.0.1:" + port, log=folder / "server.log", ready_timeout=60, stop_grace=0.3):
    (folder / "ready").touch()
    time.sleep(600)
"""


class Place:
    """A folder with the server's script, and what the server wrote there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "server.py").write_text(SERVER)

    def server(
        self, mode: str = "well", ready_timeout: float = 60.0, stop_grace: float = 0.3, restarts: int = 0
    ) -> Server:
        script, pids = str(self.folder / "server.py"), str(self.folder / "pids")
        return Server(
            [sys.executable, script, str(self.port), pids, mode],
            f"http://{HOST}:{self.port}",
            log=self.folder / "server.log",
            ready_timeout=ready_timeout,
            stop_grace=stop_grace,
            restarts=restarts,
        )

    def job(self, mode: str = "well") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", JOB, str(self.folder), str(self.port), mode]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def pids(self) -> list[int]:
        wait_until((self.folder / "pids").exists)
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]

    def note(self) -> Path:
        return self.folder / "server.log.process.json"

    def keeper(self) -> int:
        return int(json.loads(self.note().read_text())["keeper"][0])


def wait_until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if keeper.start_time(pid) is not None]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_server_is_ready_inside_the_block_and_gone_after_it(place: Place) -> None:
    warmed = []
    server = place.server()
    server._warm_up = warmed.append
    with server:
        assert requests.get(server.url + "/health", timeout=5).status_code == 200
        server.check()
        assert len(living(place.pids())) == 3
        assert place.note().exists()
        # In a session of its own: Ctrl-C in a terminal reaches the job, not the server.
        assert os.getsid(place.pids()[0]) == place.pids()[0] != os.getsid(0)
    assert warmed == [server.url]
    assert not living(place.pids())
    assert not place.note().exists()
    assert b"loading" in (place.folder / "server.log").read_bytes()


def test_an_error_in_the_block_ends_the_server(place: Place) -> None:
    with pytest.raises(KeyError), place.server("deaf"):
        raise KeyError
    assert not living(place.pids())


def test_a_failed_warm_up_ends_the_server(place: Place) -> None:
    def fails(url: str) -> None:
        raise ServerError("no warm-up")

    server = place.server()
    server._warm_up = fails
    with pytest.raises(ServerError, match="no warm-up"), server:
        pass
    assert not living(place.pids())


def test_a_server_that_ends_while_loading_is_told_with_its_last_words(place: Place) -> None:
    start = time.monotonic()
    with pytest.raises(ServerError) as caught, place.server("fails"):
        pass
    said = str(caught.value)
    for words in (
        "status 7",
        "out of memory: 3 of 5 blocks",
        str(place.folder / "server.log"),
        "engine.command",
    ):
        assert words in said
    assert time.monotonic() - start < 30
    assert not living(place.pids())


def test_only_this_start_s_lines_are_told(place: Place) -> None:
    (place.folder / "server.log").write_text("an old complaint\n")
    with pytest.raises(ServerError) as caught, place.server("fails"):
        pass
    assert "an old complaint" not in str(caught.value)
    assert "an old complaint" in (place.folder / "server.log").read_text()


def test_a_server_that_is_never_ready_is_stopped(place: Place) -> None:
    said = r"not ready after 1 s(.|\n)*ConnectionError(.|\n)*ready_timeout"
    with pytest.raises(ServerError, match=said), place.server("never", ready_timeout=1.0):
        pass
    assert not living(place.pids())


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    server = Server(
        [str(tmp_path / "absent")],
        "http://127.0.0.1:9",
        log=tmp_path / "logs/server.log",
        ready_timeout=9.0,
        stop_grace=0.1,
    )
    with (
        pytest.raises(ServerError, match=r"status 127(.|\n)*absent can't be started: .*No such file"),
        server,
    ):
        pass


def test_waiting_can_be_broken_off(place: Place) -> None:
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    server = place.server("never")
    server._on_wait = enough
    with pytest.raises(Enough), server:
        pass
    assert not place.note().exists()


def test_a_death_in_mid_run_is_noticed_and_its_workers_end(place: Place) -> None:
    with place.server() as server:
        server.check()
        with pytest.raises(requests.ConnectionError):
            requests.get(server.url + "/die", timeout=5)
        with pytest.raises(ServerError, match="status 3"):
            wait_until(lambda: bool(server.check()))
        assert not living(place.pids())


def test_a_killed_server_is_named_by_its_signal(place: Place) -> None:
    with place.server() as server:
        os.kill(place.pids()[0], signal.SIGKILL)
        with pytest.raises(ServerError, match="signal SIGKILL"):
            wait_until(lambda: bool(server.check()))


def test_a_server_that_dies_at_work_is_started_again_so_often(place: Place) -> None:
    with place.server(restarts=1) as server:
        first = place.pids()
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: bool(server.check()) or place.pids() != first)
        second = place.pids()
        wait_until(lambda: answers(server.url))
        assert not living(first)
        os.kill(second[0], signal.SIGKILL)
        with pytest.raises(ServerError, match="ended after 1 restarts with signal SIGKILL"):
            wait_until(lambda: bool(server.check()))
    assert not living(second)
    assert not place.note().exists()


def answers(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.mark.parametrize("mode", ["well", "deaf"])
def test_after_kill_of_the_job_nothing_is_left(place: Place, mode: str) -> None:
    with place.job(mode) as job:
        wait_until((place.folder / "ready").exists)
        job.kill()
    wait_until(lambda: not living(place.pids()), 15)
    wait_until(lambda: not place.note().exists(), 5)


def test_after_kill_of_a_job_whose_server_loads_nothing_is_left(place: Place) -> None:
    with place.job("never") as job:
        place.pids()
        job.kill()
    wait_until(lambda: not living(place.pids()), 15)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("mode", ["well", "never"])
def test_a_signal_ends_the_job_and_its_server(place: Place, number: signal.Signals, mode: str) -> None:
    with place.job(mode) as job:
        pids = place.pids()
        if mode == "well":
            wait_until((place.folder / "ready").exists)
        job.send_signal(number)
        assert job.wait(15) != 0
        # The job itself waited for the server's end.
        assert not living(pids)


def test_when_the_keeper_is_killed_the_job_ends_the_server(place: Place) -> None:
    with place.server() as server:
        os.kill(place.keeper(), signal.SIGKILL)
        with pytest.raises(ServerError, match="signal SIGKILL"):
            wait_until(lambda: bool(server.check()))
        # The kernel ended the server with its keeper; its workers are left.
        wait_until(lambda: len(living(place.pids())) == 2)
    assert not living(place.pids())


def test_when_job_and_keeper_are_killed_the_next_start_ends_the_rest(place: Place) -> None:
    with place.job() as job:
        wait_until((place.folder / "ready").exists)
        os.kill(place.keeper(), signal.SIGSTOP)
        job.kill()
        os.kill(place.keeper(), signal.SIGKILL)
    old = place.pids()
    wait_until(lambda: len(living(old)) == 2)
    place.port = free_port()
    with place.server():
        assert not living(old)
        assert len(living(place.pids())) == 3
    assert not living(place.pids())


def test_a_living_job_s_server_is_not_taken_away(place: Place) -> None:
    with place.job() as job:
        wait_until((place.folder / "ready").exists)
        with pytest.raises(ServerError, match=rf"process {job.pid} has started a server there"):
            end_leftovers(place.note())
        assert len(living(place.pids())) == 3
        job.terminate()


def foreign_note(place: Place, pid: int, **changes: object) -> None:
    start = keeper.start_time(pid)
    note = {
        "mark": "0" * 32,
        "boot": keeper.boot_id(),
        "grace": 0.1,
        "keeper": [pid, start],
        "parent": [pid, 1],
    }
    place.note().write_text(json.dumps({**note, **changes}))


@pytest.mark.parametrize("note", ["number", "start", "boot", "process"])
def test_a_note_about_a_stranger_ends_nobody(
    place: Place, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyrie.serving._KEEPER_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            pid = stranger.pid
            if note == "number":
                place.note().write_text(f"{pid}\n")
            else:
                changes = {"start": {"keeper": [pid, 1]}, "boot": {"boot": "another"}, "process": {}}[note]
                foreign_note(place, pid, **changes)
            assert end_leftovers(place.note()) == 0
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_command_keeps_its_braces() -> None:
    template = """env A=1 serve {model} --port {port} --speculative-config '{"method":"eagle3","n":3}'"""
    assert fill_command(template, model="/m/a b", port=7) == [
        *("env", "A=1", "serve", "/m/a b", "--port", "7"),
        *("--speculative-config", '{"method":"eagle3","n":3}'),
    ]


def test_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URLS_VARIABLE, raising=False)
    assert server_urls() == []
    monkeypatch.setenv(URLS_VARIABLE, "http://a:1,http://b:2")
    assert server_urls() == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(5)", 5), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_kept_command_ends_with_its_own_status(code: str, status: int) -> None:
    with Kept([sys.executable, "-S", "-c", f"import os; {code}"], grace=1.0) as kept:
        wait_until(lambda: kept.poll() is not None)
        assert kept.poll() == status


CONFIG = """
work: {folder}/work
target: {{name: tiny, path: {folder}/model}}
engine:
  kind: vllm
  command: {python} {folder}/server.py {{port}} {folder}/pids {mode}
  stop_grace: 0.5
  restarts: 0
partitions: {{short: {{max_new_tokens: 8}}}}
datasets:
  chat:
    source: {{files: [a.jsonl], format: jsonl}}
    licence: MIT
    layout: messages
    kind: prompts
"""


# What runs beside the server: it tells the address it was given, and where it is asked to, waits to be ended.
BESIDE = """
import os, pathlib, signal, sys, time, urllib.request
folder = pathlib.Path(sys.argv[1])
url = os.environ["EYRIE_SERVER_URLS"]
urllib.request.urlopen(url + "/health")
if sys.argv[2] == "die":
    try:
        urllib.request.urlopen(url + "/die")
    except OSError:
        pass
if sys.argv[2] != "end":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    (folder / "working").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(4)
"""


class Beside:
    """with_server.py with a command beside it."""

    def __init__(self, place: Place, what: str) -> None:
        self.working = place.folder / "working"
        config = place.folder / "config.yaml"
        config.write_text(CONFIG.format(folder=place.folder, python=sys.executable, mode="well"))
        beside = [sys.executable, "-c", BESIDE, str(place.folder), what]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/with_server.py"), "--config", str(config), "--", *beside],
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


def test_with_server_gives_the_address_and_the_command_s_status(place: Place) -> None:
    status, said = Beside(place, "end").end()
    assert status == 4, said
    assert not living(place.pids())


def test_with_server_stops_the_command_when_the_server_ends(place: Place) -> None:
    beside = Beside(place, "die")
    status, said = beside.end()
    assert status == 1
    assert "the server ended with status 3" in said
    assert not living([int(beside.working.read_text()), *place.pids()])


def test_with_server_hands_signals_to_the_command(place: Place) -> None:
    beside = Beside(place, "work")
    wait_until(beside.working.exists)
    beside.process.terminate()
    assert beside.end()[0] == 9
    assert not living(place.pids())


def test_a_command_that_does_not_end_after_a_signal_is_stopped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_server, "_SECONDS_TO_END", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with place.server() as server:
        beside = with_server.Beside(server, [sys.executable, "-S", "-c", deaf], 0.3)
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert beside.run() == 128 + signal.SIGKILL


def test_kill_of_with_server_ends_command_and_server(place: Place) -> None:
    beside = Beside(place, "work")
    wait_until(beside.working.exists)
    working = int(beside.working.read_text())
    beside.process.kill()
    beside.end()
    wait_until(lambda: not living([working, *place.pids()]), 15)


def test_with_server_refuses_a_configuration_without_a_server(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/with_server.py")]
    result = subprocess.run([*script, "--", "true"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "engine: saw kind in_process and command None" in result.stderr


@pytest.mark.build
def test_servers_of_jobs_run_one_at_a_time_and_short_answers_come_first(tmp_path: Path) -> None:
    workspace = Workspace.clone(tmp_path)
    workspace.edit(TINY, "engine:\n", "engine:\n  kind: vllm\n  command: serve --port {port}\n")
    jobs = planned(workspace)
    assert set(jobs) == {"openthoughts", "sharegpt", "swe_agent"}
    assert all("gpu=1, server=1" in job for job in jobs.values())
    priorities = {name: int(re.findall(r"priority: (\d+)", job)[0]) for name, job in jobs.items()}
    assert priorities == {"openthoughts": 2, "sharegpt": 2, "swe_agent": 1}
    # Those that join a running server share it.
    workspace.edit(TINY, "  command: serve --port {port}\n", "  urls: [http://127.0.0.1:9]\n")
    assert all("gpu=0, server=1" in job for job in planned(workspace).values())


def planned(workspace: Workspace) -> dict[str, str]:
    """The answering jobs of a dry run, by dataset."""
    said = workspace.build("responses", "--dry-run")
    blocks = [one for one in re.split(r"\n(?=rule )", said) if one.startswith("rule answer_prompts:")]
    return {re.findall(r"dataset=(\w+)", block)[0]: block for block in blocks}
