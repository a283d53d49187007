"""vLLM's way: `/v1/completions` with token ids in, and with `return_token_ids` token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from eyrie.engines import EngineError, FinishReason, sampling_seed
from eyrie.engines.replies import AnswerRules, Failure, Request, field, shortly

if TYPE_CHECKING:
    from eyrie.engines.state_files import StateReader
    from eyrie.store import States


class Vllm:
    """The requests and replies of a vLLM server that serves one model under a name.

    reader: reads the hidden states that the server leaves of each request; None where none are wanted.
    """

    path = "/v1/completions"
    health_path = "/health"

    def __init__(self, model: str, rules: AnswerRules, reader: StateReader | None = None) -> None:
        self._model = model
        self._rules = rules
        self._reader = reader

    def body(self, request: Request) -> dict[str, Any]:
        """The request: what the recipe leaves open is set, too, as the model's files have other defaults."""
        sampling = request.sampling
        body = {
            "model": self._model,
            "prompt": list(request.ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": sorted(self._rules.eos_ids),
            "return_token_ids": True,
        }
        if sampling.temperature > 0.0:
            body["seed"] = sampling_seed(request.key)
        if self._reader is not None and self._reader.with_answer:
            body["kv_transfer_params"] = {"include_output_tokens": True}
        return body

    def states(
        self, request: Request, ids: Sequence[int], reply: Mapping[str, Any], deadline: float
    ) -> States | None:
        """The states in the file that the reply names. Raises Failure, StoreError."""
        if self._reader is None:
            self.discard(reply, deadline)
            return None
        path = _file_of(reply)
        if path is None:
            raise Failure(
                "states_missing",
                "the reply names no file of hidden states; start the server with "
                '--speculative-config \'{"method": "extract_hidden_states", ...}\'',
            )
        return self._reader.read(path, request.ids, ids, deadline)

    def discard(self, reply: Mapping[str, Any], deadline: float) -> None:
        """Remove the file that the reply names, once it is written; a server writes one for each request."""
        path = _file_of(reply)
        if path is None:
            return
        from eyrie.engines.state_files import taken  # noqa: PLC0415 - loads torch, which answering needs not

        with suppress(Failure), taken(path, deadline):
            pass

    def read(self, request: Request, reply: Mapping[str, Any]) -> tuple[list[int], FinishReason]:
        """The reply's answer. Raises Failure."""
        model = field(reply, "model")
        if model != self._model:
            raise Failure("wrong_model", f"saw {shortly(model)}, expected {self._model!r}")
        echoed = field(reply, "choices", 0, "prompt_token_ids")
        if echoed != list(request.ids) or field(reply, "usage", "prompt_tokens") != len(request.ids):
            raise Failure("wrong_prompt", f"the reply is to another prompt: {shortly(echoed)}")
        reason = field(reply, "choices", 0, "finish_reason")
        if reason == "abort":
            raise Failure("aborted", "finish_reason abort")
        return self._rules.check(
            field(reply, "choices", 0, "token_ids"),
            reason,
            field(reply, "usage", "completion_tokens"),
            request.sampling.max_new_tokens,
        )


def _file_of(reply: Mapping[str, Any]) -> Path | None:
    """The file of hidden states that a reply names."""
    path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
    return None if path is None else Path(path)


def served_model(url: str, expected: str | None) -> str:
    """The name under which a vLLM server serves its model. Raises EngineError where that is not clear."""
    try:
        reply = requests.get(f"{url}/v1/models", timeout=30, proxies={"http": "", "https": ""})
        names = [str(model["id"]) for model in reply.json()["data"]]
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{url}/v1/models: {shortly(error)}\n"
            "  expected: the list of models that a vLLM server serves\n"
            "  change: engine.urls, or engine.kind if this is another kind of server"
        ) from error
    if expected is None and len(names) == 1:
        return names[0]
    if expected in names:
        return str(expected)
    raise EngineError(
        f"{url} serves {', '.join(names) or 'no model'}\n"
        f"  expected: {expected or 'one model'}\n"
        "  change: engine.served_model, or the server's --served-model-name"
    )
