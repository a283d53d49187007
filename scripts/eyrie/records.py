"""Records on disk: strict JSONL in, atomic files out, content keys, and the ledger of a stage's rows."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from json.encoder import encode_basestring
from pathlib import Path
from typing import IO, Any

from eyrie.errors import BuildError


class RecordError(BuildError):
    """A file or a line of it is not what a reader may rely on; the message names file, line and mend."""


# Made once: json.dumps with settings makes an encoder a call, which costs more than a short value.
_CANONICAL = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
)
_LINE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, whatever their key order."""
    return _CANONICAL.encode(value)


def json_line(value: object) -> bytes:
    """A value as a line of JSON, keys in their own order. Raises TypeError or ValueError."""
    return _LINE.encode(value).encode() + b"\n"


def content_key(*parts: object) -> str:
    """The first 32 hex digits of the SHA-256 of the parts' canonical JSON; the identity of finished work."""
    # The text of canonical_json(parts), part by part: keys are made by the million, mostly of short texts.
    texts = ",".join(
        [encode_basestring(part) if type(part) is str else _CANONICAL.encode(part) for part in parts]
    )
    return hashlib.sha256(f"[{texts}]".encode()).hexdigest()[:32]


# UTF-8 byte by byte where white space counts as a space. 0 stands for what needs a closer look: the first
# bytes of white space beyond ASCII, and control characters, which JSON escapes.
_WHITE = b"\t\n\v\f\r\x1c\x1d\x1e\x1f"
_UNCLEAR = bytes(set(range(0x20)) - set(_WHITE)) + b"\xc2\xe1\xe2\xe3"
_SPACED = bytes.maketrans(_WHITE + _UNCLEAR, b" " * len(_WHITE) + b"\0" * len(_UNCLEAR))


def words_key(kind: str, text: str) -> str:
    """content_key(kind, " ".join(text.split())): the identity of a text whatever white space parts its words.

    Most texts are taken as bytes, which costs half of splitting them.
    """
    data = text.encode().translate(_SPACED)
    if 0 in data:
        return content_key(kind, " ".join(text.split()))
    while len(shorter := data.replace(b"  ", b" ")) < len(data):
        data = shorter
    data = data.strip(b" ").replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return hashlib.sha256(b'["%b","%b"]' % (kind.encode(), data)).hexdigest()[:32]


def sha256_file(path: Path) -> str:
    """The file's SHA-256 in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make a rename or a new name in the folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` whole and synced, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        # mkstemp makes files private; a target is as readable as the umask allows.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """One indented JSON document with sorted keys, written atomically."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, indent=2, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """The JSON document in a file. Raises RecordError with the file's name."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RecordError(f"{path}: expected a JSON document, but: {error}") from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write rows as JSON lines, keys in the rows' own order, atomically; returns their number."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(json_line(row))
            count += 1
    return count


class JsonError(ValueError):
    """JSON that breaks a rule which Python's own reader lets pass; `kind` names the rule in one word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
        raise JsonError("duplicate_key", f"duplicate keys {names}")
    return row


def _no_constant(name: str) -> None:
    raise JsonError("not_a_number", f"{name} is not JSON")


STRICT_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
# An escaped surrogate, or the end of an escaped backslash that looks like one.
_SURROGATE = re.compile(r"u[dD][89a-fA-F](?<=\\u..)")


def check_surrogates(text: str, value: object) -> None:
    """Refuse a value with half a surrogate pair, which is no text. Raises JsonError.

    text: the JSON that was parsed to the value; it has no escaped surrogate where nothing is to be found.
    """
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise JsonError("lone_surrogate", "a lone surrogate, which is not text") from error


def parse_json_strictly(data: bytes) -> Any:
    """JSON bytes to a value, refusing what Python's reader lets pass.

    Raises ValueError for what is no JSON, and of it JsonError for duplicate keys, NaN and infinities, bytes
    that are not UTF-8 and lone surrogates.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError("not_utf8", str(error)) from error
    # A value that fills its line is had without looking for blanks around it.
    value, end = STRICT_DECODER.raw_decode(text) if text.startswith(("{", "[")) else (None, None)
    if end is None or text[end:] not in ("", "\n", "\r\n"):
        value = STRICT_DECODER.decode(text)
    if "\\" in text:
        check_surrogates(text, value)
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file of our own or of a stranger; only the line feed ends a line.

    A byte-order mark and blank lines are tolerated. Raises RecordError naming file and line otherwise.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = parse_json_strictly(line)
            except ValueError as error:
                raise RecordError(
                    f"{path}:{number}: expected one JSON object a line, but: {error}"
                ) from error
            if not isinstance(row, dict):
                raise RecordError(f"{path}:{number}: expected a JSON object, saw {type(row).__name__}")
            yield row


def ledgers_by_dataset(
    ledgers: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Ledgers of both row stages, by dataset: of the rows read, and of the samples."""
    read: dict[str, Mapping[str, Any]] = {}
    samples: dict[str, Mapping[str, Any]] = {}
    for ledger in ledgers:
        (read if ledger["stage"] == "prompts" else samples)[ledger["dataset"]] = ledger
    return read, samples


class Ledger:
    """Rows in = rows kept + rows skipped, by reason: what a stage did with each row it read."""

    def __init__(self) -> None:
        self.kept = 0
        self.skipped: Counter[str] = Counter()

    @property
    def rows(self) -> int:
        """How many rows were read."""
        return self.kept + self.skipped.total()

    def keep(self) -> None:
        """Count a row that goes on."""
        self.kept += 1

    def skip(self, reason: str) -> None:
        """Count a row that stops here, and why."""
        self.skipped[reason] += 1

    def as_dict(self) -> dict[str, object]:
        """The ledger as it is written beside a stage's rows."""
        return {"in": self.rows, "kept": self.kept, "skipped": dict(sorted(self.skipped.items()))}
