"""The items of a JSON array, read piece by piece, so that a file of any size takes the memory of one item."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from eyrie.records import STRICT_DECODER, JsonError, check_surrogates

_PIECE = 1 << 20
_AFTER_VALUE = frozenset(" \t\r\n,]")
_LENIENT_DECODER = json.JSONDecoder()


def json_items(file: IO[str]) -> Iterator[tuple[str, Any]]:
    """The items of the array in a file, each with its text; a file that is one value is one item.

    An item that is JSON to Python's reader alone comes as a JsonError in place of its value. Bytes that were
    not UTF-8 must have been read with `surrogateescape`. Raises ValueError where no end of an item is found.
    """
    text = _Text(file)
    if text.peek() != "[":
        yield text.take_value()
    else:
        text.skip()
        while text.peek() != "]":
            yield text.take_value()
            if text.peek() == ",":
                text.skip()
                if text.peek() == "]":
                    raise ValueError("a comma before the closing bracket")
            elif text.peek() != "]":
                raise ValueError(f"expected a comma or the closing bracket, saw {text.peek() or 'the end'!r}")
        text.skip()
    if text.peek():
        raise ValueError(f"more follows after the end: {text.peek()!r}")


class _Text:
    """A file's text from the place that was reached; more is read when it is needed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._buffer = ""
        self._at = 0

    def peek(self) -> str:
        """The next character that is no white space, or "" at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in " \t\r\n":
                    return self._buffer[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self) -> None:
        """Step over the character that peek returned."""
        self._at += 1

    def take_value(self) -> tuple[str, Any]:
        """Text and value of the JSON value that starts here. Raises ValueError."""
        self.peek()
        while True:
            try:
                value, end = self._decode()
                # "10." is where the buffer ends in the middle of 10.5: only what follows shows a value's end.
                if self._buffer[end : end + 1] in _AFTER_VALUE or not self._more():
                    text, self._at = self._buffer[self._at : end], end
                    return text, _checked(text, value)
            except ValueError:
                if not self._more():
                    raise

    def _decode(self) -> tuple[Any, int]:
        """Value and end; a broken rule takes the value's place, whose end is known all the same."""
        try:
            return STRICT_DECODER.raw_decode(self._buffer, self._at)
        except JsonError as broken:
            return broken, _LENIENT_DECODER.raw_decode(self._buffer, self._at)[1]

    def _more(self) -> bool:
        """Read on, twice as far the longer the unread text is, so that a long value stays cheap."""
        piece = self._file.read(max(_PIECE, len(self._buffer) - self._at))
        if piece:
            self._buffer = self._buffer[self._at :] + piece
            self._at = 0
        return bool(piece)


def _checked(text: str, value: Any) -> Any:
    if isinstance(value, JsonError):
        return value
    try:
        if not text.isascii():
            text.encode()
        if "\\" in text:
            check_surrogates(text, value)
    except UnicodeEncodeError as error:
        return JsonError("not_utf8", f"byte {ord(text[error.start]) - 0xDC00:#x} is not UTF-8")
    except JsonError as error:
        return error
    return value
