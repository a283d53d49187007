"""Faults planted in captured hidden states: each must stop the job, with its name in words."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyrie.config import EngineSettings
from eyrie.eagle3.batches import candidate_places
from eyrie.eagle3.samples import Row, StoredSamples
from eyrie.engines.checks import TWICE, check_against_reference, checked_states, reference_of
from eyrie.engines.in_process import InProcessEngine
from eyrie.engines.replies import Failure
from eyrie.engines.state_files import StateReader
from eyrie.gates import GateError
from eyrie.store import States, StoreError
from eyrie.target import Target
from make_tiny_target import write_target
from tiny_target import LAYER_IDS, Stages, question

IDS = [5, 9, 300, 17, 42, 77, 23, 150, 8]
HIDDEN = 64
SERVED = [0, *LAYER_IDS, 6]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny target whose final norm has weights: the untrained one's are all one."""
    folder = tmp_path_factory.mktemp("normed")
    write_target(folder)
    made = Target(folder, "float32", LAYER_IDS)
    generator = torch.Generator().manual_seed(0)
    made.final_norm().weight.copy_(torch.rand(HIDDEN, generator=generator) + 0.5)
    return made


def right_states(target: Target) -> States:
    [[states]] = InProcessEngine(target, EngineSettings()).capture([IDS], "bfloat16")
    return states


def test_right_states_pass(target: Target) -> None:
    assert check_against_reference(target, right_states(target)) < 0.01


def layers(states: States) -> list[torch.Tensor]:
    return list(torch.split(states.aux, HIDDEN, dim=1))


def shift_layers(target: Target, states: States) -> States:
    """Each layer is the one before the wanted one: the engine's numbering is one off."""
    reference = reference_of(target, IDS).states
    return dataclasses.replace(states, aux=torch.cat([reference[layer - 1] for layer in LAYER_IDS], dim=1))


def swap_layers(target: Target, states: States) -> States:
    first, second, third = layers(states)
    return dataclasses.replace(states, aux=torch.cat([second, first, third], dim=1))


def rotate_rows(target: Target, states: States) -> States:
    return States(IDS, states.aux.roll(1, dims=0), states.last.roll(1, dims=0))


def rotate_back(target: Target, states: States) -> States:
    return States(IDS, states.aux.roll(-1, dims=0), states.last.roll(-1, dims=0))


def leave_out_the_norm(target: Target, states: States) -> States:
    raw = reference_of(target, IDS).states["last before the final norm"]
    return dataclasses.replace(states, last=raw)


def norm_twice(target: Target, states: States) -> States:
    return dataclasses.replace(states, last=reference_of(target, IDS).states[TWICE])


def other_tokens(target: Target, states: States) -> States:
    return dataclasses.replace(states, token_ids=IDS[::-1])


def noise(target: Target, states: States) -> States:
    return dataclasses.replace(states, last=states.last + torch.randn(states.last.shape))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (shift_layers, "the state of layer 1 is that of layer 0"),
        (swap_layers, "the state of layer 1 is that of layer 3"),
        (rotate_rows, "of the token before: the rows are rotated against the tokens"),
        (rotate_back, "of the token after: the rows are rotated against the tokens"),
        (leave_out_the_norm, "the last state is that of last before the final norm"),
        (norm_twice, "the last state is that of last normed twice"),
        (other_tokens, "the state of layer 1 differs from the model's own by"),
        (noise, "the last state differs from the model's own by"),
    ],
)
def test_wrong_states_are_called_what_they_are(
    target: Target, fault: Callable[[Target, States], States], words: str
) -> None:
    with pytest.raises(StoreError, match=words):
        check_against_reference(target, fault(target, right_states(target)))


