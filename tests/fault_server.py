"""A server that STANDS IN for vLLM and SGLang in tests: their shapes over HTTP, no model, and faults at will.

It shows what the client does, and nothing about the engines themselves. What it "generates" is a function
of the prompt's ids (and of the seed, where one is sent), so that a test knows every answer beforehand. Faults
are drawn by a seed for each prompt and attempt: the same run has the same faults, whatever the order.

In a test: `with FaultServer(shape="vllm") as server: server.url`. As a process of its own, to be killed:

    python tests/fault_server.py --shape sglang --port 0 --settings '{"delay": 0.01}'

prints its URL once it listens.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

Shape = Literal["vllm", "sglang"]
FAULTS = (
    "unavailable",
    "server_error",
    "reset",
    "hang",
    "drip",
    "abort",
    "truncated",
    "cut_off",
    "wrong_count",
    "wrong_token",
    "wrong_model",
    "wrong_prompt",
    "wrong_finish",
)


@dataclass(frozen=True)
class Serving:
    """What the server is and does. Every name of `faults` is one of FAULTS, its value a probability."""

    model: str = "tiny"
    model_path: str = "models/tiny"
    vocab_size: int = 512
    eos_ids: tuple[int, ...] = (2,)
    context_length: int = 4096
    delay: float = 0.0
    """Mean seconds of an answer; each prompt has its own share, from none to twice it."""
    start_delay: float = 0.0
    """Seconds until it says that it is ready."""
    faults: Mapping[str, float] = field(default_factory=dict)
    fault_seed: int = 0
    last_faulty_attempt: int = 1 << 30
    """From the attempt after this on a prompt is answered right."""
    hang_seconds: float = 30.0
    poison: tuple[int, ...] = ()
    """A prompt that holds one of these ids is refused with status 400."""
    dies_after: int = 0
    """Its process ends with status 3 when it is asked the next prompt after so many; 0: never."""
    speculative_algorithm: str | None = None
    hidden_width: int = 192
    salt: str = ""
    """Another one is another model: other answers to the same prompts."""
    record: str = ""
    """A file to which the digest of each prompt is added when it is asked and when it was answered."""


def generated(
    ids: Sequence[int], seed: int | None, max_new_tokens: int, serving: Serving = Serving()
) -> tuple[list[int], str]:
    """The answer to a prompt and its finish reason: what a model would be here."""
    draw = random.Random(f"{list(ids)} {seed} {serving.salt}")
    length = min(1 + int(draw.lognormvariate(2.0, 1.0)), max_new_tokens)
    words = [one for one in range(3, min(serving.vocab_size, 500)) if one not in serving.eos_ids]
    answer = [draw.choice(words) for _ in range(length)]
    if draw.random() < 0.8:
        answer[-1] = draw.choice(serving.eos_ids)
        return answer, "stop"
    return answer + [draw.choice(words) for _ in range(max_new_tokens - length)], "length"


def digest(ids: Sequence[int]) -> str:
    """A prompt's name in the record: the key under which the store has its answer."""
    return hashlib.sha256(json.dumps([list(ids)], separators=(",", ":")).encode()).hexdigest()[:32]


