"""A real vLLM on the CPU answers some of the samples' prompts, with the tokens that are made in process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from compare_answers import DifferenceError, first_difference
from eyrie.records import read_json, write_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.target]

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 8
NAME = "smollm2-135m-instruct"

CONFIG: dict[str, Any] = {
    "work": "work",
    "target": {"name": NAME, "path": f"models/{NAME}", "dtype": "float32"},
    "partitions": {
        "short": {"max_new_tokens": 24, "max_in_flight": 8},
        "long": {"max_new_tokens": 32, "max_in_flight": 4},
    },
    # Sixteen prompts of two layouts and both partitions.
    "datasets": {
        "openthoughts": {
            "source": {"files": ["samples/openthoughts.parquet"], "format": "parquet"},
            "licence": "Apache-2.0",
            "layout": "sharegpt",
            "kind": "prompts",
            "samples": PROMPTS,
        },
        "swe_agent": {
            "source": {"files": ["samples/swe_agent.parquet"], "format": "parquet"},
            "licence": "Apache-2.0",
            "layout": "trajectory",
            "kind": "prompts",
            "partition": "long",
            "samples": PROMPTS,
        },
    },
}


class Folder:
    """A folder with links to all that a build reads, to build in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (
            "Snakefile",
            "rules",
            "profiles",
            "scripts",
            "samples",
            "models",
            ".venv-vllm",
            "configs",
        ):
            (folder / name).symlink_to(ROOT / name)

    def configure(self, file: str, **changes: Any) -> None:
        (self.folder / file).write_text(yaml.safe_dump({**CONFIG, **changes}))

    def run(self, *command: str) -> str:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
        )
        assert result.returncode == 0, result.stdout
        return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, default_target: Path) -> Iterator[Folder]:
    """Both builds: in process, and by one vLLM that with_server.py starts for both datasets."""
    if not (ROOT / ".venv-vllm/.ready").exists():
        pytest.skip("vLLM is not there: `make vllm-env` sets it up")
    folder = Folder(tmp_path_factory.mktemp("vllm"))
    folder.configure("ours.yaml", engine={"kind": "in_process", "threads": 1})
    engine = yaml.safe_load((ROOT / "configs/vllm.yaml").read_text())["engine"]
    folder.configure("theirs.yaml", engine=engine, work="work-vllm")
    build = ("-m", "snakemake", "--cores", "2", "responses")
    folder.run(*build, "--configfile", "ours.yaml")
    with_server = ("scripts/with_server.py", "--config", "theirs.yaml", "--", sys.executable)
    folder.run(*with_server, *build, "--configfile", "theirs.yaml")
    yield folder


def test_its_float32_tokens_are_those_made_in_process(built: Folder) -> None:
    said = built.run("scripts/compare_answers.py", *comparison())
    compared = read_json(built.folder / "comparison.json")
    assert compared["answers"] == 2 * PROMPTS, said
    assert all(one["margin"] < 1e-3 for one in compared["parted"])
    # Rounding parts a few answers at most: where most part, something else is the cause.
    assert len(compared["parted"]) <= PROMPTS // 4, said


def comparison() -> list[str]:
    return [
        *("--ours", f"work/{NAME}/tokenized", "--theirs", f"work-vllm/{NAME}/tokenized"),
        *("--target-path", f"models/{NAME}", "--out", "comparison.json"),
    ]


def test_one_start_served_both_datasets_and_left_nothing(built: Folder) -> None:
    logs = built.folder / "work-vllm/logs"
    assert (logs / "server.log").read_text().count("vllm.entrypoints.openai.api_server --model") == 1
    assert [path.name for path in logs.glob("**/*server.log*")] == ["server.log"]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(built.folder) not in running


def test_what_it_is_stands_in_ledger_and_store(built: Folder) -> None:
    ledgers = [
        read_json(built.folder / f"work-vllm/{NAME}/tokenized/{dataset}/ledger.json")
        for dataset in CONFIG["datasets"]
    ]
    servers = [engine for ledger in ledgers for engine in ledger["engines"]]
    assert len(servers) == 2
    assert {server["engine"] for server in servers} == {"vllm"}
    assert {server["dtype"] for server in servers} == {"float32"}
    assert servers[0]["canary"] == servers[1]["canary"]
    records = list((built.folder / "work-vllm/store").rglob("vllm-*-float32.json"))
    assert records
    for record in map(read_json, records):
        assert record["token_ids"] == servers[0]["canary"]
        assert len(record["margins"]) == len(record["token_ids"])


def test_a_second_build_asks_nothing_and_needs_no_server(built: Folder) -> None:
    journals = sorted((built.folder / "work-vllm/store/answers").glob("*/*.jsonl"))
    before = [path.read_bytes() for path in journals]
    assert sum(lines.count(b"\n") for lines in before) == 2 * PROMPTS
    for path in (built.folder / f"work-vllm/{NAME}/tokenized").glob("*/*.jsonl"):
        path.unlink()
    built.run("-m", "snakemake", "--cores", "2", "responses", "--configfile", "theirs.yaml")
    assert [path.read_bytes() for path in journals] == before


def test_an_answer_that_no_rounding_explains_fails_the_comparison(built: Folder) -> None:
    """A wrong token in the other engine's answer: the comparison must be able to fail."""
    path = built.folder / f"work-vllm/{NAME}/tokenized/openthoughts/tokenized_data.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = rows[0]
    start = row["loss_mask"].index(1)
    row["input_ids"][start + 1] = 7 if row["input_ids"][start + 1] != 7 else 8
    write_jsonl(path, rows)
    with pytest.raises(AssertionError, match=rf"{DifferenceError.__name__}|1 of {2 * PROMPTS} answers part"):
        built.run("scripts/compare_answers.py", *comparison())
    parted = read_json(built.folder / "comparison.json")["parted"]
    assert [one["place"] for one in parted if one["id"] == row["id"]] == [1]


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2, 3], [1, 4, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)]
)
def test_the_first_difference(one: list[int], other: list[int], place: int) -> None:
    assert first_difference(one, other) == first_difference(other, one) == place
