"""A real vLLM on the CPU leaves hidden states: of answers in the same pass, of conversations when asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyrie.config import HiddenStatesSettings
from eyrie.engines.checks import check_against_reference
from eyrie.engines.proving import whole_rows
from eyrie.records import read_json, read_jsonl
from eyrie.states import states_recipe
from eyrie.store import StateStore
from eyrie.target import Target
from test_real_vllm import NAME, ROOT, Folder

pytestmark = [pytest.mark.vllm, pytest.mark.target]

SAMPLES = {"openthoughts": 6, "kimi_native": 4}
CONFIG: dict[str, Any] = {
    "work": "work",
    "partitions": {"short": {"max_new_tokens": 8, "max_in_flight": 8}},
    "hidden_states": {"max_tokens": 400},
    "datasets": {
        "openthoughts": {
            "source": {"files": ["samples/openthoughts.parquet"], "format": "parquet"},
            "licence": "Apache-2.0",
            "layout": "sharegpt",
            "kind": "prompts",
            "samples": SAMPLES["openthoughts"],
        },
        "kimi_native": {
            "source": {"files": ["samples/kimi_native.jsonl"], "format": "jsonl"},
            "licence": "Apache-2.0",
            "layout": "reasoning_pairs",
            "kind": "native",
            "native_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "on_native_mismatch": "warn",
            "samples": SAMPLES["kimi_native"],
        },
    },
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, default_target: Path) -> Iterator[Folder]:
    """The hidden states of both datasets, by one vLLM."""
    if not (ROOT / ".venv-vllm/.ready").exists():
        pytest.skip("vLLM is not there: `make vllm-env` sets it up")
    folder = Folder(tmp_path_factory.mktemp("capture"))
    engine = yaml.safe_load((ROOT / "configs/vllm-capture.yaml").read_text())["engine"]
    folder.configure("capture.yaml", engine=engine, **CONFIG)
    build = ("-m", "snakemake", "--cores", "2", "hidden_states", "--configfile", "capture.yaml")
    folder.run("scripts/with_server.py", "--config", "capture.yaml", "--", "python", *build)
    yield folder


def manifest(built: Folder, dataset: str) -> dict[str, Any]:
    return read_json(built.folder / f"work/{NAME}/hidden_states/{dataset}/manifest.json")


def test_the_numbering_was_proved_by_the_model_and_is_kept(built: Folder) -> None:
    for dataset, samples in SAMPLES.items():
        found = manifest(built, dataset)
        assert found["counts"]["samples"] == samples
        [proof] = found["numbering"]
        assert (proof["engine"], proof["proof"]) == ("vllm", "reference")
        kept = read_json(built.folder / f"work/store/numbering/{proof['key']}.json")
        assert kept["layer_ids"] == [2, 15, 27]
        assert kept["difference"] < 0.02
    assert manifest(built, "openthoughts")["agreement"]["share"] > 0.9


def test_answers_have_left_their_states_and_the_capture_job_asked_for_nothing(built: Folder) -> None:
    logs = built.folder / "work/logs/capture_states"
    assert "0 captured now, 0 converted, 6 found in the store" in (logs / "openthoughts.log").read_text()
    assert "4 captured now, 0 converted, 0 found in the store" in (logs / "kimi_native.log").read_text()


def test_every_sample_has_the_states_of_the_model(built: Folder, default_target: Path) -> None:
    described = read_json(built.folder / f"work/{NAME}/target.json")
    recipe = states_recipe(described, HiddenStatesSettings(max_tokens=400), "float32")
    store = StateStore(built.folder / "work/store", recipe)
    target = Target(default_target, "float32")
    for dataset in SAMPLES:
        rows = list(read_jsonl(built.folder / f"work/{NAME}/tokenized/{dataset}/tokenized_data.jsonl"))
        refs = store.find([store.key(row["input_ids"]) for row in rows])
        assert len(refs) == len(rows)
        for states in store.load(list(refs.values())):
            whole = whole_rows(states)
            assert len(states.token_ids) - len(whole.token_ids) == (dataset == "openthoughts")
            assert check_against_reference(target, whole) < 0.02


def test_no_file_of_the_server_is_left(built: Folder) -> None:
    assert not list((built.folder / "work/store/arriving").glob("**/*.safetensors*"))