class FaultServer:
    """The server in a thread of this process; use it with `with`. It can die and be revived on its port."""

    def __init__(self, shape: Shape = "vllm", port: int = 0, **serving: Any) -> None:
        self.shape = shape
        self.serving = Serving(**serving)
        self.asked: Counter[str] = Counter()
        """How often each prompt was asked, by digest."""
        self.answered: Counter[str] = Counter()
        """How often a right reply to it was sent off."""
        self.faults: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0
        self.closing = threading.Event()
        self.go = threading.Event()
        """While it is not set, requests wait."""
        self.go.set()
        self.lock = threading.Lock()
        self.port = port
        self._http: _Http | None = None
        self._record: IO[str] | None = None
        self._started = time.monotonic()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready(self) -> bool:
        return time.monotonic() - self._started >= self.serving.start_delay

    def __enter__(self) -> Self:
        if self.serving.record:
            self._record = Path(self.serving.record).open("a", buffering=1)
        self.revive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()
        if self._record is not None:
            self._record.close()

    def revive(self) -> None:
        """Listen (again) on the port."""
        assert self._http is None
        self.closing.clear()
        self._http = _Http(self)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Stop listening and reset every connection, as a killed process does."""
        if self._http is not None:
            self.closing.set()
            self._http.shutdown()
            self._http.server_close()
            self._http.reset_all()
            self._http = None

    def note(self, event: str, ids: Sequence[int]) -> int:
        """Count a prompt that was asked or answered; returns which time it was."""
        name = digest(ids)
        with self.lock:
            counter = self.asked if event == "asked" else self.answered
            counter[name] += 1
            if self._record is not None:
                self._record.write(f"{event} {name}\n")
            return counter[name]

    def enter(self) -> None:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)

    def leave(self) -> None:
        with self.lock:
            self.running -= 1

    def fault_for(self, ids: Sequence[int], attempt: int) -> str | None:
        """What goes wrong with this attempt, if anything does."""
        if attempt > self.serving.last_faulty_attempt:
            return None
        point = random.Random(f"{self.serving.fault_seed} {digest(ids)} {attempt}").random()
        for name, share in self.serving.faults.items():
            point -= share
            if point < 0:
                with self.lock:
                    self.faults[name] += 1
                return name
        return None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, owner: FaultServer) -> None:
        self.owner = owner
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", owner.port), _Handler)

    def reset_all(self) -> None:
        for connection in list(self.connections):
            _reset(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _reset(connection: socket.socket) -> None:
    """Close a connection so that the other side sees a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(connection.detach())


