"""Tokenizers behind one face: control tokens by name, and texts in which nothing is a control token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from tokenizers import processors
from transformers import AutoTokenizer

from eyrie.chat import kimi
from eyrie.config import ConfigError
from eyrie.remote_code import check_tokenizer_code, refused

# Texts encoded at once: what the tokenizer returns is many times as large as the ids.
_BATCH = 64


class Encoder(Protocol):
    """What a chat needs of a tokenizer."""

    tokenizer: Any
    """It has `apply_chat_template` and `chat_template`."""
    control_ids: dict[str, int]
    """The ids of the control tokens by their text."""
    control_pattern: str
    """A regular expression for them, with the blanks that a token takes along."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without control tokens whatever its letters."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered chat as the target's server makes them."""
        ...

    def starts(self, text: str) -> list[int] | None:
        """Where each token of a text begins; None where the tokenizer does not tell."""
        ...


class FastEncoder:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.control_ids = {token.content: number for number, token in special.items()}
        self.control_pattern = _alternatives(
            {token.content: (token.lstrip, token.rstrip) for token in special.values()}
        )
        self._backend = tokenizer.backend_tokenizer
        # Post-processing trims blanks off the offsets, and would add tokens that the template writes itself.
        self._backend.post_processor = processors.Sequence([])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        self._set(control_tokens=False)
        ids = []
        for start in range(0, len(texts), _BATCH):
            batch = self._backend.encode_batch_fast(texts[start : start + _BATCH], add_special_tokens=False)
            ids += [found.ids for found in batch]
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered chat."""
        self._set(control_tokens=True)
        return self._backend.encode(text, add_special_tokens=False).ids

    def starts(self, text: str) -> list[int]:
        """Where each token of a text begins."""
        self._set(control_tokens=False)
        return [start for start, _ in self._backend.encode(text, add_special_tokens=False).offsets]

    def _set(self, control_tokens: bool) -> None:
        # A tokenizer.json can hold a maximal length and padding, which would cut texts in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = not control_tokens


class KimiEncoder:
    """Kimi's tokenizer: Python over tiktoken ranks, without offsets.

    It cuts long strings every 400,000 characters, through a control token if one stands there; here control
    tokens stand between the strings.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self.tokenizer = tokenizer
        self.control_ids = dict(tokenizer.special_tokens)
        kimi.check_ids(self.control_ids, path)
        self.control_pattern = _alternatives(dict.fromkeys(self.control_ids, (False, False)))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.tokenizer.encode(text, allow_special_tokens=False) for text in texts]

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered chat."""
        return self.tokenizer.encode(text)

    def starts(self, text: str) -> None:
        """Unknown."""


def _alternatives(tokens: dict[str, tuple[bool, bool]]) -> str:
    """A pattern for tokens {text: whether it takes the blanks before it, and those behind it}."""
    parts = []
    for text, (left, right) in sorted(tokens.items(), key=lambda item: (-len(item[0]), item[0])):
        # Blanks are only looked for where they begin: that keeps a long run of them from costing its square.
        parts.append((r"(?<!\s)\s*" if left else "") + re.escape(text) + (r"\s*" if right else ""))
    return "|".join(parts)


def load_tokenizer(path: Path, trusted: bool = False) -> Any:
    """The library's tokenizer of a target's folder. Raises ConfigError.

    trusted: whether Python of that folder may run, as Kimi's tokenizer needs.
    """
    if kimi.is_kimi(path) and not trusted:
        raise refused(path, "tokenizer_config.json")
    check_tokenizer_code(path, trusted)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        if not trusted and "trust_remote_code" in str(error):
            raise refused(path, "tokenizer_config.json") from error
        raise ConfigError(f"{path}: the target's tokenizer can't be loaded: {error}") from error


def load_encoder(path: Path, trusted: bool = False) -> Encoder:
    """The tokenizer in a target's folder, with its chat template. Raises ConfigError.

    trusted: as for load_tokenizer.
    """
    tokenizer = load_tokenizer(path, trusted)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{path}: the target has no chat template; expected chat_template.jinja, or chat_template in "
            "tokenizer_config.json. Take an instruction-tuned target, or add its template"
        )
    if tokenizer.is_fast:
        return FastEncoder(tokenizer)
    if kimi.is_kimi(path):
        return KimiEncoder(tokenizer, path)
    raise ConfigError(
        f"{path}: {type(tokenizer).__name__} can't keep the letters of a control token in a text apart from "
        "the token; expected a tokenizer.json, or Kimi's own tokenizer (convert it, or take another target)"
    )
