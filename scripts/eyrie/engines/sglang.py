"""SGLang's way: `/generate` with `input_ids` in and `output_ids` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyrie.engines import FinishReason, sampling_seed
from eyrie.engines.replies import AnswerRules, Failure, Request, field, shortly


class Sglang:
    """The requests and replies of an SGLang server.

    Its reply names no model and repeats no prompt: that it belongs to the request is told by the request's
    own name, which it gives back.
    """

    path = "/generate"
    # Not /health, which generates a token: a server that is full of work is well.
    health_path = "/ready"

    def __init__(self, rules: AnswerRules) -> None:
        self._rules = rules

    def body(self, request: Request) -> dict[str, Any]:
        """The request: what the recipe leaves open is set, too."""
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self._rules.eos_ids),
        }
        if sampling.temperature > 0.0:
            parameters["sampling_seed"] = sampling_seed(request.key)
        return {"rid": request.name, "input_ids": list(request.ids), "sampling_params": parameters}

    def states(self, request: Request, ids: Sequence[int], reply: Mapping[str, Any], deadline: float) -> None:
        """None: its replies name no files of hidden states."""

    def discard(self, reply: Mapping[str, Any], deadline: float) -> None:
        """Nothing is left."""

    def read(self, request: Request, reply: Mapping[str, Any]) -> tuple[list[int], FinishReason]:
        """The reply's answer; one that was broken off comes with status 200, too. Raises Failure."""
        name = field(reply, "meta_info", "id")
        if name != request.name:
            raise Failure("wrong_prompt", f"the reply is to request {shortly(name)}, not {request.name}")
        reason = field(reply, "meta_info", "finish_reason")
        kind = field(reason, "type")
        if kind == "abort":
            raise Failure("aborted", shortly(reason.get("message")))
        prompt_tokens = field(reply, "meta_info", "prompt_tokens")
        if prompt_tokens != len(request.ids):
            raise Failure(
                "wrong_prompt",
                f"{shortly(prompt_tokens)} tokens by the server's count, {len(request.ids)} by ours",
            )
        ids, finish = self._rules.check(
            field(reply, "output_ids"),
            kind,
            field(reply, "meta_info", "completion_tokens"),
            request.sampling.max_new_tokens,
        )
        matched = reason.get("matched")
        if kind == "stop" and matched != ids[-1]:
            raise Failure("wrong_finish", f"stopped at {shortly(matched)}, but the last id is {ids[-1]}")
        return ids, finish
