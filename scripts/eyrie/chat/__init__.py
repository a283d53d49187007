"""Chats as the target reads them: its own template, token ids, and which tokens are supervised.

The rendered text is cut at the template's control tokens and where an assistant's turn begins, and the pieces
between are encoded with control tokens switched off. A control token is never merged with its neighbours, and
what is generated is never merged with its prompt: so the ids are those that the target sees and gives, each
piece is supervised or not as a whole, and all takes time in proportion to the text's length. See
eyrie/chat/marks.py for how texts are found in what the template makes of them.

A template that keeps what it wrote makes one row of a conversation, with every turn of the assistant. One
that rewrites its history (reasoning is stripped once the next question comes) showed the target another text
at each turn: then each turn is a row of its own, with the history as the target saw it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from eyrie.chat.encoders import load_encoder
from eyrie.chat.errors import ChatError, Reason
from eyrie.chat.marks import Messages, Tools
from eyrie.chat.rows import ChatRow, LossOn, RowMaker
from eyrie.chat.templates import Template
from eyrie.records import canonical_json

__all__ = ["Chat", "ChatError", "ChatRow", "LossOn", "Messages", "Reason", "Tools"]


class Chat:
    """The chat format of one target: its template and its tokenizer, from the target's folder.

    trusted: whether Python of that folder may run: see eyrie/remote_code.py. Raises ConfigError where the
    folder has no chat template, or a tokenizer that is not supported.
    """

    def __init__(self, path: Path, trusted: bool = False) -> None:
        encoder = load_encoder(path, trusted)
        self.tokenizer = encoder.tokenizer
        self._rows = RowMaker(encoder, Template(encoder, path))

    @property
    def template_sha256(self) -> str:
        """The digest of the template's text (of all of them where the target has several)."""
        template = self.tokenizer.chat_template
        text = template if isinstance(template, str) else canonical_json(template)
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt_ids(self, messages: Messages, tools: Tools = None) -> list[int]:
        """The tokens that ask for an answer: the messages and the generation prompt. Raises ChatError."""
        return self._rows.prompt(messages, tools)

    def continuation_ids(
        self,
        history: Sequence[Messages],
        following: Messages,
        tools: Tools = None,
        last_id: int | None = None,
    ) -> list[int]:
        """The tokens from the end of an answer up to where the next one begins.

        history: the messages of each turn asked so far, the first turn's first, without answers. following:
        those of the next turn. last_id: the answer's last token; where it ends the turn, no end is put behind
        it, and None stands for an answer that was cut. The ids of the prompt, of the answer and these are the
        next prompt: see eyrie/chat/turns.py. Raises ChatError.
        """
        return self._rows.continuation(history, following, tools, last_id)

    def rows(self, messages: Messages, tools: Tools = None, loss_on: LossOn = "assistant") -> list[ChatRow]:
        """A finished conversation as tokens and loss masks: one row, or one for each turn of the assistant.

        loss_on: assistant takes what the assistant says (reasoning, content, tool calls and the end-of-turn
        token), non_system every message but the system's, all every token, the template's own included. Of
        several rows, each has what came after the turn before. Raises ChatError.
        """
        return self._rows.rows(messages, tools, loss_on)
