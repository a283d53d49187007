"""Twelve faults that engines pass over in silence, each planted alone: the files' check names it.

The twelfth, EAGLE for EAGLE3, is in no file: tests/test_serve_check.py plants it in the server's command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie.eagle3.checkpoint import save_checkpoint
from eyrie.eagle3.fingerprint import digest
from eyrie.eagle3.linting import LintTarget, lint
from eyrie.records import read_json, write_json
from tiny_eagle3 import HIDDEN, LAYER_IDS, VOCABULARY, random_drafter

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
LONGEST = 2500


@pytest.fixture
def target() -> LintTarget:
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(4))
    return LintTarget(HIDDEN, VOCABULARY, 5, random_drafter().embedding, head)


@pytest.fixture
def good(tmp_path: Path, target: LintTarget) -> Path:
    drafter = random_drafter(max_position_embeddings=4096)
    with torch.no_grad():
        drafter.lm_head.weight.add_(target.head[drafter.t2d])
    save_checkpoint(tmp_path / "good", drafter, {"counts": {}})
    return tmp_path / "good"


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t))


def other_layers(config: Config) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]


def other_order(config: Config) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 1, 3]


def swapped(weight: torch.Tensor) -> torch.Tensor:
    first, second, third = weight.chunk(3, dim=1)
    return torch.cat([second, first, third], dim=1)


def noise(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()


Plant = Callable[[Tensors, Config], object]
IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, tuple[Plant, str]] = {
    "missing d2t": (lambda t, c: t.pop("d2t"), r"^d2t: saw nothing"),
    "absolute d2t": (lambda t, c: t.update(d2t=absolute(t["d2t"])), r"^d2t: saw the target's ids; .*offsets"),
    "missing lm_head": (lambda t, c: t.pop("lm_head.weight"), r"^lm_head.weight: saw nothing"),
    "random embedding": (lambda t, c: noise(t), r"^embed_tokens.weight: saw another embedding"),
    "wrong layer ids": (lambda t, c: other_layers(c), rf"{IDS}: saw \[1, 2, 4\]; expected \[1, 2, 3\]"),
    "layer ids in another order": (lambda t, c: other_order(c), rf"{IDS}: saw \[2, 1, 3\]; .*rise"),
    "norm_output": (lambda t, c: c.update(norm_output=True), r"norm_output: saw True; expected no such key"),
    "2,048 positions": (
        lambda t, c: c.update(max_position_embeddings=2048),
        rf"max_position_embeddings: saw 2048; expected at least {LONGEST}",
    ),
    "absent draft_vocab_size": (
        lambda t, c: c.pop("draft_vocab_size"),
        r"draft_vocab_size: saw nothing; expected the number",
    ),
    "two layers": (lambda t, c: c.update(num_hidden_layers=2), r"num_hidden_layers: saw 2; expected 1"),
    "swapped fc blocks": (
        lambda t, c: t.update({"fc.weight": swapped(t["fc.weight"])}),
        r"^fc.weight: saw the layers' blocks of columns in another order; .*\[1, 2, 3\]",
    ),
    "other numbers": (
        lambda t, c: t.update({"norm.weight": t["norm.weight"] * 2}),
        r"^norm.weight: saw other numbers; expected what was trained",
    ),
}


def test_what_training_wrote_has_no_fault(good: Path, target: LintTarget) -> None:
    assert read_json(good / "training.json")["written"]["layer_ids"] == LAYER_IDS
    assert lint(good, target, LONGEST) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(good: Path, target: LintTarget, fault: str) -> None:
    plant, words = FAULTS[fault]
    tensors, config = load_file(good / "model.safetensors"), read_json(good / "config.json")
    plant(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, good / "model.safetensors")
    write_json(good / "config.json", config)
    found = lint(good, target, LONGEST)
    assert any(re.search(words, one.in_words(), re.MULTILINE) for one in found), found
    # One fault is named once, but for the maps and sizes that hang together.
    assert len(found) == (3 if fault == "absent draft_vocab_size" else 1)


def test_another_target_of_the_same_shape_is_named(good: Path, target: LintTarget) -> None:
    other = LintTarget(HIDDEN, VOCABULARY, 5, target.embedding.flip(0), target.head)
    (fault,) = lint(good, other, LONGEST)
    assert fault.where == "the target" and "trained for" in fault.expected


def test_a_checkpoint_of_another_maker_is_held_to_nothing_that_it_does_not_tell(
    good: Path, target: LintTarget
) -> None:
    (good / "training.json").unlink()
    tensors = load_file(good / "model.safetensors")
    save_file(tensors | {"fc.weight": swapped(tensors["fc.weight"]).contiguous()}, good / "model.safetensors")
    assert lint(good, target, LONGEST) == []


def test_a_digest_is_of_bytes_dtype_and_shape() -> None:
    weight = torch.arange(6.0)
    assert digest(weight.view(2, 3)) == digest(weight.clone().view(2, 3))
    assert len({digest(one) for one in (weight, weight.view(2, 3), weight.bfloat16(), weight + 1)}) == 4
    assert digest(weight.view(2, 3).t()) == digest(weight.view(2, 3).t().contiguous())
