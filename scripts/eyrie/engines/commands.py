"""The command lines that serve a target with a drafter, in vLLM's and in SGLang's words.

Both engines read the ids of the layers that feed the drafter from its config.json
(`eagle_config.eagle_aux_hidden_state_layer_ids`); no flag names them, and where the key is missing they take
layers of their own choice. vLLM counts as Hugging Face does; how SGLang counts depends on the target
(`eagle3.checkpoint.engine_layer_ids`), so that a folder may be right for one engine only.

vLLM's commands are run by `scripts/serve_check.py`. SGLang's were never run here: its flags are held to a
recorded list of release 0.5.23 (`tests/data/sglang_flags.json`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

VLLM_METHOD = "eagle3"
SGLANG_ALGORITHM = "EAGLE3"


def vllm_speculation(drafter: Path | str, draft_tokens: int) -> list[str]:
    """The words that make a vLLM server draft so many tokens a step with the drafter in a folder."""
    settings = {"method": VLLM_METHOD, "model": str(drafter), "num_speculative_tokens": draft_tokens}
    return ["--speculative-config", json.dumps(settings)]


def vllm_command(
    model: Path | str, drafter: Path | str, draft_tokens: int, program: Sequence[str] = ("vllm", "serve")
) -> list[str]:
    """The words of a vLLM server with a drafter.

    program: `vllm serve`, or where that does not start `python -m vllm.entrypoints.openai.api_server
    --model`: what the model's name follows.
    """
    return [*program, str(model), *vllm_speculation(drafter, draft_tokens)]


def sglang_command(model: Path | str, drafter: Path | str, draft_tokens: int) -> list[str]:
    """The words of an SGLang server with a drafter.

    Its steps are the tokens that are drafted one after the other; what it calls draft tokens are those of one
    verification, with the target's own before them: one more, where no step branches (topk 1).
    """
    return [
        *("python", "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--speculative-algorithm", SGLANG_ALGORITHM, "--speculative-draft-model-path", str(drafter)),
        *("--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(draft_tokens + 1)),
    ]


def for_a_shell(words: Sequence[str]) -> str:
    """A command to paste into a shell, quoted, a line for each flag with its value."""
    lines = [""]
    for word in words:
        if word.startswith("--"):
            lines.append("")
        lines[-1] = f"{lines[-1]} {shlex.quote(word)}".lstrip()
    return " \\\n  ".join(lines)
