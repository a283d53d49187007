"""Each fault planted in a good checkpoint is named, alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import lint_checkpoint
from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.eagle3.linting import LintTarget, lint, looks_random
from eyrie.records import read_json, write_json
from tiny_eagle3 import HIDDEN, VOCABULARY, random_drafter

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> LintTarget:
    generator = torch.Generator().manual_seed(0)
    embedding = random_drafter().embedding
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return LintTarget(HIDDEN, VOCABULARY, 5, embedding, head)


@pytest.fixture
def good(tmp_path: Path, target: LintTarget) -> Path:
    drafter = random_drafter()
    with torch.no_grad():
        noise = torch.randn(drafter.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        drafter.lm_head.weight.copy_(target.head[drafter.t2d] + noise)
    save_checkpoint(tmp_path / "good", drafter, {})
    return tmp_path / "good"


def test_a_good_checkpoint_has_no_fault(good: Path, target: LintTarget) -> None:
    assert lint(good, target, 256) == []


def remove(name: str) -> Callable[[Tensors, Config], object]:
    return lambda tensors, config: tensors.pop(name, None) is None and config.pop(name)


def set_key(**changes: Any) -> Callable[[Tensors, Config], object]:
    return lambda tensors, config: config.update(changes)


def set_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors, Config], object]:
    return lambda tensors, config: tensors.__setitem__(name, change(tensors[name]).contiguous())


def swap(d2t: torch.Tensor) -> torch.Tensor:
    """The same tokens in another order."""
    ids = d2t + torch.arange(len(d2t))
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(len(d2t))


def one_more(t2d: torch.Tensor) -> torch.Tensor:
    t2d[(~t2d).nonzero()[0]] = True
    return t2d


def noise(head: torch.Tensor) -> torch.Tensor:
    return torch.randn(head.shape, generator=torch.Generator().manual_seed(8)).to(head.dtype)


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    weight[0] = float("nan")
    return weight


FAULTS: dict[str, tuple[Callable[[Tensors, Config], object], set[str], str]] = {
    "no head": (remove("lm_head.weight"), {"lm_head.weight"}, "random head"),
    "no d2t": (remove("d2t"), {"d2t"}, "draft id i for target id i"),
    "no t2d": (remove("t2d"), {"t2d"}, "skips"),
    "no norm": (remove("norm.weight"), {"norm.weight"}, "random"),
    "odd tensor": (
        lambda tensors, config: tensors.update(extra=torch.ones(2).bfloat16()),
        {"extra"},
        "leave it out",
    ),
    "narrow fc": (set_tensor("fc.weight", lambda w: w[:, 1:]), {"fc.weight"}, "shapes"),
    "float32": (set_tensor("fc.weight", lambda w: w.float()), {"fc.weight"}, "cast"),
    "int32 map": (set_tensor("d2t", lambda d: d.int()), {"d2t"}, "cast"),
    "falling ids": (set_tensor("d2t", swap), {"d2t", "d2t and t2d"}, "almost nothing"),
    "zero map": (set_tensor("d2t", torch.zeros_like), {"d2t and t2d"}, "almost nothing"),
    "one more mark": (set_tensor("t2d", one_more), {"d2t and t2d"}, "almost nothing"),
    "two layers": (set_key(num_hidden_layers=2), {"config.json: num_hidden_layers"}, "one layer"),
    "norm_output": (set_key(norm_output=True), {"config.json: norm_output"}, "SpecForge"),
    "no draft size": (
        remove("draft_vocab_size"),
        {"config.json: draft_vocab_size", "d2t", "lm_head.weight"},
        "crash without the key",
    ),
    "tied": (set_key(tie_word_embeddings=True), {"config.json: tie_word_embeddings"}, "embedding for a head"),
    "other class": (set_key(architectures=["LlamaForCausalLM"]), {"config.json: architectures"}, "refuse"),
    "short": (set_key(max_position_embeddings=255), {"config.json: max_position_embeddings"}, "longer"),
    "no layer ids": (
        set_key(eagle_config={}),
        {"config.json: eagle_config.eagle_aux_hidden_state_layer_ids"},
        r"layers \[2, 2, 2\] without a word",
    ),
    "ids beyond": (
        set_key(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        {"config.json: eagle_config.eagle_aux_hidden_state_layer_ids"},
        "fewer layers",
    ),
    "random head": (set_tensor("lm_head.weight", noise), {"lm_head.weight"}, "nothing is accepted"),
    "nan": (set_tensor("norm.weight", with_nan), {"norm.weight"}, "nothing is accepted"),
    "zeros": (set_tensor("fc.weight", torch.zeros_like), {"fc.weight"}, "nothing is accepted"),
    "other embedding": (
        lambda tensors, config: tensors.update(
            {"embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN).bfloat16()}
        ),
        {"embed_tokens.weight"},
        "replace it by the target's",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(good: Path, target: LintTarget, fault: str) -> None:
    plant, named, words = FAULTS[fault]
    tensors, config = load_file(good / "model.safetensors"), read_json(good / "config.json")
    plant(tensors, config)
    save_file(tensors, good / "model.safetensors")
    write_json(good / "config.json", config)
    found = lint(good, target, 256)
    assert {item.where for item in found} == named
    assert re.search(words, "\n".join(item.in_words() for item in found))


def test_heads_that_learnt_something_are_not_taken_for_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(400, 64, generator=generator)
    random = torch.randn(400, 64, generator=generator)
    assert looks_random(random, target) and looks_random(torch.rand(400, 64) - 0.5, target)
    assert not looks_random(target + 5 * random, target)
    # From scratch: no row like the target's, but a direction that all rows share.
    assert not looks_random(random + 0.5, target)


def test_the_command_exits_with_1_on_a_fault(
    good: Path,
    tmp_path: Path,
    target: LintTarget,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )
    model.lm_head.weight.data.copy_(target.head)
    model.model.embed_tokens.weight.data.copy_(target.embedding)
    model.save_pretrained(tmp_path / "target")
    monkeypatch.setattr("sys.argv", ["lint_checkpoint.py", str(good), "--target", str(tmp_path / "target")])
    lint_checkpoint.main()
    assert "no fault found" in capsys.readouterr().out
    write_json(good / "config.json", read_json(good / "config.json") | {"norm_output": False})
    with pytest.raises(SystemExit, match="1"):
        lint_checkpoint.main()
    assert "SGLang would" in capsys.readouterr().out
