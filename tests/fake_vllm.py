"""A server that STANDS IN for a vLLM with or without a drafter, in tests of the serve check: no model.

It replays answers from a file, with the counts that a server would have made of them, and tells of itself
what its command says. What the check makes of a real vLLM: docs/serving.md.

    python tests/fake_vllm.py --port P --model DIR --answers FILE [--speculative-config JSON]

The file: {"eos_ids", "answers": [{"prompt_ids", "token_ids", "accepted"}], "layer_ids", "parted": null or
the number of the answer whose fourth token is another with the drafter}. accepted: tokens by draft.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_NAME = "vllm:spec_decode_num"


class Fake:
    """The server's state."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = arguments.model
        self.speculation = json.loads(arguments.speculative_config or "null")
        self.told = json.loads(Path(arguments.answers).read_text(encoding="utf-8"))
        self.accepted: list[int] = []

    def server_info(self) -> dict[str, Any]:
        return {"vllm_config": {"speculative_config": self.speculation}}

    def metrics(self) -> str:
        if self.speculation is None:
            return "vllm:num_requests_running 0.0\n"
        count = self.speculation["num_speculative_tokens"]
        totals = {
            "drafts": len(self.accepted),
            "draft_tokens": count * len(self.accepted),
            "accepted_tokens": sum(self.accepted),
        }
        lines = [
            f'{_NAME}_{name}_total{{engine="0",model_name="m"}} {value}.0' for name, value in totals.items()
        ]
        for position in range(count):
            value = sum(one > position for one in self.accepted)
            labels = f'engine="0",model_name="m",position="{position}"'
            lines.append(f"{_NAME}_accepted_tokens_per_pos_total{{{labels}}} {value}.0")
            lines.append(f"{_NAME}_accepted_tokens_per_pos_created{{{labels}}} 1.7e+09")
        return "\n".join(lines) + "\n"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, most = body["prompt"], body["max_tokens"]
        number, known = next(
            (number, one)
            for number, one in enumerate(self.told["answers"])
            if ids[: len(one["prompt_ids"])] == one["prompt_ids"]
        )
        written = len(ids) - len(known["prompt_ids"])
        tokens = known["token_ids"][written : written + most]
        if self.speculation is not None:
            self.accepted += known["accepted"]
            if number == self.told["parted"] and len(tokens) > 3:
                tokens = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]]
        best = {f"token_id:{token}": -0.25 for token in tokens[:1]}
        logprobs = {"top_logprobs": [best | {"token_id:3": -1.5, "token_id:4": -2.0}] * len(tokens)}
        choice = {
            "token_ids": tokens,
            "prompt_token_ids": ids,
            "finish_reason": "stop" if tokens[-1] in self.told["eos_ids"] else "length",
            "logprobs": logprobs if "logprobs" in body else None,
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return {"model": self.model, "choices": [choice], "usage": usage}


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def send(self, content: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self.send(fake.metrics())
                return
            pages: dict[str, Any] = {
                "/health": {},
                "/version": {"version": "0.0.fake"},
                "/v1/models": {"data": [{"id": fake.model, "root": fake.model, "max_model_len": 4096}]},
                "/server_info": fake.server_info(),
            }
            self.send(json.dumps(pages[path]))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(json.dumps(fake.complete(body)))

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--answers", required=True)
    parser.add_argument("--speculative-config")
    fake = Fake(parser.parse_args())
    if fake.speculation is not None:
        print(f"Using auxiliary layers from speculative config: {tuple(fake.told['layer_ids'])}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), handler(fake)).serve_forever()


if __name__ == "__main__":
    main()
