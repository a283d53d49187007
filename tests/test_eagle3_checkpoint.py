"""The checkpoint's files: what engines read, and that a damaged one is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eyrie.config import ConfigError
from eyrie.eagle3.checkpoint import (
    AS_IS_SINCE,
    config_json,
    engine_layer_ids,
    load_drafter,
    save_checkpoint,
)
from eyrie.eagle3.model import Drafter
from eyrie.records import RecordError, read_json, write_json
from tiny_eagle3 import HIDDEN, LAYER_IDS, VOCABULARY, random_drafter, tiny_config

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Drafter]:
    drafter = random_drafter()
    save_checkpoint(tmp_path / "checkpoint", drafter, {"counts": {}})
    return tmp_path / "checkpoint", drafter


def test_round_trip_keeps_all_but_the_last_bits(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    loaded = load_drafter(folder, drafter.embedding, torch.float32)
    assert loaded.config == drafter.config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    for (name, own), (_, other) in zip(
        drafter.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        expected = own.bfloat16().float() if own.is_floating_point() else own
        assert torch.equal(other, expected) and other.dtype == own.dtype, name
    assert load_drafter(folder, drafter.embedding, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_tensors_are_those_of_the_classic_layout(saved: tuple[Path, Drafter]) -> None:
    tensors = load_file(saved[0] / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (40, HIDDEN),
        "d2t": (40,),
        "t2d": (VOCABULARY,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


def test_configuration_says_what_engines_would_else_guess(saved: tuple[Path, Drafter]) -> None:
    config = read_json(saved[0] / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 40 and config["vocab_size"] == VOCABULARY
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
    }
    # The two engines read opposite things into it.
    assert "norm_output" not in config
    read = LlamaConfig.from_pretrained(saved[0])
    assert read.rope_parameters["rope_theta"] == 10000.0 and read.head_dim == 8


@given(ids=st.sets(st.integers(0, VOCABULARY - 1), min_size=1))
def test_maps_agree_for_every_vocabulary(ids: set[int]) -> None:
    token_ids = sorted(ids)
    drafter = Drafter(tiny_config(len(token_ids)), token_ids, torch.zeros(VOCABULARY, HIDDEN))
    assert drafter.draft_token_ids().tolist() == token_ids
    assert drafter.t2d.nonzero()[:, 0].tolist() == token_ids
    assert drafter.to_target_ids(torch.arange(len(token_ids))).tolist() == token_ids


def drop(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def add(tensors: Tensors) -> None:
    tensors["extra.weight"] = torch.zeros(VOCABULARY, HIDDEN)


def other_embedding(tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(VOCABULARY, HIDDEN)


def narrow(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


def zero_map(tensors: Tensors) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def clear_flag(tensors: Tensors) -> None:
    tensors["t2d"][tensors["t2d"].nonzero()[0]] = False


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop, r"lm_head.weight: expected \[40, 32\], saw nothing"),
        (add, r"extra.weight: expected nothing, saw \[96, 32\]"),
        (other_embedding, "embed_tokens.weight is not the target's embedding"),
        (narrow, r"fc.weight: expected \[32, 96\], saw \[32, 95\]"),
        (zero_map, "d2t and t2d disagree"),
        (clear_flag, "d2t and t2d disagree: t2d marks 39 tokens and d2t leads to 40"),
    ],
)
def test_damage_is_refused(
    saved: tuple[Path, Drafter], damage: Callable[[Tensors], None], words: str
) -> None:
    folder, drafter = saved
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RecordError, match=words):
        load_drafter(folder, drafter.embedding, torch.float32)


def test_drafter_with_disagreeing_maps_is_not_saved(tmp_path: Path) -> None:
    drafter = random_drafter()
    drafter.d2t[3] += 1
    with pytest.raises(RecordError, match="d2t and t2d disagree"):
        save_checkpoint(tmp_path, drafter, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_short_and_a_foreign_embedding_are_refused(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    with pytest.raises(RecordError, match=r"for a target embedding of shape \[96, 32\]"):
        load_drafter(folder, torch.zeros(VOCABULARY + 1, HIDDEN), torch.float32)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RecordError, match=r"model.safetensors cannot be read"):
        load_drafter(folder, drafter.embedding, torch.float32)


@pytest.mark.parametrize("key", ["draft_vocab_size", "eagle_config", "architectures"])
def test_incomplete_configuration_is_refused(saved: tuple[Path, Drafter], key: str) -> None:
    folder, drafter = saved
    config = read_json(folder / "config.json")
    del config[key]
    write_json(folder / "config.json", config)
    with pytest.raises(RecordError, match=f"expected the key '{key}'"):
        load_drafter(folder, drafter.embedding, torch.float32)


def test_layer_ids_are_translated_for_sglang_alone() -> None:
    assert engine_layer_ids("vllm", "llama", [2, 15, 27]) == [2, 15, 27]
    assert engine_layer_ids("sglang", "llama", [2, 15, 27]) == [1, 14, 26]
    assert engine_layer_ids("sglang", "qwen3", [2, 18, 33]) == [1, 17, 32]
    assert engine_layer_ids("sglang", "gpt_oss", [2, 18, 33], 36) == [1, 17, 32]
    assert engine_layer_ids("sglang", "kimi_k2", [2, 30, 58]) == [2, 30, 58]


def test_sglang_of_before_its_change_counts_kimis_layers_like_all_others() -> None:
    before, after = AS_IS_SINCE - timedelta(days=1), AS_IS_SINCE
    assert engine_layer_ids("sglang", "kimi_k25", [2, 30, 58], 61, before) == [1, 29, 57]
    assert engine_layer_ids("sglang", "kimi_k25", [2, 30, 58], 61, after) == [2, 30, 58]
    with pytest.raises(ConfigError, match="can't tell"):
        engine_layer_ids("sglang", "kimi_k25", [1, 30, 58], 61, after)


@pytest.mark.parametrize(
    ("engine", "model_type", "ids", "words"),
    [
        ("sglang", "gpt_oss", [24, 30, 36], "never captures 36"),
        ("sglang", "llama", [0, 18, 33], "can't capture 0"),
        ("vllm", "llama", [2, 18, 40], "from 0 to the target's 36 layers"),
    ],
)
def test_ids_that_an_engine_takes_for_others_are_refused(
    engine: str, model_type: str, ids: list[int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_layer_ids(engine, model_type, ids, 36)


def speculators_config() -> dict[str, Any]:
    config = config_json(tiny_config())
    layer = {name: config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    layer |= {
        name: config[name] for name in ("num_key_value_heads", "vocab_size", "rms_norm_eps", "head_dim")
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
        "norm_before_residual": False,
        "transformer_layer_config": {
            **layer,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def test_speculators_layout_is_read(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"embed_tokens.weight": drafter.embedding}, folder / "model.safetensors")
    write_json(folder / "config.json", speculators_config())
    loaded = load_drafter(folder, drafter.embedding, torch.float32)
    assert loaded.config.rope_theta == 10000.0 and loaded.config.layer_ids == tuple(LAYER_IDS)
    assert torch.equal(
        loaded.midlayer.self_attn.q_proj.weight, tensors["midlayer.self_attn.q_proj.weight"].float()
    )


def test_specforges_layout_is_read(saved: tuple[Path, Drafter]) -> None:
    folder, drafter = saved
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": drafter.embedding.bfloat16()}, folder / "model.safetensors")
    config = read_json(folder / "config.json")
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    write_json(folder / "config.json", config)
    assert load_drafter(folder, drafter.embedding, torch.float32).config == drafter.config


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_fc": True},
        {"norm_output": True},
        {"norm_before_residual": True},
        {"num_hidden_layers": 2},
        {"rope_scaling": {"rope_type": "yarn", "factor": 64}},
    ],
)
def test_drafters_of_another_make_are_refused(saved: tuple[Path, Drafter], changes: dict[str, Any]) -> None:
    folder, drafter = saved
    write_json(folder / "config.json", read_json(folder / "config.json") | changes)
    with pytest.raises(RecordError, match=r"another make|of kind 'yarn'"):
        load_drafter(folder, drafter.embedding, torch.float32)
