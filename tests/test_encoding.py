"""What is stored of hidden states: float8 layers, the likeliest tokens, and what both take on the disk."""

from __future__ import annotations

import logging
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.budget import DiskError, bytes_per_token, check_disk
from eyrie.config import HiddenStatesSettings
from eyrie.encoding import FLOAT8, States, decode, encode, from_float8, to_float8
from eyrie.journals import StoreError
from eyrie.store import StateStore
from eyrie.top_tokens import Likeliest

LAYERS, HIDDEN, VOCABULARY = 3, 4, 50
RECIPE = {"target_revision": "r", "layer_ids": [1, 2, 3], "dtype": "float8"}


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def some_states(tokens: int = 6, seed: int = 0) -> States:
    aux = random(tokens, LAYERS * HIDDEN, seed=seed).bfloat16()
    return States(list(range(tokens)), aux, random(tokens, HIDDEN, seed=seed + 1).bfloat16())


def likeliest(draft_ids: list[int], k: int, head: torch.Tensor | None = None) -> Likeliest:
    weight = random(VOCABULARY, HIDDEN, seed=7) if head is None else head
    return Likeliest(lambda: weight, draft_ids, k)


@given(exponents=st.lists(st.floats(-44.0, 38.0), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_float8_is_near_whatever_the_size(exponents: list[float], seed: int) -> None:
    sizes = torch.tensor(exponents, dtype=torch.float64)
    rows = (random(len(sizes), LAYERS, 8, seed=seed).double() * 10 ** sizes[:, None, None]).float()
    aux = rows.clamp(-3e38, 3e38).bfloat16().view(len(sizes), -1)
    packed, scales = to_float8(aux, LAYERS)
    assert packed.dtype == FLOAT8 and scales.shape == (len(sizes), LAYERS)
    back = from_float8(packed, scales).float().view(len(sizes), LAYERS, -1)
    wanted = aux.float().view(len(sizes), LAYERS, -1)
    assert back.isfinite().all()
    # Half of e4m3's last digit is a 16th; numbers far below the largest are stored in equal steps.
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    allowed = torch.maximum(wanted.abs() / 16, largest / 448 / 512) * 1.02 + 1e-37
    assert ((back - wanted).abs() <= allowed).all()


def test_a_row_of_zeros_stays_zero_and_what_is_no_number_is_refused() -> None:
    aux = torch.zeros(2, LAYERS * HIDDEN)
    aux[1, :HIDDEN] = 5.0
    assert torch.equal(from_float8(*to_float8(aux, LAYERS)).float(), aux)
    for wrong in (float("nan"), float("inf")):
        aux[0, 3] = wrong
        with pytest.raises(StoreError, match="not finite"):
            to_float8(aux, LAYERS)


@pytest.mark.parametrize("row", [0, 3])
def test_each_layer_of_each_token_has_its_own_scale(row: int) -> None:
    aux = random(4, LAYERS * HIDDEN, seed=1)
    packed, scales = to_float8(aux, LAYERS)
    wanted = aux.view(4, LAYERS, HIDDEN).abs().amax(dim=-1) / 448
    torch.testing.assert_close(scales, wanted)
    louder = aux.clone()
    louder[row, HIDDEN : 2 * HIDDEN] *= 1000
    again, _ = to_float8(louder, LAYERS)
    assert torch.equal(again.view(torch.uint8), packed.view(torch.uint8))


def test_stored_float8_comes_back_and_is_vouched_for_as_stored(tmp_path: Path) -> None:
    store = StateStore(tmp_path, RECIPE)
    states = some_states()
    with store.writer("a") as writer:
        (ref,) = writer.add([states])
    (loaded,) = store.load([ref])
    assert loaded.aux.dtype == torch.bfloat16 and loaded.last is not None
    assert torch.equal(loaded.aux, from_float8(*to_float8(states.aux, LAYERS)))
    assert torch.equal(loaded.last, states.last)
    assert loaded.digest() == ref.sha256 == encode(states, "float8", LAYERS).digest()


@given(
    ties=st.booleans(),
    k=st.integers(1, 12),
    drafts=st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=10),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_top_tokens_are_those_of_a_sorted_softmax(ties: bool, k: int, drafts: set[int], seed: int) -> None:
    head, last = random(VOCABULARY, HIDDEN, seed=seed), random(5, HIDDEN, seed=seed + 1)
    if ties:  # Of small whole numbers, which have the same sums in any order.
        head, last = head.round(), last.round()
    ids = sorted(drafts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyrie.top_tokens._HEAD_ROWS", 7)
        patch.setattr("eyrie.top_tokens._STATES", 2)
        top = likeliest(ids, k, head).of(last)
    logits = last @ head.t()
    logs = logits[:, ids].double().log_softmax(dim=-1)
    ranked = sorted_rows(logits[:, ids])
    kept = min(k, len(ids))
    assert top.ids.tolist() == [row[:kept] for row in ranked]
    expected = logs.gather(1, top.ids.long())
    torch.testing.assert_close(top.logs.double(), expected, rtol=1e-3, atol=1e-3)
    assert (top.logs.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(
        top.rest.double(), (1 - expected.exp().sum(-1)).clamp(min=0), rtol=0, atol=1e-5
    )
    assert (top.rest == 0).all() or kept < len(ids)
    assert top.choices.tolist() == [row[0] for row in sorted_rows(logits)]


def sorted_rows(logits: torch.Tensor) -> list[list[int]]:
    rows = logits.tolist()
    return [sorted(range(len(row)), key=lambda place, row=row: (-row[place], place)) for row in rows]


def test_the_mass_of_the_others_is_right_where_it_is_next_to_nothing() -> None:
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[3, 0] = 1.0
    top = likeliest([1, 3, 5], 1, head).of(torch.tensor([[25.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(top.rest.item(), 2 * torch.tensor(-25.0).exp().item(), rtol=1e-4, atol=0)
    assert (top.ids.item(), top.choices.item()) == (1, 3)


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8"]),
    k=st.one_of(st.none(), st.integers(1, 12)),
    drafts=st.integers(1, 10),
)
@settings(max_examples=30)
def test_bytes_per_token_are_those_that_are_stored(dtype: Any, k: int | None, drafts: int) -> None:
    shape = HiddenStatesSettings(dtype=dtype, top_tokens=k)
    kind = getattr(torch, shape.computed_dtype)
    states = some_states()
    assert states.last is not None
    states = States(states.token_ids, states.aux.to(kind), states.last.to(kind))
    if k is not None:
        states = likeliest(list(range(drafts)), k).shorten(states)
    encoded = encode(states, dtype, LAYERS)
    stored = sum(tensor.nbytes for tensor in encoded.tensors.values()) + 4 * len(states.token_ids)
    assert bytes_per_token(shape, HIDDEN, LAYERS, drafts) * len(states.token_ids) == stored
    back = decode(encoded)
    assert (back.last is None) == (k is not None) == (back.top is not None)


def test_kimi_k25_takes_two_fifths() -> None:
    plain = HiddenStatesSettings(layer_ids=[2, 30, 58])
    small = HiddenStatesSettings(layer_ids=[2, 30, 58], dtype="float8", top_tokens=128)
    # Four bytes are the token's id.
    assert bytes_per_token(plain, 7168) == 57_344 + 4
    assert bytes_per_token(small, 7168, 3, 32_000) == 22_296 <= 0.40 * 57_344


def test_what_the_disk_cannot_hold_is_never_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("test")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("eyrie.budget.shutil.disk_usage", lambda _: usage(1_000_000))
    check_disk(tmp_path / "store", 900, 1000, 100_000, "tokens of chat", log)
    with pytest.raises(
        DiskError, match=r"901 tokens of chat take 901.0 kB .1,000 bytes.*has 1.0 MB free"
    ) as told:
        check_disk(tmp_path / "store", 901, 1000, 100_000, "tokens of chat", log)
    assert "at most 900.0 kB" in str(told.value) and "disk_reserve" in str(told.value)
    check_disk(tmp_path, 0, 1000, 2_000_000, "tokens of chat", log)
