"""The way back from a drafter to every source: what each result was made from, and what has changed since.

Every manifest names its parents with their digests, its recipe and the versions that made it. From the
checkpoint's training.json the walk follows those names through manifests, samples and prompts to the raw
files and the target's, and holds each record against what is there now. Paths are seen from the build's
folder.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eyrie import __version__
from eyrie.code_inputs import code_digest
from eyrie.config import Config, SourceSettings
from eyrie.recipes import raw_files
from eyrie.recipes_now import differences, settings_now
from eyrie.records import RecordError, read_json, sha256_file
from eyrie.settings import parse

TRAINING = "training.json"
_PROMPTS = {"prompts.jsonl", "conversations.jsonl"}
_ROWS = {"tokenized_data.jsonl", *_PROMPTS}
_MANIFESTS = {"manifest.json", "vocabulary.json", "target.json", "source.json", TRAINING}
# Read in this order, so that what most results share is told first and each dataset's chain in one piece.
_ORDER = ("target.json", "manifest.json", "tokenized_data.jsonl", "vocabulary.json")


@dataclass
class Node:
    """A result or a source file.

    digest: SHA-256 as the records have it; None where nothing records it. facts: what it is, in short texts.
    parents: names of what it was made from. changes: how it, or what it was made from, differs by now.
    """

    name: str
    kind: str
    digest: str | None
    facts: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """All that a checkpoint came from, by name, in the order of the walk; and what concerns all of it."""

    root: str
    nodes: dict[str, Node]
    general: list[str]

    def changes(self) -> list[tuple[str, str]]:
        """What has changed since: where, and what."""
        found = [(node.name, change) for node in self.nodes.values() for change in node.changes]
        return [*found, *((self.root, change) for change in self.general)]

    def tree(self) -> Iterator[tuple[int, Node]]:
        """The nodes with their depth, each once: where it is met first."""
        seen: set[str] = set()
        waiting = [(0, self.root)]
        while waiting:
            depth, name = waiting.pop()
            if name not in seen:
                seen.add(name)
                yield depth, self.nodes[name]
                waiting += [(depth + 1, parent) for parent in reversed(self.nodes[name].parents)]


def build_folder(checkpoint: Path) -> Path:
    """The folder from which the paths in a checkpoint's records are seen. Raises RecordError."""
    parents = read_json(checkpoint / TRAINING).get("parents") or {}
    for folder in checkpoint.resolve().parents:
        if any((folder / name).exists() for name in parents):
            return folder
    raise RecordError(
        f"{checkpoint / TRAINING}: expected that the files which it names lie below a folder above it; of "
        f"these {len(parents)} none is there: {', '.join(sorted(parents)[:3])}, ... Trace the checkpoint "
        "where it was built"
    )


def walk(checkpoint: Path, config: Config | None, look: bool = True) -> Trace:
    """Follow a checkpoint's records back to its sources.

    config: the configuration to hold recipes against; None compares none. look: whether files are read again
    and compared; without it the records alone are told. Raises RecordError for what can't be read.
    """
    walked = _Walk(config, look)
    walked.visit(str(checkpoint / TRAINING), None)
    return Trace(str(checkpoint / TRAINING), walked.nodes, walked.general())


