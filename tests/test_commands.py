"""The command lines that serve a drafter are those that the engines take."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyrie.engines.commands import for_a_shell, sglang_command, vllm_command

SGLANG = json.loads((Path(__file__).parent / "data/sglang_flags.json").read_text(encoding="utf-8"))
FLAGS, CHOICES = SGLANG["flags"], SGLANG["choices"]


def flags_of(words: list[str]) -> dict[str, str]:
    at = [place for place, word in enumerate(words) if word.startswith("--")]
    return {words[place]: words[place + 1] for place in at}


def test_vllm_is_told_method_folder_and_number_in_one_flag() -> None:
    words = vllm_command("a/target", Path("a drafter"), 3)
    assert words[:3] == ["vllm", "serve", "a/target"]
    assert json.loads(flags_of(words)["--speculative-config"]) == {
        "method": "eagle3",
        "model": "a drafter",
        "num_speculative_tokens": 3,
    }


def test_where_vllm_serve_does_not_start_its_module_does() -> None:
    program = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert vllm_command("target", "drafter", 2, program)[:5] == [*program, "target"]


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_sglang_gets_flags_that_it_has_with_values_that_it_takes(draft_tokens: int) -> None:
    words = sglang_command("target", "drafter", draft_tokens)
    flags = flags_of(words)
    assert flags.keys() <= FLAGS.keys()
    assert all(flag not in CHOICES or value in CHOICES[flag] for flag, value in flags.items())
    assert "--speculative-algorithm" in CHOICES
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-eagle-topk"] == "1"
    # One verification takes the drafted tokens and the one before them.
    assert int(flags["--speculative-num-draft-tokens"]) == int(flags["--speculative-num-steps"]) + 1
    assert int(flags["--speculative-num-steps"]) == draft_tokens


words_of_any_kind = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"])), min_size=1, max_size=6)


@given(words_of_any_kind)
@example(["a", "--b", "c d"])
def test_a_shell_reads_the_same_words(words: list[str]) -> None:
    # A shell joins lines at a backslash before it divides them; shlex does not.
    assert shlex.split(for_a_shell(words).replace("\\\n", "")) == words


def test_so_does_a_real_shell() -> None:
    words = ["a", "--b", "c d", "it's", "--config", '{"e": "$f"}']
    said = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {for_a_shell(words)}"], capture_output=True, text=True
    )
    assert said.stdout.splitlines() == words
