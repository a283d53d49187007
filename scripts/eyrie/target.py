"""The target model in process: its forward pass, the captured layers, and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from eyrie.kv_cache import roomy_cache
from eyrie.skinny import SKINNY_ROWS, use_skinny_products

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_layer_ids(layers: int) -> list[int]:
    """The layers EAGLE-3 taps by default, [2, n//2, n-3], as indices into Hugging Face's `hidden_states`."""
    return [2, layers // 2, layers - 3]


def text_config(config: Any) -> Any:
    """The language model's part of a configuration; multimodal targets nest it under `text_config`."""
    return getattr(config, "text_config", None) or config


def read_text_config(path: Path) -> Any:
    """The language model's configuration of a target folder, read without its weights."""
    return text_config(AutoConfig.from_pretrained(path))


def read_eos_ids(path: Path) -> list[int]:
    """The token ids that end an answer, read from a target folder without its weights, sorted."""
    try:
        settings = GenerationConfig.from_pretrained(path)
    except OSError:  # no generation_config.json; transformers then derives it from the model's, as here
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    return _sorted_ids(settings.eos_token_id)


def _sorted_ids(eos: int | list[int] | None) -> list[int]:
    return sorted([eos] if isinstance(eos, int) else eos or [])


@dataclass(frozen=True)
class TargetStates:
    """What one forward pass leaves: aux [B, S, layers * H] and last [B, S, H] (after the final norm)."""

    aux: torch.Tensor
    last: torch.Tensor


class Target:
    """A causal language model from a local folder, with hooks on the layers to capture.

    layer_ids are indices into Hugging Face's `hidden_states`: id i is the residual stream that enters layer
    i, which is what layer i - 1 put out. The last index (the number of layers) is after the final norm
    there and is always returned as `last`, so it can't be among them.
    """

    def __init__(self, path: Path, dtype: str, layer_ids: Sequence[int] | None = None) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).eval()
        self.model.requires_grad_(False)
        self.config = text_config(self.model.config)
        self.layers = self.config.num_hidden_layers
        self.hidden_size = self.config.hidden_size
        self.layer_ids = list(layer_ids or default_layer_ids(self.layers))
        if any(not 0 <= layer < self.layers for layer in self.layer_ids):
            raise ValueError(
                f"layer ids {self.layer_ids} for a target of {self.layers} layers: expected ids from 0 to "
                f"{self.layers - 1} (Hugging Face's hidden_states numbering). Change hidden_states.layer_ids."
            )
        self._captured: dict[int, torch.Tensor] = {}
        decoder = self.model.get_decoder()
        for layer in self.layer_ids:
            decoder.layers[layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)
        if dtype == "float32":
            use_skinny_products(self.model)
            if self.model.config._attn_implementation == "sdpa":
                self.model.set_attn_implementation(_SKINNY_ATTENTION)

    def _capture(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache; `cache.crop(-n)` drops the last n positions."""
        return roomy_cache(self.config)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: DynamicCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> TargetStates:
        """Run tokens [B, S] after what the cache holds.

        attention_mask is [B, cached + S], 1 for tokens and 0 for padding on the left; None means no padding.
        """
        output = self.model.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        )
        aux = torch.cat([self._captured[layer] for layer in self.layer_ids], dim=-1)
        self._captured.clear()
        return TargetStates(aux, output.last_hidden_state)

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """The head's logits [..., vocabulary] of states [..., H].

        The rows are made one contiguous matrix first: a strided batch would have the head's weight copied
        once a row.
        """
        rows = last.reshape(-1, last.shape[-1]).contiguous()
        return self.model.get_output_embeddings()(rows).view(*last.shape[:-1], -1)

    def embedding_weight(self) -> torch.Tensor:
        """The input embedding [vocabulary, H]."""
        return self.model.get_input_embeddings().weight

    def head_weight(self) -> torch.Tensor:
        """The output head [vocabulary, H] (the embedding itself where they are tied)."""
        return self.model.get_output_embeddings().weight

    def eos_ids(self) -> list[int]:
        """The token ids that end an answer, from the generation config, sorted."""
        return _sorted_ids(self.model.generation_config.eos_token_id)


def _skinny_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one sequence's few queries [1, heads, Q, d] over keys and values [1, kv_heads, K, d].

    Where there is a mask, the library copies keys and values for each head of a group and takes a slow path.
    Here a group's heads are so many more queries of its key head. Everything else is left to it.
    """
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    alone = batch == 1 and queries <= SKINNY_ROWS and query.device.type == "cpu"
    if not alone or attention_mask is None or scaling is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows = query.reshape(batch, kv_heads, -1, size) * scaling
    scores = (rows @ key.transpose(-1, -2)).view(batch, heads, queries, -1)
    scores.masked_fill_(~attention_mask, -torch.inf)
    mixed = scores.softmax(dim=-1).view(batch, kv_heads, -1, key.shape[2]) @ value
    return mixed.view(batch, heads, queries, size).transpose(1, 2), None


_SKINNY_ATTENTION = "eyrie_skinny"
AttentionInterface.register(_SKINNY_ATTENTION, _skinny_attention)
AttentionMaskInterface.register(_SKINNY_ATTENTION, sdpa_mask)
