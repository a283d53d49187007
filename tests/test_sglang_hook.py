"""The hooks for SGLang on plain torch modules that are called as Llama's and Kimi's are. No SGLang here."""

from __future__ import annotations

import fnmatch
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eyrie.engines import sglang_hook
from eyrie.engines.sglang_hook import file_name, hook_specs

HIDDEN, LAYERS = 16, 6
PROMPTS = [[5, 9, 3], [7], [2, 4, 6, 8, 1]]


class Norm(nn.Module):
    """Adds the residual first, where there is one, and then gives out both, as SGLang's does."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return nn.functional.rms_norm(x, (HIDDEN,))
        residual += x
        return nn.functional.rms_norm(residual, (HIDDEN,)), residual


class Layer(nn.Module):
    """A layer that looks at nothing but its own token and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        batch: object,
        residual: torch.Tensor | None,
        *_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            hidden, residual = self.norm(hidden), hidden.clone()
        else:
            hidden, residual = self.norm(hidden, residual)
        return self.linear(hidden) + positions[:, None] / 10, residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(20, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, *more: Any) -> list[torch.Tensor]:
        """The stream before each layer, and the last state after the norm."""
        hidden, residual, streams = self.embed_tokens(ids), None, []
        for layer in self.layers:
            streams.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(positions, hidden, None, residual, *more)
        hidden, _ = self.norm(hidden, residual)
        return [*streams, hidden]


class Llama(nn.Module):
    decoder = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        return self.model(ids, positions)


class Kimi(nn.Module):
    """The language model lies deeper, beside one for images whose layers have like names."""

    decoder = "language_model.model"

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Decoder()
        self.language_model = Llama()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        return self.language_model.model(ids, positions, "zero allocator")


def attach(model: nn.Module, specs: list[dict[str, Any]]) -> None:
    """As SGLang reads --forward-hooks."""
    for spec in specs:
        module_name, _, name = spec["hook_factory"].partition(":")
        hook = getattr(importlib.import_module(module_name), name)(spec["config"])
        modules = [
            module
            for path, module in model.named_modules()
            if any(fnmatch.fnmatch(path, pattern) for pattern in spec["target_modules"])
        ]
        assert len(modules) == 1
        modules[0].register_forward_hook(hook)


def prefill(model: nn.Module, prompts: list[list[int]]) -> list[torch.Tensor]:
    ids = torch.tensor([one for prompt in prompts for one in prompt])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    with torch.inference_mode():
        return model(ids, positions)


@pytest.mark.parametrize("kind", [Llama, Kimi])
@pytest.mark.parametrize("layer_ids", [[1, 3, 5], [0, 2, 4]])
def test_each_prompt_of_a_pass_has_its_states_in_a_file(
    tmp_path: Path, kind: type[Llama | Kimi], layer_ids: list[int]
) -> None:
    torch.manual_seed(0)
    model = kind()
    attach(model, hook_specs(tmp_path, layer_ids, kind.decoder))
    prefill(model, PROMPTS)
    # A pass of generation: one token of each of two requests, none of them a prompt.
    with torch.inference_mode():
        model(torch.tensor([3, 4]), torch.tensor([3, 5]))
    sglang_hook._PASSES.pop(str(tmp_path)).finish()
    assert {path.name for path in tmp_path.iterdir()} == {file_name(prompt) for prompt in PROMPTS}
    for prompt in PROMPTS:
        found = load_file(tmp_path / file_name(prompt))
        alone = prefill(kind_without_hooks(model, kind), [prompt])
        expected = torch.stack([*(alone[layer] for layer in layer_ids), alone[-1]], dim=1)
        assert found["token_ids"].tolist() == prompt
        torch.testing.assert_close(found["hidden_states"], expected)


def kind_without_hooks(model: nn.Module, kind: type[Llama | Kimi]) -> nn.Module:
    bare = kind()
    bare.load_state_dict(model.state_dict())
    return bare


def test_layers_that_are_called_otherwise_are_named(tmp_path: Path) -> None:
    model = Llama()
    specs = [spec for spec in hook_specs(tmp_path, [1, 3], "model") if spec["config"]["place"] != "2"]
    attach(model, specs)
    with pytest.raises(RuntimeError, match=r"saw states of layers \[1\] of \[1, 3\]"):
        prefill(model, PROMPTS)
    sglang_hook._PASSES.pop(str(tmp_path)).finish()