def _is_proof(request: Mapping[str, Any]) -> bool:
    """Whether the client only wants to know who is there; the faults are for the work."""
    sampling = request.get("sampling_params", request)
    one_token = 1 in (sampling.get("max_tokens"), sampling.get("max_new_tokens"))
    return one_token or any(
        name in request for name in ("logprobs", "return_logprob", "return_hidden_states")
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http
    # Head and body in one packet: the second of two small ones would wait for the first one's receipt.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        owner, serving = self.server.owner, self.server.owner.serving
        path = self.path.partition("?")[0]
        if path in ("/health", "/ready", "/health_generate"):
            self._send(200 if owner.ready else 503, {})
        elif path == "/version" and owner.shape == "vllm":
            self._send(200, {"version": "0.0-stand-in"})
        elif path == "/v1/models":
            card = {"id": serving.model, "root": serving.model_path, "max_model_len": serving.context_length}
            self._send(200, {"object": "list", "data": [{"object": "model", **card}]})
        elif path in ("/model_info", "/get_model_info") and owner.shape == "sglang":
            self._send(200, {"model_path": serving.model_path, "weight_version": "default"})
        elif path == "/server_info" and owner.shape == "vllm":
            method = (serving.speculative_algorithm or "").lower()
            speculation = {"method": method} if method else None
            self._send(200, {"vllm_config": {"speculative_config": speculation}})
        elif path in ("/server_info", "/get_server_info"):
            self._send(
                200,
                {
                    "version": "0.0-stand-in",
                    "model_path": serving.model_path,
                    "served_model_name": serving.model,
                    "context_length": serving.context_length,
                    "speculative_algorithm": serving.speculative_algorithm,
                    "launch_command": "python tests/fault_server.py",
                },
            )
        else:
            self._send(404, {"error": "no such path"})

    def do_POST(self) -> None:
        owner = self.server.owner
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = "/v1/completions" if owner.shape == "vllm" else "/generate"
        if self.path != path:
            self._send(404, {"error": "no such path"})
            return
        owner.enter()
        try:
            self._complete(request)
        finally:
            owner.leave()

    def _complete(self, request: dict[str, Any]) -> None:
        owner, serving = self.server.owner, self.server.owner.serving
        ids = request["prompt" if owner.shape == "vllm" else "input_ids"]
        if not owner.ready:
            self._send(503, {"error": "loading"})
            return
        if set(ids) & set(serving.poison):
            self._send(400, {"error": "this prompt is refused"})
            return
        if _is_proof(request):
            self._send(200, self._reply(request, ids, None))
            return
        fault = owner.fault_for(ids, owner.note("asked", ids))
        if 0 < serving.dies_after < owner.asked.total():
            os._exit(3)
        while not owner.go.wait(0.02) and not owner.closing.is_set():
            pass
        if serving.delay:
            share = random.Random(f"delay {digest(ids)}").uniform(0.0, 2.0)
            owner.closing.wait(serving.delay * share)
        if fault == "unavailable":
            self._send(503, {"error": "the queue is full"})
        elif fault == "server_error":
            self._send(500, {"error": "CUDA error"})
        elif fault == "reset":
            _reset(self.connection)
            self.close_connection = True
        elif fault == "hang":
            owner.closing.wait(serving.hang_seconds)
            self.close_connection = True
        else:
            reply = self._reply(request, ids, fault)
            self._send_reply(json.dumps(reply).encode(), fault, ids)

    def _reply(self, request: dict[str, Any], ids: list[int], fault: str | None) -> dict[str, Any]:
        vllm = self.server.owner.shape == "vllm"
        sampling = request if vllm else request["sampling_params"]
        limit = sampling["max_tokens" if vllm else "max_new_tokens"]
        seed = sampling.get("seed" if vllm else "sampling_seed")
        serving = self.server.owner.serving
        answer, reason = generated(ids, seed, limit, serving)
        count, model, prompt = len(answer), serving.model, ids
        if fault == "wrong_count":
            answer = answer[:-1] if len(answer) % 2 else [answer[0], *answer]
        if fault == "wrong_token":
            answer = [*answer[:-1], serving.vocab_size]
        if fault == "wrong_model":
            model = "another"
        if fault == "wrong_prompt":
            prompt = [*ids[:-1], ids[-1] ^ 1]
        if fault == "wrong_finish":
            reason = "length" if reason == "stop" and count < limit else "stop"
            answer = answer if reason == "length" else [*answer[:-1], 3]
        if fault == "abort":
            reason, answer, count = "abort", answer[: count // 2], count // 2
        if vllm:
            choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": answer}
            return {
                "id": "cmpl-0",
                "object": "text_completion",
                "model": model,
                "choices": [{**choice, "prompt_token_ids": prompt}],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": count},
            }
        matched = {"stop": {"matched": answer[-1] if answer else 0}, "length": {"length": count}}
        broken = {"message": "aborted", "status_code": None, "err_type": None}
        meta = {
            "id": request["rid"] if fault not in ("wrong_model", "wrong_prompt") else "another",
            "finish_reason": {"type": reason, **matched.get(reason, broken)},
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
        }
        if request.get("return_hidden_states"):
            meta["hidden_states"] = [[[0.5] * serving.hidden_width] * len(ids)]
        return {"text": "", "output_ids": answer, "meta_info": meta}

    def _send_reply(self, body: bytes, fault: str | None, ids: list[int]) -> None:
        if fault == "truncated":
            body = body[: len(body) // 2]
        self._head(200, len(body))
        if fault == "cut_off":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
        elif fault == "drip":
            end = time.monotonic() + self.server.owner.serving.hang_seconds
            for byte in body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.server.owner.closing.wait(0.02) or time.monotonic() > end:
                    self.close_connection = True
                    return
        else:
            self.wfile.write(body)
            self.wfile.flush()
            if fault is None:
                self.server.owner.note("answered", ids)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, reply: Mapping[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self._head(status, len(body))
        self.wfile.write(body)
        self.wfile.flush()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--host", default="127.0.0.1", help="taken and ignored: it listens on 127.0.0.1 only")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", help="the model's path, as a real server is told it")
    parser.add_argument("--settings", default="{}", help=f"JSON: {', '.join(asdict(Serving()))}")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings)
    if arguments.model:
        settings = {"model": arguments.model, "model_path": arguments.model, **settings}
    for name in ("eos_ids", "poison"):
        if name in settings:
            settings[name] = tuple(settings[name])
    with FaultServer(arguments.shape, arguments.port, **settings) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
