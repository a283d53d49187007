"""Files of a dataset on the Hugging Face hub, or of a copy of its repository on this machine.

The `datasets` library says which files a split consists of, and is never asked for rows: on the way through
it a message gains the keys of its neighbours, a date becomes a timestamp, and a type found in the first rows
is forced upon the rest. The files themselves are fetched and are read like any other raw file.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, cast

import httpx2
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from eyrie.config import ConfigError, SourceSettings
from eyrie.copies import copy_columns, copy_file, has_columns

_UNREACHABLE = (OSError, httpx2.HTTPError, huggingface_hub.errors.IncompleteSnapshotError)


def copy_from_repository(settings: SourceSettings, folder: Path, where: str) -> list[Path]:
    """The files, out of a copy of a repository on this machine. Raises ConfigError, RecordError.

    where: names the source's configuration in errors.
    """
    root = Path(settings.hub_id or "")
    if not root.is_dir():
        raise ConfigError(
            f"{where}.hub_id: {root} is no folder; expected OWNER/NAME, or the folder of a copy of a "
            "dataset's repository"
        )
    try:
        names = _wanted(settings, root, where)
    except OSError as error:
        raise ConfigError(f"{where}: {root}: {error}") from error
    copies = []
    for name in names:
        target = _inside(folder / "repository", name, where)
        if settings.columns is None:
            copies.append(copy_file(root / name, target))
        else:
            with (root / name).open("rb") as file:
                copies.append(copy_columns(str(root / name), file, settings.columns, target))
    return copies


def download(settings: SourceSettings, folder: Path, where: str) -> list[Path]:
    """The files, from the hub at the pinned commit, in a folder of that commit's name.

    What is there already is kept. Raises ConfigError, RecordError.
    """
    if settings.revision is None:
        raise ConfigError(
            f"{where}: {settings.hub_id} without a revision; expected the hexadecimal commit, shown under "
            "'Files and versions': without it, the same configuration would one day read other data"
        )
    target = folder / settings.revision
    try:
        if settings.columns is not None:
            return _stream_columns(settings, settings.columns, target, where)
        patterns = settings.files
        if settings.split is not None:
            patterns = [glob.escape(name) for name in _listed(settings, target, where)]
        huggingface_hub.snapshot_download(
            settings.hub_id,
            repo_type="dataset",
            revision=settings.revision,
            allow_patterns=patterns,
            local_dir=target,
        )
    except _UNREACHABLE as error:
        raise ConfigError(_why_not(settings, target, where, error)) from error
    return [target / name for name in _matching(_names_in(target), patterns, where, settings.hub_id)]


def _stream_columns(settings: SourceSettings, columns: list[str], target: Path, where: str) -> list[Path]:
    """Fetch the columns alone, by reading those parts of the remote files."""
    copies = []
    for name in _listed(settings, target, where):
        copy = _inside(target, name, where)
        if not has_columns(copy, columns):
            address = f"datasets/{settings.hub_id}@{settings.revision}/{name}"
            with huggingface_hub.HfFileSystem().open(address, "rb") as file:
                copy_columns(f"{settings.hub_id}/{name}", file, columns, copy)
        copies.append(copy)
    return copies


def _inside(folder: Path, name: str, where: str) -> Path:
    """Where a repository's file is copied to; its description may name files anywhere. Raises ConfigError."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"{where}: the repository names {name!r} as one of its files, which lies outside of it\n"
            "  expected: files of the repository\n"
            "  change: hub_id or revision; such a description is made to do harm"
        )
    return folder / name


def _listed(settings: SourceSettings, target: Path, where: str) -> list[str]:
    """The names of the files on the hub; without a network, those in a folder brought from elsewhere."""
    try:
        return _wanted(settings, None, where)
    except _UNREACHABLE:
        if not target.is_dir():
            raise
        return _wanted(settings, target, where)


def _wanted(settings: SourceSettings, root: Path | None, where: str) -> list[str]:
    """The names of the wanted files, sorted, in a copy of the repository or, with None, on the hub."""
    if settings.split is not None:
        return _files_of_split(settings, root, where)
    if root is not None:
        there = _names_in(root)
    else:
        there = huggingface_hub.HfApi().list_repo_files(
            settings.hub_id, repo_type="dataset", revision=settings.revision
        )
    return _matching(there, settings.files, where, settings.hub_id)


def _files_of_split(settings: SourceSettings, root: Path | None, where: str) -> list[str]:
    import datasets  # noqa: PLC0415 - importing it takes seconds, and most sources name their files

    place = settings.hub_id if root is None else str(root.resolve())
    revision = settings.revision if root is None else None
    try:
        builder = datasets.load_dataset_builder(place, settings.config, revision=revision)
    except (ValueError, RuntimeError) as error:
        # An unknown or missing configuration, or a dataset that is a program.
        raise ConfigError(f"{where}.config: {settings.hub_id}: {' '.join(str(error).split())}") from error
    splits = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    if settings.split not in splits:
        raise ConfigError(
            f"{where}.split: saw {settings.split!r}; {settings.hub_id} has the splits {', '.join(splits)}"
        )
    return sorted(_name_in_repository(str(file), root) for file in splits[settings.split])


def _name_in_repository(file: str, root: Path | None) -> str:
    """The part of hf://datasets/OWNER/NAME@COMMIT/PATH, or of a path below the root, that names the file."""
    if root is not None:
        return os.path.relpath(file, root.resolve())
    return file.split("@", 1)[1].split("/", 1)[1]


def _names_in(root: Path) -> list[str]:
    """The files of a folder, less what git and the hub's client keep in it for themselves."""
    names = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return sorted(str(name) for name in names if name.parts[0] not in (".cache", ".git"))


def _matching(names: list[str], patterns: list[str], where: str, hub_id: str | None) -> list[str]:
    for pattern in patterns:
        if not any(filter_repo_objects(names, allow_patterns=[pattern])):
            raise ConfigError(f"{where}.files: {hub_id} holds no file that {pattern!r} names")
    return sorted(cast("Any", filter_repo_objects(names, allow_patterns=patterns)))


def _why_not(settings: SourceSettings, target: Path, where: str, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        seen = "is gated: accept its terms on the hub and log in with `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        seen = "is not on the hub, or is private and needs `hf auth login`; check hub_id"
    elif isinstance(error, RevisionNotFoundError):
        seen = f"has no commit {settings.revision}; check revision"
    elif isinstance(error, HfHubHTTPError):
        seen = f"was refused by the hub: {error}"
    else:
        seen = f"cannot be reached: {error}".splitlines()[0]
    # A split is described by the whole repository.
    patterns = "".join(f"--include {pattern!r} " for pattern in settings.files)
    return (
        f"{where}: {settings.hub_id} {seen}\n"
        "  without a network: run this where there is one, bring the folder here, and build again:\n"
        f"    hf download {settings.hub_id} --repo-type dataset --revision {settings.revision} {patterns}"
        f"--local-dir {target}"
    )
