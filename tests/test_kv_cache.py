"""The cache with room to grow holds what the library's holds, whatever is done to both."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig

from eyrie.kv_cache import RoomyLayer, roomy_cache

_ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 90)),
    st.tuples(st.just("crop"), st.integers(1, 40)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 3)),
    st.tuples(st.just("reset"), st.just(0)),
)


def _apply(cache: DynamicCache, action: str, amount: int, seed: int, batch: int) -> None:
    length = cache.get_seq_length()
    if action == "add":
        generator = torch.Generator().manual_seed(seed)
        for layer in range(2):
            keys, values = torch.randn(2, batch, 3, amount, 4, generator=generator)
            got = cache.update(keys, values, layer)
            assert all(torch.equal(a, b) for a, b in zip(got, _held(cache, layer), strict=True))
    elif action == "crop":
        cache.crop(-min(amount, length - 1))
    elif action == "repeat":
        cache.batch_repeat_interleave(amount)
    elif action == "select":
        cache.batch_select_indices(torch.arange(batch)[amount % batch :])
    else:
        cache.reset()


def _held(cache: DynamicCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    assert keys is not None and values is not None
    return keys, values


@settings(max_examples=60)
@given(st.lists(_ACTIONS, min_size=1, max_size=12))
def test_it_holds_what_the_library_would(actions: list[tuple[str, int]]) -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=12, num_attention_heads=3)
    ours, theirs = roomy_cache(config), DynamicCache(config=config)
    batch = 2
    for seed, (action, amount) in enumerate(actions):
        if action != "add" and not ours.get_seq_length():
            continue
        for cache in (ours, theirs):
            _apply(cache, action, amount, seed, batch)
        batch = {"repeat": batch * amount, "select": batch - amount % batch, "reset": 2}.get(action, batch)
        assert ours.get_seq_length() == theirs.get_seq_length()
        if ours.get_seq_length():
            for layer in range(2):
                for a, b in zip(_held(ours, layer), _held(theirs, layer), strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_token_is_written_without_moving_the_ones_before() -> None:
    cache = roomy_cache(LlamaConfig(num_hidden_layers=1, hidden_size=12, num_attention_heads=3))
    layer = cache.layers[0]
    assert isinstance(layer, RoomyLayer)
    cache.update(*torch.randn(2, 1, 3, 10, 4), 0)
    before = _held(cache, 0)[0].data_ptr()
    for _ in range(20):
        cache.update(*torch.randn(2, 1, 3, 1, 4), 0)
    assert _held(cache, 0)[0].data_ptr() == before
    assert cache.get_seq_length() == 30
