"""The commands that start servers, held against the engines' own flags; nothing is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Config
from eyrie.config_files import read_config
from eyrie.planning import gpus_of
from eyrie.safe_values import words_of
from eyrie.serving import fill_command
from eyrie.states import served_layer_ids

KIMI = ["configs/kimi-k2.5.yaml"]
SGLANG = [*KIMI, "configs/kimi-k2.5-sglang.yaml"]
VLLM_BUILDS = [KIMI, ["config.yaml", "configs/vllm.yaml"], ["config.yaml", "configs/vllm-capture.yaml"]]
# Asks vLLM's own parser, which may lie in either place, and says what became of the words.
PARSE = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
found = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
print("PARSED", json.dumps(found, default=str))
"""


def read(root: Path, names: list[str]) -> Config:
    return read_config([root / name for name in names])


def flags_of(config: Config) -> list[str]:
    """The server's arguments as a job fills them in, with trusted code and all that could be filled in."""
    assert config.engine.command is not None
    layers = config.target.shape.layers if config.target.shape else 30
    ids = served_layer_ids(config.hidden_states.layer_ids or [2, 15, 27], layers)
    values = {"model": config.target.path, "host": "127.0.0.1", "port": 8000, "states": "/states"}
    values |= {"layer_ids": json.dumps(ids), "trust_remote_code": "--trust-remote-code"}
    words = fill_command(config.engine.command, **values)
    return words[words.index("-m") + 2 :]


@pytest.mark.vllm
@pytest.mark.parametrize("names", VLLM_BUILDS, ids=lambda names: names[-1])
def test_vllms_own_parser_takes_the_command(root: Path, names: list[str]) -> None:
    python = root / ".venv-vllm/bin/python"
    if not python.exists():
        pytest.skip("no .venv-vllm: make vllm-env sets it up")
    config = read(root, names)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["LD_PRELOAD"] = str(root / ".venv-vllm/lib/libiomp5.so")
    done = subprocess.run(
        [python, "-c", PARSE, *flags_of(config)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    found: dict[str, Any] = json.loads(line.removeprefix("PARSED "))
    assert found["model"] == str(config.target.path)
    if names == KIMI:
        check_kimi(found)


def check_kimi(found: dict[str, Any]) -> None:
    """What vLLM understood of the full build's command."""
    assert found["tensor_parallel_size"] == 8
    assert found["trust_remote_code"] is True
    assert found["load_format"] == "safetensors"
    assert found["enable_prefix_caching"] is False
    assert found["enable_chunked_prefill"] is False
    assert found["max_num_batched_tokens"] == found["max_model_len"] == 65_536
    assert "extract_hidden_states" in str(found["speculative_config"])
    assert re.search(r"\[0, 2, 30, 58, 61\]", str(found["speculative_config"]))
    assert "/states" in str(found["kv_transfer_config"])


def test_sglang_declares_every_flag(root: Path) -> None:
    """Against a recorded list of its version's flags; no SGLang is run."""
    recorded = json.loads((root / "tests/data/sglang_flags.json").read_text())
    words = flags_of(read(root, SGLANG))
    while words:
        flag = words.pop(0)
        assert flag in recorded["flags"], f"SGLang {recorded['version']} declares no {flag}"
        if recorded["flags"][flag] == "one":
            assert words and not words[0].startswith("--"), f"{flag} takes a value"
            words.pop(0)


def test_the_recorded_list_notices_a_flag_that_is_not_there(root: Path) -> None:
    flags = json.loads((root / "tests/data/sglang_flags.json").read_text())["flags"]
    assert {"--model-path", "--tp-size", "--trust-remote-code", "--load-format"} <= flags.keys()
    assert flags["--tp-size"] == "one" and flags["--trust-remote-code"] == "none"
    assert "--tensor-parallel" not in flags and "--max-num-seqs" not in flags


@pytest.mark.parametrize("names", [KIMI, SGLANG], ids=["vllm", "sglang"])
def test_the_full_builds_commands_agree_with_the_rest_of_it(root: Path, names: list[str]) -> None:
    config = read(root, names)
    words = words_of(config.engine.command or "")
    size = next(word for word in ("--max-model-len", "--context-length") if word in words)
    context = int(words[words.index(size) + 1])
    assert gpus_of(config) == config.training.processes == 8
    assert context >= config.hidden_states.max_tokens + 1
    assert all(context > sampling.max_new_tokens for sampling in config.partitions.values())
    at_once = next(word for word in ("--max-num-seqs", "--max-running-requests") if word in words)
    assert int(words[words.index(at_once) + 1]) >= config.partitions["short"].max_in_flight
    assert "{trust_remote_code}" in words and "--trust-remote-code" not in words
    drafter = config.drafter
    assert (drafter.num_attention_heads, drafter.head_dim, drafter.draft_vocab_size) == (64, 128, 32_000)
    shape = config.target.shape
    assert shape and (shape.hidden_size, shape.layers, shape.vocab_size) == (7_168, 61, 163_840)