class _Walk:
    def __init__(self, config: Config | None, look: bool) -> None:
        self._config = config
        self._look = look
        self._digests: dict[str, str | None] = {}
        self._versions: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self._datasets: set[str] = set()
        self.nodes: dict[str, Node] = {}

    def visit(self, name: str, digest: str | None) -> None:
        """Add a file and all that it was made from."""
        if name in self.nodes:
            return
        path = Path(name)
        manifest = _manifest_of(path)
        self.nodes[name] = node = Node(name, _kind(path), digest)
        if manifest is None:
            return
        node.facts = list(_facts(path, manifest))
        for package, made_with in manifest.get("versions", {}).items():
            self._versions[package, made_with].append(name)
        if "dataset" in manifest:
            self._datasets.add(manifest["dataset"])
        parents = self._parents(path, manifest)
        node.parents = sorted(parents, key=_rank)
        if self._look:
            node.changes += self._changed_files(parents)
            if path.name == "source.json":
                node.changes += self._changed_originals(manifest)
        node.changes += self._changed_settings(path, manifest)
        for parent in node.parents:
            self.visit(parent, parents[parent])

    def general(self) -> list[str]:
        """What differs for many results at once: versions, and which datasets there are."""
        if not self._look:
            return []
        found = [
            f"{package} was {made_with} when {_several(names)} made, and is {now} now"
            for (package, made_with), names in sorted(self._versions.items())
            if (now := _version_now(package)) != made_with
        ]
        if self._config is not None:
            added = sorted(set(self._config.datasets) - self._datasets)
            found += [f"dataset {name} is in the configuration, but not in this drafter" for name in added]
        return found

    def _parents(self, path: Path, manifest: Mapping[str, Any]) -> dict[str, str | None]:
        """What a result was made from, with the recorded digests."""
        parents: dict[str, str | None] = dict(manifest.get("parents", {}))
        if path.name == TRAINING:
            parents |= {str(path.parent / name): digest for name, digest in manifest.get("files", {}).items()}
        elif path.name == "source.json":
            parents |= {str(path.parent / file["name"]): file["sha256"] for file in manifest["files"]}
        elif path.name in _PROMPTS and not parents:
            # Ledgers of earlier versions don't name it.
            parents[str(path.parents[2] / "raw" / manifest["dataset"] / "source.json")] = None
        elif path.name == "target.json" and self._config is not None:
            folder = self._config.target.path
            parents |= {str(folder / name): digest for name, digest in manifest["files"].items()}
        return parents

    def _changed_files(self, parents: Mapping[str, str | None]) -> Iterator[str]:
        for name, recorded in sorted(parents.items()):
            now = self._digest(name)
            if now is None:
                yield f"{name} is gone"
            elif recorded is not None and now != recorded:
                word = "was made anew" if _manifest_path(Path(name)) else "has changed"
                yield f"{name} {word}: {recorded[:12]} when this was made, {now[:12]} now"

    def _changed_originals(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        """Whether the files that raw copies were taken from are still the same."""
        source = parse(SourceSettings, manifest["settings"])
        if not source.is_local or source.columns is not None:
            return
        originals = {_name_in(source, path): path for path in raw_files(source)}
        recorded = {file["name"]: file["sha256"] for file in manifest["files"]}
        for name in sorted(recorded.keys() | originals.keys()):
            if name not in originals:
                yield f"the original of {name} is gone"
            elif name not in recorded:
                yield f"{originals[name]} is new; the dataset was made without it"
            elif self._digest(originals[name]) != recorded[name]:
                yield f"{originals[name]} has changed since it was fetched"

    def _changed_settings(self, path: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
        if self._config is None or not self._look:
            return
        dataset = manifest.get("dataset")
        if dataset is not None and dataset not in self._config.datasets:
            if path.name == "source.json":
                yield f"dataset {dataset} is not in the configuration any more"
            return
        recorded, now = settings_now(path.name, manifest, self._config)
        for key, before, after in differences(recorded, now):
            yield f"{key} was {before} when this was made, and is {after} in the configuration"
        if manifest.get("code") not in (None, code_digest("build_prompts", manifest.get("layout"))):
            yield "the code that makes it has changed"

    def _digest(self, name: str) -> str | None:
        """The file's SHA-256 now, read once; None where there is no file."""
        if name not in self._digests:
            self._digests[name] = sha256_file(Path(name)) if Path(name).is_file() else None
        return self._digests[name]


def _manifest_path(path: Path) -> Path | None:
    """The file that tells how a result was made; None for a source, or what another's record tells of."""
    if path.name in _ROWS:
        return path.with_name("ledger.json")
    return path if path.name in _MANIFESTS else None


def _manifest_of(path: Path) -> dict[str, Any] | None:
    where = _manifest_path(path)
    # What is gone is told by what was made from it.
    if where is None or (not where.exists() and path.name != TRAINING):
        return None
    manifest = read_json(where)
    if not isinstance(manifest, dict):
        raise RecordError(f"{where}: expected a manifest, a JSON object, saw {type(manifest).__name__}")
    return manifest


def _kind(path: Path) -> str:
    kinds = {
        TRAINING: "drafter",
        "vocabulary.json": "draft vocabulary",
        "target.json": "target",
        "manifest.json": "hidden states",
        "tokenized_data.jsonl": "samples",
        "prompts.jsonl": "prompts",
        "conversations.jsonl": "conversations",
        "source.json": "source",
    }
    return kinds.get(path.name, "file")


def _facts(path: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """What a reader wants to know of a result, from its manifest; a key that is not there tells nothing."""
    counts = manifest.get("counts", {})
    if path.name == TRAINING:
        yield from _counted(counts, ("train_rows", "samples"), ("train_places", "supervised tokens"))
    elif path.name == "manifest.json":
        yield from _counted(counts, ("samples", "samples"), ("tokens", "tokens"))
        yield f"layers {', '.join(map(str, manifest.get('layer_ids', [])))} as {manifest.get('dtype')}"
        yield from (_engine(one) for one in manifest.get("numbering", []))
    elif path.name == "vocabulary.json":
        yield from _counted(manifest, ("draft_vocab_size", "tokens"))
    elif path.name == "target.json":
        yield " at ".join(filter(None, [manifest.get("hub_id"), manifest.get("hub_revision")])) or "no hub"
        yield f"content {manifest['revision']}"
    elif path.name == "source.json":
        settings = manifest["settings"]
        yield " at ".join(filter(None, [settings.get("hub_id"), settings.get("revision")])) or "local files"
    elif path.name in _ROWS:
        yield f"{manifest['kept']:,} of {manifest['in']:,} rows"
        yield from (_engine(one) for one in manifest.get("engines", []))
        yield from (f"{key} {manifest[key]}" for key in ("layout", "licence") if key in manifest)
    if "version" in manifest.get("recipe", {}):
        yield f"recipe version {manifest['recipe']['version']}"


def _counted(counts: Mapping[str, Any], *wanted: tuple[str, str]) -> Iterator[str]:
    yield from (f"{counts[key]:,} {word}" for key, word in wanted if key in counts)


def _engine(described: Mapping[str, Any]) -> str:
    """An engine's name, version and type of numbers, as far as they are recorded."""
    return " ".join(str(described[key]) for key in ("engine", "version", "dtype") if described.get(key))


def _rank(name: str) -> tuple[int, str]:
    last = Path(name).name
    return (_ORDER.index(last) if last in _ORDER else len(_ORDER), name)


def _name_in(source: SourceSettings, path: str) -> str:
    """The name of an original's copy in the dataset's folder."""
    return Path(path).name if source.hub_id is None else str(Path(path).relative_to(source.hub_id))


def _several(names: list[str]) -> str:
    return f"{names[0]} was" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more were"


def _version_now(package: str) -> str:
    if package == "python":
        return platform.python_version()
    if package == "eyrie":
        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