VALUES = 1 + torch.rand(len(IDS), 4 * HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values[:-1], "8 rows of states for 9 tokens"),
        (lambda values: values[:, :-HIDDEN], "hidden states 192 wide; expected 256"),
        (lambda values: values.index_fill(0, torch.tensor([3]), torch.nan), "not finite"),
        (lambda values: values.index_fill(0, torch.tensor([3]), torch.inf), "not finite"),
        (lambda values: values.index_fill(1, torch.arange(HIDDEN, 2 * HIDDEN), 0.0), "layer 3 are all zero"),
        (
            lambda values: values.index_fill(1, torch.arange(3 * HIDDEN, 4 * HIDDEN), 0.0),
            "layer last are all",
        ),
    ],
)
def test_states_that_can_not_be_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    assert checked_states(IDS, VALUES, LAYER_IDS, HIDDEN).last is not None
    with pytest.raises(StoreError, match=words):
        checked_states(IDS, change(VALUES.clone()), LAYER_IDS, HIDDEN)


# What a server leaves in a file.


@functools.cache
def served(target: Target) -> torch.Tensor:
    """[tokens, layers, H], as a server writes them: the last one is not normed."""
    states = reference_of(target, IDS).states
    names = [*SERVED[:-1], "last before the final norm"]
    return torch.stack([states[name] for name in names], dim=1)


def reader_of(target: Target, **changes: Any) -> StateReader:
    reader = StateReader(
        layer_ids=LAYER_IDS,
        served=SERVED,
        dtype=torch.float32,
        embedding=target.embedding_weight(),
        norm=target.final_norm().weight,
        epsilon=target.config.rms_norm_eps,
    )
    return dataclasses.replace(reader, **changes)


def write(folder: Path, rows: torch.Tensor, ids: list[int]) -> Path:
    path = folder / "request.safetensors"
    save_file({"hidden_states": rows.contiguous(), "token_ids": torch.tensor(ids)}, path)
    Path(f"{path}.lock").touch()
    return path


def test_a_servers_file_is_read_normed_and_removed(target: Target, tmp_path: Path) -> None:
    path = write(tmp_path, served(target), IDS)
    states = reader_of(target).read(path, IDS, [3], deadline=0.0)
    assert check_against_reference(target, states) < 1e-5
    assert list(tmp_path.iterdir()) == []


