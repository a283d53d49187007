"""Bring a dataset's raw files into its folder and record what they are: names, sizes, SHA-256.

Local files are copied; files on the Hugging Face hub are downloaded at a pinned commit, named one by one or
as a split. All later stages read the copies alone and notice when one is changed.
"""

from __future__ import annotations

import argparse
import glob
import time
from pathlib import Path

from eyrie.config import ConfigError, SourceSettings, config_line, parse_settings
from eyrie.console import run_command, start_log
from eyrie.copies import copy_file
from eyrie.hub import copy_from_repository, download
from eyrie.raw_files import check_file
from eyrie.records import sha256_file, write_json


def fetch(dataset: str, settings: SourceSettings, folder: Path) -> list[Path]:
    """The dataset's raw files in its folder, in the order of their names. Raises ConfigError, RecordError."""
    where = config_line(["datasets", dataset, "source"])
    if settings.hub_id is None:
        files = copy_local(dataset, settings.files, folder)
    elif settings.is_local:
        files = copy_from_repository(settings, folder, where)
    else:
        files = download(settings, folder, where)
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
    return [copy_file(path, folder / name) for name, path in sorted(sources.items())]


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
        {
            "dataset": arguments.dataset,
            "files": described,
            "settings": settings.model_dump(mode="json", exclude={"expected_rows", "max_expansion"}),
        },
    )
    size = sum(file.stat().st_size for file in files)
    seconds = time.monotonic() - start
    log.info("%s: %d files, %.1f MB, %.1f s", arguments.dataset, len(files), size / 1e6, seconds)


if __name__ == "__main__":
    run_command(main)
