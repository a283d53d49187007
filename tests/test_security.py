"""What the build does not trust: code beside a target, pickled weights, archives, names, commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import chat_targets
from audit_packages import judged
from eyrie.chat import Chat
from eyrie.config import ConfigError, SourceSettings, TargetSettings, parse_config
from eyrie.hub import copy_from_repository
from eyrie.raw_files import rows
from eyrie.recipes import prompts_settings, report_recipe, source_settings, target_settings
from eyrie.records import RecordError
from eyrie.remote_code import trusted_code
from eyrie.safe_values import secrets_in
from eyrie.serving import fill_command
from eyrie.target import Target, read_text_config
from identify_target import describe_target
from tiny_drafting import save_tiny_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_config(root: Path, **changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((root / "configs/tiny.yaml").read_text()), **changes}


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A target whose tokenizer leaves a mark where its Python runs."""
    chat_targets.write_kimi(tmp_path)
    code = tmp_path / "tokenization_kimi.py"
    code.write_text(code.read_text() + f"\nPath({str(tmp_path / 'RAN')!r}).touch()\n")
    return tmp_path


def test_a_targets_python_never_runs_unasked(kimi: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Chat(kimi)
    assert "tokenization_kimi.TikTokenTokenizer" in str(caught.value)
    assert "trust_remote_code: true" in str(caught.value)
    assert "target.revision" in str(caught.value)
    assert not (kimi / "RAN").exists()
    Chat(kimi, trusted=True)
    assert (kimi / "RAN").exists()


def test_code_of_another_repository_is_refused_even_where_code_is_trusted(kimi: Path) -> None:
    settings = json.loads((kimi / "tokenizer_config.json").read_text())
    settings["auto_map"]["AutoTokenizer"][0] = "someone/else--tokenization_kimi.TikTokenTokenizer"
    (kimi / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="another repository: someone/else--"):
        Chat(kimi, trusted=True)


def test_a_configurations_own_class_never_runs(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\nclass OwnConfig: ...\n")
    with pytest.raises(ConfigError, match=r"own\.OwnConfig, which is never run"):
        read_text_config(tmp_path)
    assert not (tmp_path / "RAN").exists()


def test_trusted_code_is_the_code_that_was_identified(kimi: Path) -> None:
    target = {"trust_remote_code": True, "files": {}}
    with pytest.raises(ConfigError, match=r"tokenization_kimi\.py is not the file"):
        trusted_code(target, kimi)
    assert not trusted_code({"files": {}}, kimi)


def test_trust_needs_the_whole_commit() -> None:
    for revision in (None, "main", "0123456"):
        with pytest.raises(ValueError, match="40 hex digits"):
            TargetSettings(name="a", path=Path("a"), trust_remote_code=True, revision=revision)
    TargetSettings(name="a", path=Path("a"), trust_remote_code=True, revision=COMMIT)


def test_a_servers_command_trusts_code_only_where_the_target_is_trusted(root: Path) -> None:
    config = tiny_config(root, engine={"kind": "vllm", "command": "serve --port {port} --trust-remote-code"})
    with pytest.raises(ConfigError, match=r"engine\.command.*write {trust_remote_code} in its place"):
        parse_config(config)
    config["target"] |= {"trust_remote_code": True, "revision": COMMIT}
    parse_config(config)
    template = "serve {trust_remote_code} '{}' --port {port}"
    assert fill_command(template, trust_remote_code="", port=1) == ["serve", "{}", "--port", "1"]
    trusted = fill_command(template, trust_remote_code="--trust-remote-code", port=1)
    assert trusted == ["serve", "--trust-remote-code", "{}", "--port", "1"]


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    """A folder with nothing but pytorch_model.bin has no weights."""
    save_tiny_target(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"expected config\.json, \*\.safetensors"):
        describe_target(TargetSettings(name="a", path=tmp_path))
    with pytest.raises(OSError, match="safetensors"):
        Target(tmp_path, "float32", [1, 3, 5])


def test_no_line_of_ours_unpickles(root: Path) -> None:
    """torch.load, pickle and their like run what a file tells them to."""
    calls = ("torch.load(", "import pickle", "pickle.load", "np.load(", "joblib", "yaml.load(", "shell=True")
    calls += ("os.system(", "eval(", "exec(")
    found = [
        f"{file.name}: {call}"
        for file in (root / "scripts").rglob("*.py")
        for call in calls
        if call in file.read_text().replace(".eval(", "").replace("exec_module(", "")
    ]
    assert found == []


def test_a_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_tiny_target(tmp_path)
    shape = {"hidden_size": 7168, "layers": 61, "vocab_size": 163_840}
    settings = TargetSettings.model_validate({"name": "a", "path": tmp_path, "shape": shape})
    with pytest.raises(ConfigError, match="61 layers of 7,168, 163,840 tokens"):
        describe_target(settings)


def test_keys_with_their_defaults_make_nothing_stale(root: Path) -> None:
    """An existing build must not be made anew because the keys are there now."""
    config = parse_config(tiny_config(root))
    texts = target_settings(config.target), report_recipe(config)
    texts += tuple(prompts_settings(one) for one in config.datasets.values())
    texts += tuple(source_settings(one.source) for one in config.datasets.values())
    for key in ("trust_remote_code", "max_expansion", '"shape"'):
        assert not any(key in text for text in texts)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_explodes_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bomb.jsonl{suffix}"
    line = b'{"a": "' + b" " * 1_000_000 + b'"}\n'
    with gzip.open(path, "wb") if suffix == ".gz" else pa.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range(80):
            file.write(line)
    with pytest.raises(RecordError, match=r"over 200 times as many(.|\n)*raise source\.max_expansion"):
        list(rows([path], "jsonl"))
    assert len(list(rows([path], "jsonl", max_expansion=100_000))) == 80


def test_a_parquet_file_that_explodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"a": [f"{n:06}" + " " * 1_000_000 for n in range(80)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(RecordError, match=r"over 200 times as many"):
        list(rows([path], "parquet"))
    assert len(list(rows([path], "parquet", max_expansion=100_000))) == 80


def test_a_repository_can_not_name_files_outside_of_itself(tmp_path: Path) -> None:
    """A dataset's description lists its files; one with ../ would be copied to the like place."""
    repository = tmp_path / "data" / "repository"
    repository.mkdir(parents=True)
    (tmp_path / "data" / "outside.jsonl").write_text('{"a": 1}\n')
    described = {"configs": [{"config_name": "default", "data_files": "../outside.jsonl"}]}
    (repository / "README.md").write_text(f"---\n{yaml.safe_dump(described)}---\n")
    settings = SourceSettings(hub_id=str(repository), split="train", format="jsonl")
    with pytest.raises(ConfigError, match="outside"):
        copy_from_repository(settings, tmp_path / "work" / "raw" / "a", "here")
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").rglob("*.jsonl"))


@pytest.mark.parametrize("name", ["raw", "prompts", "store", "logs", "benchmarks", "../a", "a/b", "", ".."])
def test_a_targets_folder_is_its_own(root: Path, name: str) -> None:
    config = tiny_config(root)
    config["target"]["name"] = name
    with pytest.raises(ConfigError, match=r"target"):
        parse_config(config)


def test_a_url_takes_no_password(root: Path) -> None:
    with pytest.raises(ConfigError, match="urls"):
        parse_config(tiny_config(root, engine={"kind": "vllm", "urls": ["http://me:secret@host:1"]}))


def test_secrets_in_a_command_are_noticed_and_not_repeated() -> None:
    command = (
        "env HF_TOKEN=abc A=1 serve --api-key hunter2 --port {port} $OPENAI_API_KEY hf_abcdefghijklmnopqrstu"
    )
    found = secrets_in(command)
    assert len(found) == 4
    assert not any(secret in one for one in found for secret in ("abc", "hunter2"))
    assert secrets_in("env A=1 serve --max-num-batched-tokens 5 --tokenizer-mode auto --port {port}") == []


def test_the_committed_commands_hold_no_secret(root: Path) -> None:
    for file in [root / "config.yaml", *sorted((root / "configs").glob("*.yaml"))]:
        command = yaml.safe_load(file.read_text()).get("engine", {}).get("command")
        assert command is None or secrets_in(command) == []


def test_a_command_that_has_no_words_is_refused(root: Path) -> None:
    for command in ("serve --port {port} 'half", "  "):
        with pytest.raises(ConfigError, match="expected the words of a command"):
            parse_config(tiny_config(root, engine={"kind": "vllm", "command": command}))


def test_a_package_that_nobody_could_look_up_is_not_called_safe() -> None:
    good, skipped = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}
    bad = {"name": "c", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    assert judged([good]) == (0, "1 packages, no known vulnerability")
    assert judged([good, skipped])[0] == 2 and "NOT CHECKED: 1 of 2" in judged([good, skipped])[1]
    assert judged([bad, skipped])[0] == 1 and "c 1: CVE-1" in judged([bad, skipped])[1]
