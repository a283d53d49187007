"""Say where a drafter comes from, down to every source's revision, and what has changed since.

    python scripts/trace.py work/smollm2-135m-instruct/drafter/checkpoint

Prints what the checkpoint was made from as a tree, and then each thing that is not now what it was: a file
that is gone, changed or made anew, a recipe or an entry of the configuration, code, the version of a library.
Files are hashed again, the target's weights, too. Exit status: 0 nothing has changed, 1 something has, 2 the
records can't be read. Damage within the store is found by scripts/verify_store.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from eyrie.config import Config, parse_config
from eyrie.config_files import read_config
from eyrie.console import start_log
from eyrie.errors import BuildError
from eyrie.records import read_json
from eyrie.trace import Node, Trace, build_folder, walk

_DIGITS = 12


def main() -> int:
    """Run the command; returns its exit status."""
    arguments = _arguments()
    log = start_log("trace", None)
    try:
        files = [path.resolve() for path in arguments.config]
        folder = build_folder(arguments.checkpoint)
        checkpoint = arguments.checkpoint.resolve().relative_to(folder)
        os.chdir(folder)
        config, where = _configuration(files, checkpoint)
        trace = walk(checkpoint, config)
    except BuildError as error:
        log.error("FAILED\n%s", error)
        return 2
    print(_as_json(trace, where) if arguments.json else _as_text(trace, where))
    return 1 if trace.changes() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder of the drafter's checkpoint")
    parser.add_argument(
        "--config",
        type=Path,
        nargs="+",
        default=[],
        help="configuration files to compare with; else config.yaml where it describes this drafter, else "
        "the settings of the build's last run",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser.parse_args()


def _configuration(files: list[Path], checkpoint: Path) -> tuple[Config | None, str]:
    """What to compare with, and its name. Raises ConfigError."""
    if files:
        return read_config(files), " and ".join(path.name for path in files)
    default = Path("config.yaml")
    if default.exists():
        config = read_config([default])
        if checkpoint == config.work / config.target.name / "drafter" / "checkpoint":
            return config, str(default)
    last = checkpoint.parents[2] / "config.json" if len(checkpoint.parents) > 2 else default
    if last.suffix == ".json" and last.exists():
        return parse_config(read_json(last)), f"{last}, the settings of the last run"
    return None, "none: no configuration describes this drafter; --config names one"


def _as_text(trace: Trace, where: str) -> str:
    lines = [f"{_indented(depth)}{_line(node)}" for depth, node in trace.tree()]
    changes = trace.changes()
    lines += ["", f"compared with the configuration in {where}"]
    lines += [f"{len(changes)} changed since:" if changes else "nothing has changed since"]
    return "\n".join([*lines, *(f"  {name}: {change}" for name, change in changes)])


def _indented(depth: int) -> str:
    return "" if depth == 0 else "│  " * (depth - 1) + "├─ "


def _line(node: Node) -> str:
    digest = "" if node.digest is None else node.digest[:_DIGITS]
    facts = "; ".join(node.facts)
    words = filter(None, [node.name, "" if node.kind == "file" else node.kind, facts, digest])
    return "  ".join(words) + ("  ← changed" if node.changes else "")


def _as_json(trace: Trace, where: str) -> str:
    document = {
        "root": trace.root,
        "configuration": where,
        "nodes": [asdict(node) for node in trace.nodes.values()],
        "changes": [{"name": name, "change": change} for name, change in trace.changes()],
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


if __name__ == "__main__":
    sys.exit(main())
