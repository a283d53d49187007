"""The canary: a server's greedy answer to a fixed prompt, which every later start must repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyrie.config import SamplingSettings
from eyrie.engines.questions import Questions, mismatch
from eyrie.engines.replies import Dialect
from eyrie.records import read_json, write_json

CANARY_MESSAGES = [
    {"role": "user", "content": "Name three rivers, and say of each in one sentence where it rises."}
]
"""What the canary's prompt is rendered from, with the target's own template."""

_CANARY_TOKENS = 24
# Two tokens that the target holds for equally good up to rounding: which one comes first depends on kernel,
# batch and version. In float32 that is a matter of 1e-5; numbers of 16 bits move logits by tenths.
_ROUNDING = {"float32": 1e-3}
_ROUNDING_OF_16_BITS = 0.5


@dataclass(frozen=True)
class Canary:
    """A greedy answer: its ids, at each place the second-best id, and by how much its logit is less.

    Where a server tells no probabilities, seconds and margins are empty.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    seconds: list[int]
    margins: list[float]

    def differs(self, other: Canary, rounding: float) -> str | None:
        """How another greedy answer to the prompt differs by more than rounding; None where it does not."""
        pairs = list(zip(self.token_ids, other.token_ids, strict=False))
        place = next((at for at, (mine, others) in enumerate(pairs) if mine != others), len(pairs))
        if place == len(pairs):
            return None if len(self.token_ids) == len(other.token_ids) else f"at token {place}: the end"
        if place < len(self.margins):
            close = self.margins[place] <= rounding and other.token_ids[place] == self.seconds[place]
            return None if close else f"at token {place}, where the margin was {self.margins[place]:.4f}"
        return f"at token {place}"


def ask_canary(ask: Questions, dialect: Dialect, kind: str, prompt: Sequence[int]) -> Canary:
    """The canary of the server of this kind (vllm, sglang). Raises IdentityError."""
    if kind == "vllm":
        more: dict[str, Any] = {"logprobs": 2, "return_tokens_as_token_ids": True}
    else:
        more = {"return_logprob": True, "top_logprobs_num": 2}
    ids, reply = ask.answer(dialect, prompt, SamplingSettings(max_new_tokens=_CANARY_TOKENS), more)
    seconds, margins = [], []
    for first, second in best_two(kind, reply):
        seconds.append(second[1])
        margins.append(round(first[0] - second[0], 4))
    complete = len(margins) == len(ids)
    return Canary(list(prompt), ids, seconds if complete else [], margins if complete else [])


def best_two(kind: str, reply: Mapping[str, Any]) -> Iterator[list[tuple[float, int]]]:
    """The two best (log-probability, id) at each place of an answer; nothing where the reply tells none."""
    if kind == "vllm":
        for place in (reply["choices"][0].get("logprobs") or {}).get("top_logprobs") or []:
            ranked = sorted(((value, int(name.removeprefix("token_id:"))) for name, value in place.items()))
            yield ranked[:-3:-1]
    else:
        for place in reply["meta_info"].get("output_top_logprobs") or []:
            ranked = sorted((float(entry[0]), int(entry[1])) for entry in place)
            yield ranked[:-3:-1]


def compare_canary(url: str, canary: Canary, records: Path, server: str, dtype: str) -> None:
    """Compare with what was recorded of such a server, and record it where nothing was. Raises IdentityError.

    server: kind and version. dtype: the numbers that it computes with, as far as known.
    In float32 every server must give the same; with fewer bits only one of the same version is held to it.
    """
    record = records / f"{_file_name(server)}-{_file_name(dtype)}.json"
    rounding = _ROUNDING.get(dtype, _ROUNDING_OF_16_BITS)
    pattern = f"*-{dtype}.json" if dtype in _ROUNDING else record.name
    for path in sorted(records.glob(pattern)):
        former = Canary(**read_json(path))
        if former.prompt_ids != canary.prompt_ids:
            raise mismatch(
                url, f"another canary than in {path}", canary.prompt_ids, former.prompt_ids, f"delete {path}"
            )
        difference = former.differs(canary, rounding)
        if difference is not None:
            raise mismatch(
                url,
                f"the canary differs from the one in {path} {difference}",
                canary.token_ids,
                former.token_ids,
                f"the server's model, dtype or quantization; or delete {path} if that was meant",
            )
    if not record.exists():
        write_json(record, asdict(canary))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)
