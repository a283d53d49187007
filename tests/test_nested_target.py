"""Targets that nest their language model, as Kimi-K2.5 does: configuration and tensors of other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from eyrie.config import ConfigError, EngineSettings, HiddenStatesSettings
from eyrie.engines.checks import check_against_reference
from eyrie.engines.in_process import InProcessEngine
from eyrie.records import sha256_file
from eyrie.states import command_values, default_layer_ids, served_layer_ids
from eyrie.target import Target, read_text_config
from eyrie.target_weights import TargetWeights

LAYERS, HIDDEN, VOCABULARY = 8, 32, 100


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes images, too; on disk its tensors have Kimi-K2.5's names."""
    folder = tmp_path_factory.mktemp("nested")
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1)
    )
    model.save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> TargetWeights:
    return TargetWeights(folder, {file.name: sha256_file(file) for file in folder.glob("*.safetensors")})


def test_it_runs_in_process_and_its_states_are_its_own(nested: Path) -> None:
    target = Target(nested, "float32")
    assert (target.layers, target.hidden_size, target.layer_ids) == (LAYERS, HIDDEN, [2, 4, 5])
    [[states]] = InProcessEngine(target, EngineSettings()).capture([[1, 5, 7, 9, 33]], "float32")
    assert check_against_reference(target, states) < 1e-4
    output = target.model(input_ids=torch.tensor([[1, 5, 7, 9, 33]]), output_hidden_states=True)
    torch.testing.assert_close(states.aux[:, :HIDDEN], output.hidden_states[2][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(states.last), output.logits[0], rtol=1e-4, atol=1e-4)


def test_its_embedding_head_and_norm_are_found_by_their_names(nested: Path) -> None:
    target, weights = Target(nested, "float32"), weights_of(nested)
    assert weights.embedding().equal(target.embedding_weight())
    assert weights.head().equal(target.head_weight())
    assert weights.head(tied=False).equal(target.head_weight())
    assert weights.final_norm().equal(target.final_norm().weight)
    layer = weights.get("layers.7.mlp.up_proj.weight")
    assert layer is not None and layer.equal(target.decoder().layers[7].mlp.up_proj.weight)


def test_a_servers_command_gets_the_nested_models_layers(nested: Path, tmp_path: Path) -> None:
    values = command_values(HiddenStatesSettings(), nested, tmp_path)
    assert json.loads(values["layer_ids"]) == [0, 2, 4, 5, LAYERS]
    assert served_layer_ids([0, 4, 6], 8) == [0, 4, 6, 8]
    with pytest.raises(ConfigError, match=r"config.json with num_hidden_layers"):
        command_values(HiddenStatesSettings(), tmp_path, tmp_path)


def kimi_files(folder: Path) -> dict[str, torch.Tensor]:
    """Two files with the names that Kimi-K2.5's have, and its configuration's nesting."""
    draw = torch.Generator().manual_seed(1)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    tensors = {
        "language_model.model.embed_tokens.weight": tensor(VOCABULARY, HIDDEN),
        "language_model.model.layers.0.input_layernorm.weight": tensor(HIDDEN),
        "language_model.model.layers.2.shared_head.norm.weight": tensor(HIDDEN),
        "language_model.model.layers.2.embed_tokens.weight": tensor(VOCABULARY, HIDDEN),
        "language_model.model.norm.weight": tensor(HIDDEN),
        "language_model.lm_head.weight": tensor(VOCABULARY, HIDDEN),
        "vision_tower.encoder.final_layernorm.weight": tensor(8),
        "mm_projector.proj.0.weight": tensor(8, 8),
    }
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:4]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[4:]}, folder / "model-2.safetensors")
    text: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 61,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_kimis_names(tmp_path: Path) -> None:
    tensors = kimi_files(tmp_path)
    weights = weights_of(tmp_path)
    assert weights.embedding().equal(tensors["language_model.model.embed_tokens.weight"])
    assert weights.head(tied=False).equal(tensors["language_model.lm_head.weight"])
    assert weights.final_norm().equal(tensors["language_model.model.norm.weight"])
    assert weights.get("layers.0.input_layernorm.weight") is not None
    config = read_text_config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (HIDDEN, 61, VOCABULARY)
    values = command_values(HiddenStatesSettings(), tmp_path, tmp_path)
    assert json.loads(values["layer_ids"]) == [0, 2, 30, 58, 61]


def test_a_folder_without_a_head_or_with_two_embeddings_is_refused(tmp_path: Path) -> None:
    table = torch.zeros(4, 2)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    assert weights_of(tmp_path).head().equal(table)
    with pytest.raises(ConfigError, match=r"one lm_head.weight, saw none"):
        weights_of(tmp_path).head(tied=False)
    with pytest.raises(ConfigError, match=r"one norm.weight, saw none"):
        weights_of(tmp_path).final_norm()
    save_file({"other.embed_tokens.weight": table}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"one embed_tokens.weight, saw .*model.embed_tokens.weight"):
        weights_of(tmp_path)


@pytest.mark.parametrize(("layers", "ids"), [(7, [2, 3, 4]), (30, [2, 15, 27]), (61, [2, 30, 58])])
def test_the_default_layers(layers: int, ids: list[int]) -> None:
    assert default_layer_ids(layers) == ids


@pytest.mark.parametrize("layers", range(1, 7))
def test_too_few_layers_for_the_default_ones_are_refused_in_words(layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"the target has {layers} layers.*\n.*three different layers"):
        default_layer_ids(layers)