def test_an_answers_last_token_has_an_empty_row(target: Target, tmp_path: Path) -> None:
    path = write(tmp_path, served(target), IDS)
    reader = reader_of(target, with_answer=True)
    states = reader.read(path, IDS[:5], [*IDS[5:], 11], deadline=0.0)
    assert states.token_ids == [*IDS, 11]
    assert states.aux.shape[0] == states.last.shape[0] == 10
    assert not states.aux[-1].any() and not states.last[-1].any()
    whole = States(IDS, states.aux[:-1], states.last[:-1])
    assert check_against_reference(target, whole) < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.roll(1, dims=0), "token 0 is not that token's embedding, and so at 9 of 9 tokens"),
        (lambda rows: rows.roll(1, dims=1), "is not that token's embedding"),
        (lambda rows: rows[:, 1:], r"of shape \[9, 4, 64\]"),
        (lambda rows: rows[..., :32], r"of shape \[9, 5, 32\]"),
        (lambda rows: rows.index_fill(1, torch.tensor([2]), torch.nan), "not finite"),
        (lambda rows: rows.index_fill(1, torch.tensor([2]), 0.0), "layer 3 are all zero"),
    ],
)
def test_what_a_server_serves_wrong_stops_the_job(
    target: Target, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    path = write(tmp_path, change(served(target)), IDS)
    with pytest.raises(StoreError, match=words):
        reader_of(target).read(path, IDS, [3], deadline=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_whole_is_a_failure_to_be_repeated(target: Target, tmp_path: Path) -> None:
    reader = reader_of(target)
    for kind, rows, ids in (
        ("states_short", served(target)[:-1], IDS),
        ("states_of_other_tokens", served(target), [*IDS[:-1], 4]),
    ):
        with pytest.raises(Failure, match=kind):
            reader.read(write(tmp_path, rows, ids), IDS, [3], deadline=0.0)
    path = write(tmp_path, served(target), IDS)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Failure, match="states_unreadable"):
        reader.read(path, IDS, [3], deadline=0.0)
    with pytest.raises(Failure, match=r"states_missing: .*must write to this host's files"):
        reader.read(path, IDS, [3], deadline=0.0)
    Path(f"{path}.lock").touch()
    with pytest.raises(Failure, match=r"states_missing: .* was not written"):
        reader.read(path, IDS, [3], deadline=0.0)


@settings(max_examples=30)
@given(st.integers(1, 8), st.data())
def test_rows_of_any_other_place_are_found_out(rolled: int, data: st.DataObject) -> None:
    """The embedding tells each row's token, whatever the other layers hold."""
    ids = data.draw(st.permutations(IDS))
    table = torch.randn(301, HIDDEN, generator=torch.Generator().manual_seed(2))
    rows = torch.ones(len(ids), 2, HIDDEN)
    rows[:, 0] = table[torch.tensor(ids)]
    reader = StateReader([1], [0, 1], torch.float32, table, torch.ones(HIDDEN), 1e-5)
    reader._check_embedding(rows, ids)
    with pytest.raises(StoreError, match="rows are rotated"):
        reader._check_embedding(rows.roll(rolled, dims=0), ids)


class Loaded:
    """States as the store gives them."""

    def __init__(self, states: States) -> None:
        self._states = states

    def load(self, rows: Sequence[Row]) -> list[States]:
        return [self._states for _ in rows]


@pytest.mark.parametrize(("mask_shift", "refused"), [("aligned", False), ("shifted", True), ("legacy", True)])
def test_training_refuses_an_empty_row_where_it_would_look_there(mask_shift: str, refused: bool) -> None:
    ids, mask = torch.tensor([*IDS, 3]), torch.tensor([False, *([True] * 9)])
    row = Row("key", "row 1", "questions", "group 1", "train", ids, mask, greedy=True, supervision="all")
    aux = torch.ones(10, 4)
    aux[-1] = 0
    places = candidate_places(mask, mask_shift)
    assert (9 in places.tolist()) == refused
    empty: Any = Loaded(States(ids.tolist(), aux, aux))
    samples = StoredSamples([row], [torch.zeros(len(places), dtype=torch.int32)], empty, mask_shift)
    with pytest.raises(StoreError, match="have no row for the last token") if refused else nullcontext():
        samples.load([0])


# The job as a whole.


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(question(number) for number in range(6))
    stages.answer()
    return stages


def test_the_manifest_names_the_proof_and_the_agreement(answered: Stages) -> None:
    answered.capture()
    manifest = json.loads((answered.folder / "manifest.json").read_bytes())
    [proof] = manifest["numbering"]
    assert (proof["engine"], proof["proof"]) == ("in_process", "reference")
    kept = json.loads((answered.folder / f"store/numbering/{proof['key']}.json").read_bytes())
    assert kept["layer_ids"] == LAYER_IDS and kept["difference"] < 0.02
    assert manifest["agreement"]["samples"] == 4
    assert manifest["agreement"]["share"] > 0.9


def test_stored_states_that_do_not_fit_the_answers_stop_the_job(
    answered: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows rotated in the store itself: nothing is captured any more, and still it is seen."""
    from eyrie.store import StateStore  # noqa: PLC0415

    load = StateStore.load

    def rotated(self: StateStore, refs: Any) -> Any:
        for one in load(self, refs):
            yield States(one.token_ids, one.aux, one.last.roll(1, dims=0))

    monkeypatch.setattr(StateStore, "load", rotated)
    with pytest.raises(GateError, match=r"give \d+ of \d+ tokens of greedy answers"):
        answered.capture()
    assert not (answered.folder / "manifest.json").exists()


def test_a_wrong_layer_in_the_pass_stops_the_job_before_anything_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages(tmp_path / "build", monkeypatch)
    stages.write_prompts(question(number) for number in range(4))
    capture = Target._capture
    monkeypatch.setattr(Target, "_capture", lambda self, layer: capture(self, {1: 3, 3: 1}.get(layer, layer)))
    with pytest.raises(StoreError, match="the state of layer 1 is that of layer 3"):
        stages.answer()
    assert not list(stages.folder.glob("store/hidden_states/*/*.safetensors"))
