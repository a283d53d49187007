"""Capture through a server that STANDS IN for vLLM: its shape over HTTP, its files, the tiny target behind.

It shows what the client does with files that come late, short, or wrong. The real vLLM: test_real_capture.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyrie.config import HiddenStatesSettings
from eyrie.engines import EngineError
from eyrie.engines.checks import check_against_reference, reference_of
from eyrie.engines.proving import whole_rows
from eyrie.errors import BuildError
from eyrie.gates import GateError
from eyrie.records import read_json
from eyrie.states import states_recipe
from eyrie.store import States, StateStore, StoreError
from eyrie.target import Target
from tiny_target import LAYER_IDS, RECIPE, STATES, Stages, question, tiny_target

SERVED = [0, *LAYER_IDS, 6]
RAW = "last before the final norm"
Rows = torch.Tensor


class StatesServer:
    """Answers greedily and leaves states; change: what becomes of a file's rows, by attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = Target(tiny_target(), "float32", LAYER_IDS)
        self.change: Callable[[Rows, int], Rows] = lambda rows, attempt: rows
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.delay = 0.0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = list(request["prompt"])
        with self._lock:
            answer: list[int] = []
            while len(answer) < request["max_tokens"] and (not answer or answer[-1] != 2):
                last = self.target.forward(torch.tensor([prompt + answer])).last[0, -1]
                answer.append(int(self.target.logits(last).argmax()))
            whole = (request.get("kv_transfer_params") or {}).get("include_output_tokens")
            path = self._leave(prompt + (answer[:-1] if whole else []))
        return {
            "model": "tiny",
            "choices": [
                {
                    "finish_reason": "stop" if answer[-1] == 2 else "length",
                    "token_ids": answer,
                    "prompt_token_ids": prompt,
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer)},
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _leave(self, ids: list[int]) -> Path:
        """Write the file under its lock, after the reply when there is a delay."""
        self.asked[tuple(ids)] += 1
        states = reference_of(self.target, ids).states
        rows = torch.stack([*(states[layer] for layer in SERVED[:-1]), states[RAW]], dim=1)
        rows = self.change(rows, self.asked[tuple(ids)])
        path = self.folder / f"{self.asked.total()}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.delay)
            save_file({"hidden_states": rows.contiguous(), "token_ids": torch.tensor(ids)}, path)
            os.close(lock)

        threading.Thread(target=write).start()
        return path

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Be quiet."""

            def do_GET(self) -> None:
                card = {"id": "tiny", "max_model_len": 4096}
                pages = {
                    "/v1/models": {"data": [card]},
                    "/version": {"version": "0.0-stand-in"},
                    "/health": {},
                }
                self._send(pages.get(self.path))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._send(owner.complete(json.loads(content)))

            def _send(self, reply: dict[str, Any] | None) -> None:
                body = json.dumps(reply).encode()
                self.send_response(404 if reply is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatesServer]:
    folder = tmp_path / "arriving"
    folder.mkdir()
    made = StatesServer(folder)
    yield made
    made.close()
    assert not list(folder.glob("*.safetensors"))


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """A folder with samples that were answered and whose states nobody has kept."""
    made = Stages(tmp_path / "build", monkeypatch)
    made.write_prompts(question(number) for number in range(8))
    return made


def engine(server: StatesServer, capture: str = "server", **more: Any) -> dict[str, Any]:
    quick = {"backoff": 0.01, "retries": 2, "request_timeout": 20.0}
    return {"kind": "vllm", "urls": [server.url], "capture": capture, **quick, **more}


def stored(stages: Stages) -> list[States]:
    described = read_json(stages.folder / "target.json")
    recipe = states_recipe(described, HiddenStatesSettings(**STATES), RECIPE["dtype"])
    store = StateStore(stages.folder / "store", recipe)
    refs = store.find([store.key(row["input_ids"]) for row in stages.samples()])
    return list(store.load(list(refs.values())))


def test_a_servers_states_are_those_of_the_model(stages: Stages, server: StatesServer) -> None:
    server.delay = 0.02
    stages.answer(engine=engine(server))
    assert not (stages.folder / "store/hidden_states").exists()
    stages.capture(engine(server))
    states = stored(stages)
    assert len(states) == len(stages.samples()) == 8
    for one in states:
        assert check_against_reference(server.target, one) < 0.01
    manifest = read_json(stages.folder / "manifest.json")
    [proof] = manifest["numbering"]
    assert (proof["engine"], proof["version"], proof["proof"]) == ("vllm", "0.0-stand-in", "reference")
    assert manifest["agreement"]["share"] > 0.9


def test_the_pass_that_answers_leaves_states_that_the_capture_job_finds(
    stages: Stages, server: StatesServer
) -> None:
    stages.answer(engine=engine(server, "answers"))
    asked = server.asked.total()
    stages.capture(engine(server, "answers"))
    assert server.asked.total() == asked
    states = stored(stages)
    assert len(states) == 8
    for one in states:
        assert not one.aux[-1].any() and not one.last[-1].any()
        assert check_against_reference(server.target, whole_rows(one)) < 0.01
    assert read_json(stages.folder / "manifest.json")["agreement"]["share"] > 0.9


def test_a_target_that_can_not_be_run_here_is_proved_by_anchors(
    stages: Stages, server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.answer(engine=engine(server))
    monkeypatch.setattr("eyrie.engines.proving.fits", lambda path: False)
    stages.capture(engine(server))
    [proof] = read_json(stages.folder / "manifest.json")["numbering"]
    assert proof["proof"] == "anchors"


def test_a_short_file_is_asked_for_again_and_fails_by_name(stages: Stages, server: StatesServer) -> None:
    stages.answer(engine=engine(server))
    server.change = lambda rows, attempt: rows[:-1] if attempt == 1 else rows
    stages.capture(engine(server))
    assert {server.asked[tuple(row["input_ids"])] for row in stages.samples()} == {2}


def test_a_file_that_stays_short_fails_by_name_and_the_rest_is_kept(
    stages: Stages, server: StatesServer
) -> None:
    stages.answer(engine=engine(server))
    longest = max(len(row["input_ids"]) for row in stages.samples())
    server.change = lambda rows, attempt: rows[:-1] if len(rows) == longest else rows
    short = sum(len(row["input_ids"]) == longest for row in stages.samples())
    with pytest.raises(EngineError, match=rf"{short} of 8 samples have no hidden states: .*states_short"):
        stages.capture(engine(server))
    assert not (stages.folder / "manifest.json").exists()
    assert len(stored(stages)) == 8 - short
    server.asked.clear()
    server.change = lambda rows, attempt: rows
    stages.capture(engine(server))
    assert sum(len(ids) == longest for ids in server.asked) == short
    assert not any(
        tuple(one.token_ids) in server.asked for one in stored(stages) if len(one.token_ids) < longest
    )


def shifted(rows: Rows, attempt: int) -> Rows:
    """The wanted layers are each the next wanted one; embedding and last state are right."""
    return rows[:, [0, 2, 3, 1, 4]]


def other_last(rows: Rows, attempt: int) -> Rows:
    """The last state is none of the model's."""
    return torch.cat([rows[:, :-1], rows[:, 1:2].flip(-1)], dim=1)


def test_wrong_layers_stop_the_job_before_anything_is_stored(stages: Stages, server: StatesServer) -> None:
    stages.answer(engine=engine(server))
    faults: list[tuple[Callable[[Rows, int], Rows], type[BuildError], str]] = [
        (shifted, StoreError, "the state of layer 1 is that of layer 3"),
        (lambda rows, attempt: rows.roll(1, dims=0), StoreError, "rows are rotated against the tokens"),
        (lambda rows, attempt: rows[:, 1:], StoreError, r"expected: \[\d+ tokens, 5 layers"),
        (other_last, GateError, "give the server's own next token for 0 of 1 samples"),
    ]
    for change, error, words in faults:
        server.change = change
        with pytest.raises(error, match=words):
            stages.capture(engine(server))
    assert not list(stages.folder.glob("store/hidden_states/*/*.safetensors"))
    assert not (stages.folder / "store/numbering").exists()
