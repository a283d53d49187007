"""What a value of the configuration may be made of, since some become paths, and words of commands.

Every value is quoted where it meets a shell; this is the second line of defence, and it keeps out what would
break something else on the way: a line of a log, the JSON in a server's command, Snakemake's own patterns.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

# `{}` are Snakemake's wildcards, `*?[]` globs; quotes and the backslash would break out of JSON.
_NOT_IN_A_FOLDER = set("{}*?[]\"'`\\$;&|<>!")
_SECRET_WORD = re.compile(r"(token|secret|passw(or)?d|api[_-]?key|credential)", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"^--?(?:[a-z-]*-)?(token|secret|password|api-key|apikey)(=|$)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
_ASSIGNED = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.+)$", re.DOTALL)
_LITERAL = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,})")


def unprintable(data: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and text of each value or key that holds a control character or half a surrogate pair.

    Line feeds and tabs are let pass in values: YAML's long texts may end with one.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            yield from ((path, name) for name in [str(key)] if not _is_printable(name, ""))
            yield from unprintable(value, (*path, str(key)))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from unprintable(value, (*path, str(number)))
    elif isinstance(data, str | Path) and not _is_printable(str(data), "\n\t"):
        yield path, str(data)


def _is_printable(text: str, allowed: str) -> bool:
    return all(sign in allowed or unicodedata.category(sign) not in ("Cc", "Cs") for sign in text)


def _is_folder(path: Path) -> Path:
    """A path that can stand in a command and in Snakemake's patterns as it is."""
    text = str(path)
    bad = sorted({sign for sign in text if sign in _NOT_IN_A_FOLDER or not _is_printable(sign, "")})
    if bad:
        raise ValueError(f"expected a path without {' '.join(map(repr, bad))}")
    if text.startswith(("-", "~")) or text == "..":
        raise ValueError("expected a path that begins with neither - nor ~ (which nobody expands here)")
    return path


FolderPath = Annotated[Path, AfterValidator(_is_folder)]
"""A folder that results are written to, or that a target or checkpoint lies in."""


def words_of(command: str) -> list[str]:
    """The words of a command. Raises ValueError where it can't be divided into words."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"expected the words of a command, but: {error} in {command!r}") from error
    if not words:
        raise ValueError("expected the words of a command, saw none")
    return words


def secrets_in(command: str) -> list[str]:
    """What in a command looks like a secret, in words that do not repeat it."""
    words, found = words_of(command), []
    for number, word in enumerate(words, start=1):
        assigned = _ASSIGNED.match(word)
        names = [name for name in _VARIABLE.findall(word) if _SECRET_WORD.search(name)]
        if names:
            found.append(
                f"word {number} names ${names[0]}, but no shell expands it: it is passed on as it stands"
            )
        elif _LITERAL.search(word):
            found.append(f"word {number} looks like a token")
        elif assigned and _SECRET_WORD.search(assigned[1]):
            found.append(f"word {number} sets {assigned[1]}")
        elif flag := _SECRET_FLAG.match(word):
            found.append(f"word {number} is the flag --{flag[1].lower()}")
    return found
