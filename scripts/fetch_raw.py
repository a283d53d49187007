"""Bring a dataset's raw files into its folder and record what they are: names, sizes, SHA-256.

Local files are copied; files on the Hugging Face hub are downloaded at a pinned commit. All later stages
read the copies alone and notice when one is changed.
"""

from __future__ import annotations

import argparse
import glob
import shutil
import time
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from eyrie.config import ConfigError, SourceSettings, config_line, parse_settings
from eyrie.console import run_command, start_log
from eyrie.raw_files import check_file
from eyrie.records import atomic_write, sha256_file, write_json


def fetch(dataset: str, settings: SourceSettings, folder: Path) -> list[Path]:
    """The dataset's raw files in its folder, in the order of their names. Raises ConfigError, RecordError."""
    if settings.hub_id is None:
        files = copy_local(dataset, settings.files, folder)
    else:
        files = download(dataset, settings.hub_id, settings, folder)
    for file in files:
        check_file(file, settings.format)
    return files


def copy_local(dataset: str, patterns: list[str], folder: Path) -> list[Path]:
    """Copy the files that the paths and globs name; each copy appears whole or not at all."""
    where = config_line(["datasets", dataset, "source", "files"])
    sources: dict[str, Path] = {}
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        if not matches:
            raise ConfigError(
                f"{where}: saw {pattern!r}, which names no file seen from {Path.cwd()}; "
                "expected paths or globs of existing files"
            )
        for path in matches:
            other = sources.setdefault(path.name, path)
            if not other.samefile(path):
                raise ConfigError(f"{where}: {other} and {path} bear the same name; rename one")
    return [_copied(path, folder / name) for name, path in sorted(sources.items())]


def _copied(source: Path, target: Path) -> Path:
    if target.exists() and (target.samefile(source) or sha256_file(target) == sha256_file(source)):
        return target
    with source.open("rb") as reading, atomic_write(target) as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
    return target


def download(dataset: str, hub_id: str, settings: SourceSettings, folder: Path) -> list[Path]:
    """Download the files from the hub at the pinned commit, into a folder of that commit's name."""
    where = config_line(["datasets", dataset, "source"])
    if settings.revision is None:
        raise ConfigError(
            f"{where}: {hub_id} without a revision; expected the hexadecimal commit, shown under "
            "'Files and versions': without it, the same configuration would one day read other data"
        )
    target = folder / settings.revision
    try:
        huggingface_hub.snapshot_download(
            hub_id,
            repo_type="dataset",
            revision=settings.revision,
            allow_patterns=settings.files,
            local_dir=target,
        )
    except (OSError, huggingface_hub.errors.IncompleteSnapshotError) as error:
        raise ConfigError(_why_not(settings, target, where, error)) from error
    names = [path.relative_to(target) for path in target.rglob("*") if path.is_file()]
    present = [str(name) for name in names if name.parts[0] != ".cache"]
    for pattern in settings.files:
        if not any(filter_repo_objects(present, allow_patterns=[pattern])):
            raise ConfigError(f"{where}.files: {hub_id} holds no file that {pattern!r} names")
    return [target / name for name in sorted(filter_repo_objects(present, allow_patterns=settings.files))]


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
    patterns = " ".join(f"--include {pattern!r}" for pattern in settings.files)
    return (
        f"{where}: {settings.hub_id} {seen}\n"
        "  without a network: run this where there is one, bring the folder here, and build again:\n"
        f"    hf download {settings.hub_id} --repo-type dataset --revision {settings.revision} {patterns} "
        f"--local-dir {target}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", required=True, help="the dataset's name in the configuration")
    parser.add_argument("--settings", required=True, help="the dataset's `source`, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="source.json; the files come beside it")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args()
    log = start_log("fetch_raw", arguments.log)
    start = time.monotonic()

    settings = parse_settings(SourceSettings, arguments.settings)
    folder = arguments.out.parent
    files = fetch(arguments.dataset, settings, folder)
    described = [
        {"name": str(file.relative_to(folder)), "bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in files
    ]
    write_json(
        arguments.out,
        {"dataset": arguments.dataset, "files": described, "settings": settings.model_dump(mode="json")},
    )
    size = sum(file.stat().st_size for file in files)
    seconds = time.monotonic() - start
    log.info("%s: %d files, %.1f MB, %.1f s", arguments.dataset, len(files), size / 1e6, seconds)


if __name__ == "__main__":
    run_command(main)
