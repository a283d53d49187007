"""A tokenizer built as Kimi's is: byte-pair ranks, control tokens above them, and no offsets.

Strings are encoded in slices of 400,000 characters, and those in runs of at most 25,000 characters with or
without blanks, as there. tiktoken itself is not needed: the ranks are few.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

SLICE = 400_000
RUN = 25_000
FIRST_CONTROL = 163584
_WORDS = re.compile(r"[一-鿿]+| ?[^\s\w]+[\r\n]*| ?\w+|\s*[\r\n]+|\s+(?!\S)|\s+")


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 - transformers' own way

    def __init__(self, vocab_file: str, added_tokens_decoder: dict[int, Any], **settings: Any) -> None:
        lines = Path(vocab_file).read_text().splitlines()
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        named = {int(number): token.content for number, token in added_tokens_decoder.items()}
        self.special_tokens = {
            named.get(number, f"<|reserved_token_{number}|>"): number
            for number in range(FIRST_CONTROL, FIRST_CONTROL + 256)
        }
        self._bytes = {rank: token for token, rank in self.ranks.items()} | {
            number: token.encode() for token, number in self.special_tokens.items()
        }
        self._control = re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")")
        super().__init__(**settings)

    def encode(self, text: str, allow_special_tokens: bool = True, **settings: Any) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(text), SLICE):
            for run in self._runs(text[start : start + SLICE]):
                for piece in self._control.split(run) if allow_special_tokens else [run]:
                    control = self.special_tokens.get(piece) if allow_special_tokens else None
                    ids += self._pairs(piece) if control is None else [control]
        return ids

    def decode(self, token_ids: list[int], **settings: Any) -> str:
        return b"".join(self._bytes[number] for number in token_ids).decode("utf-8", "replace")

    @staticmethod
    def _runs(text: str) -> Iterator[str]:
        start = length = 0
        blank = text[:1].isspace()
        for at, sign in enumerate(text):
            length = length + 1 if sign.isspace() == blank else 1
            blank = sign.isspace()
            if length > RUN:
                yield text[start:at]
                start, length = at, 1
        yield text[start:]

    def _pairs(self, text: str) -> list[int]:
        return [number for word in _WORDS.findall(text) for number in self._word(word)]

    @lru_cache(maxsize=10_000)  # noqa: B019 - one tokenizer lives as long as the tests
    def _word(self, word: str) -> tuple[int, ...]:
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            ranked = [(self.ranks.get(a + b, FIRST_CONTROL), at) for at, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(ranked, default=(FIRST_CONTROL, 0))
            if rank == FIRST_CONTROL:
                return tuple(self.ranks[part] for part in parts)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    @property
    def vocab_size(self) -> int:
        return FIRST_CONTROL + 256

    def get_vocab(self) -> dict[str, int]:
        return {token.decode("latin-1"): number for number, token in self._bytes.items()}

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        return [self._convert_id_to_token(number) for number in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]

    def _convert_id_to_token(self, number: int) -> str:
        return self._bytes[number].decode("latin-1")

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        **settings: Any,
    ) -> Any:
        lines = [f"  type {tool['function']['name']} = (_: {_json(tool)}) => any;" for tool in tools or []]
        rendered = super().apply_chat_template(
            conversation,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            tools_ts_str="\n".join(["namespace functions {", *lines, "}"]) if tools else None,
            **settings,
        )
        return self.encode(rendered) if tokenize else rendered


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
