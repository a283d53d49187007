"""How fast raw files become prompts against `json.loads` alone on the same file, and in how much memory.

Invented files of three shapes, with rows as long as those of public datasets are on average: an agent's
conversations (80 kB, JSON lines), problems with solutions (2.7 kB, JSON lines), and chats of some turns
(7 kB, one JSON array). The whole stage is measured (verifying the file's digest, reading, layout, ids,
selection of at most 1,000 rows, writing), in a process of its own that reports its peak memory. The
baseline parses the same bytes and drops the values: line by line, or the array at once, as `json.loads` has
no other way. The seconds are the process's own on the processor, so that waiting for the disk or for other
work on the machine does not count. Rounds alternate and the best of each counts, since other work only ever
slows one down.

    python benchmarks/raw_reading.py [--megabytes 32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from eyrie.config import DatasetSettings
from eyrie.prompts import Prompts
from eyrie.records import sha256_file, write_json

WORDS = [
    "the",
    "river",
    "carries",
    "silt,",
    '"why"',
    "asked",
    "Åsa,\n\tdoes",
    "it",
    "bend?",
    "x",
    "=",
    "f(y);",
]
GROWTH = 4


def text(random_: random.Random, words: int) -> str:
    """Invented words, with what JSON must escape among them."""
    return " ".join(random_.choices(WORDS, k=words))


def agent_row(random_: random.Random) -> dict[str, Any]:
    """84 messages, as a software agent's trajectory has them."""
    spoken = [{"role": ("user", "assistant")[turn % 2], "content": text(random_, 170)} for turn in range(83)]
    return {"messages": [{"role": "system", "content": "Be an agent."}, *spoken]}


def pair_row(random_: random.Random) -> dict[str, Any]:
    """A problem and its solution, among columns that are not read."""
    return {"problem": text(random_, 180), "solution": text(random_, 310), "index": random_.randrange(10**6)}


def chat_row(random_: random.Random) -> dict[str, Any]:
    """Six turns of from and value."""
    spoken = [
        {"from": speaker, "value": text(random_, words)}
        for speaker, words in [("human", 40), ("gpt", 380)] * 3
    ]
    return {"id": f"{random_.randrange(10**9)}_0", "conversations": spoken}


SHAPES: dict[str, tuple[Callable[[random.Random], dict[str, Any]], str, dict[str, Any]]] = {
    "agent": (agent_row, "jsonl", {"layout": "messages"}),
    "pairs": (pair_row, "jsonl", {"layout": "pairs", "fields": {"prompt": "problem"}}),
    "chats": (chat_row, "json", {"layout": "sharegpt"}),
}


def write_file(path: Path, shape: str, megabytes: int) -> None:
    """A file of about that size; equal arguments give equal bytes."""
    make_row, file_format, _ = SHAPES[shape]
    random_ = random.Random(shape)
    with path.open("w", encoding="utf-8") as file:
        separator = "[" if file_format == "json" else ""
        while file.tell() < megabytes * 1_000_000:
            file.write(separator + json.dumps(make_row(random_), ensure_ascii=False))
            separator = ",\n" if file_format == "json" else "\n"
        file.write("]\n" if file_format == "json" else "\n")


def prompts_seconds(shape: str, path: Path) -> float:
    """The time that the prompts stage takes with a file."""
    _, file_format, how = SHAPES[shape]
    source = {"files": [str(path)], "format": file_format}
    settings = DatasetSettings.model_validate(
        {"source": source, "licence": "Apache-2.0", "kind": "prompts", "samples": 1_000, **how}
    )
    described = {"name": str(path), "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "source.json", {"files": [described]})
        start = time.process_time()
        out, ledger, rejects = (folder / name for name in ("prompts.jsonl", "ledger.json", "rejects.jsonl"))
        Prompts(shape, settings, folder / "source.json").write(out, ledger, rejects)
        return time.process_time() - start


def loads_seconds(shape: str, path: Path) -> float:
    """The time that `json.loads` takes with a file."""
    start = time.process_time()
    if SHAPES[shape][1] == "json":
        json.loads(path.read_bytes())
    else:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
    return time.process_time() - start


def measured_apart(shape: str, path: Path, what: str) -> tuple[float, float]:
    """Seconds and peak memory (MiB) of `what`, in a process of its own."""
    command = [sys.executable, __file__, "--measure", what, "--shape", shape, "--file", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """For each shape the best times at the smaller size, and the peaks at both."""
    for shape in SHAPES:
        small, large = folder / f"{shape}.small", folder / f"{shape}.large"
        write_file(small, shape, arguments.megabytes)
        write_file(large, shape, arguments.megabytes * GROWTH)
        rounds = [
            (measured_apart(shape, small, "prompts"), measured_apart(shape, small, "loads"))
            for _ in range(arguments.rounds)
        ]
        ours, peak = min(pair[0] for pair in rounds)
        loads, _ = min(pair[1] for pair in rounds)
        _, peak_large = measured_apart(shape, large, "prompts")
        size = small.stat().st_size / 1e6
        yield {
            "shape": shape,
            "prompts_mb_per_s": round(size / ours, 1),
            "json_loads_mb_per_s": round(size / loads, 1),
            "ratio": round(loads / ours, 3),
            "peak_mib": round(peak, 1),
            "peak_mib_at_4x": round(peak_large, 1),
            "memory_growth": round(peak_large / peak, 3),
        }
        small.unlink()
        large.unlink()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32, help="size of the smaller files (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    parser.add_argument("--measure", choices=("prompts", "loads"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        function = prompts_seconds if arguments.measure == "prompts" else loads_seconds
        seconds = function(arguments.shape, arguments.file)
        print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
        return
    results = []
    print("shape    to prompts   json.loads   ratio   peak     peak at 4x the size")
    with tempfile.TemporaryDirectory() as name:
        for row in measure(arguments, Path(name)):
            results.append(row)
            print(
                f"{row['shape']:6} {row['prompts_mb_per_s']:7.1f} MB/s {row['json_loads_mb_per_s']:7.1f} MB/s"
                f" {row['ratio']:7.2f} {row['peak_mib']:5.0f} MiB {row['peak_mib_at_4x']:5.0f} MiB"
            )
    print(json.dumps({row["shape"]: row for row in results}))


if __name__ == "__main__":
    main()
