"""A text as the words that are compared: near-duplicate removal and decontamination see the same ones."""

from __future__ import annotations

import re
import unicodedata

# Scripts written without spaces: each sign is a word. Kana, Han, Hangul.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_SIGNS}]|[^\W_{_SIGNS}]+")


def words_of(text: str) -> list[str]:
    """The runs of letters and digits of the text, by compatible form (NFKC) and without case.

    Punctuation, white space and underscores only part words. Each Chinese, Japanese or Korean sign is a word.
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
