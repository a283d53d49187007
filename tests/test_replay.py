"""Acceptance estimated from stored states: the walk against real speculative decoding, and its arithmetic."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import estimate_acceptance
from estimate_acceptance import draft_all
from eyrie.acceptance import Cycle, acceptance_by_position, acceptance_length, full_cycles
from eyrie.bootstrap import interval, resampled
from eyrie.config import ConfigError
from eyrie.decoding import DraftPass, greedy, speculative
from eyrie.eagle3.batches import Sample, candidate_places
from eyrie.eagle3.chains import draft_greedily, overlaps
from eyrie.eagle3.checkpoint import load_drafter, save_checkpoint
from eyrie.eagle3.model import Drafter
from eyrie.eagle3.samples import Row
from eyrie.estimating import Drafted, Tally, repetition_figures, walk_figures, warnings
from eyrie.gates import GateError
from eyrie.records import read_json, read_jsonl, write_json, write_jsonl
from eyrie.replay import Answer, find_answers, visits
from eyrie.store import StoreError, TopTokens
from eyrie.target import Target
from eyrie.target_weights import TargetWeights
from tiny_drafting import LAYER_IDS, VOCABULARY, random_drafter, save_tiny_target
from tiny_eagle3 import TinyBuild, make_tiny_build
from tiny_eagle3 import random_drafter as drafter_of_build

NEVER = VOCABULARY  # no token has this id, so no answer ends by itself
PROMPTS = st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(save_tiny_target(tmp_path_factory.mktemp("target")), "float32", LAYER_IDS)


@pytest.fixture(scope="module")
def drafters(target: Target) -> list[Drafter]:
    """Drafters whose heads are fitted to what the target writes: one proposes all tokens, one twenty."""
    untaught = random_drafter(target, 0, range(VOCABULARY)), random_drafter(target, 1)
    return [taught(target, drafter) for drafter in untaught]


@torch.no_grad()
def taught(target: Target, drafter: Drafter) -> Drafter:
    target.model.generation_config.eos_token_id = NEVER
    states, tokens = [], []
    for first in range(2, VOCABULARY, 2):
        ids = torch.tensor([[first, 3, *greedy(target, [first, 3], 30).token_ids]])
        seen = target.forward(ids[:, :-2])
        places = torch.arange(ids.shape[1] - 2)[None]
        hidden = drafter.step(drafter.embed(ids[:, 1:-1]), drafter.project(seen.aux), places)
        states.append(drafter.norm(hidden[0]))
        tokens.append(ids[0, 2:])
    wanted = (torch.cat(tokens)[:, None] == drafter.draft_token_ids()).float()
    drafter.lm_head.weight.copy_(torch.linalg.lstsq(torch.cat(states), wanted).solution.t())
    return drafter


def sample_of(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Row, Sample]:
    """A greedy row and its states as the store would have them, unrounded."""
    ids, mask = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    states = target.forward(torch.tensor([ids]))
    token_ids, loss_mask = torch.tensor(ids), torch.tensor(mask)
    row = Row("key", "id", "chat", "group", "held_out", token_ids.int(), loss_mask, True, "")
    candidates = candidate_places(loss_mask, "aligned")
    choices = token_ids[candidates + 1]
    aux, last = states.aux[0].clone(), states.last[0].clone()
    return row, Sample("key", token_ids, loss_mask, aux, last, candidates, choices)


@settings(max_examples=40)
@given(
    prompt=PROMPTS,
    which=st.integers(0, 1),
    drafts=st.integers(1, 4),
    limit=st.integers(2, 20),
    end=st.integers(0, VOCABULARY),
)
def test_the_walk_makes_the_cycles_that_a_decoder_makes(
    target: Target,
    drafters: list[Drafter],
    prompt: list[int],
    which: int,
    drafts: int,
    limit: int,
    end: int,
) -> None:
    target.model.generation_config.eos_token_id = end
    drafter = drafters[which]
    real = speculative(target, drafter, prompt, limit, drafts)
    if len(real.token_ids) < 2:
        return
    row, sample = sample_of(target, prompt, real.token_ids)
    head = target.head_weight()
    (one,) = draft_all(drafter, [sample], [row], target.eos_ids(), drafts, head, limit) or [None]
    joint = np.cumprod(one.answer.within(one.rates["greedy"]), axis=1)
    weights = visits(joint, one.answer.full(drafts))
    walked = [Cycle(drafts, int(n)) for n in joint.sum(axis=1)[weights > 0]]
    assert walked == full_cycles(real.cycles, drafts)
    assert set(weights.tolist()) <= {0.0, 1.0}
    tally = Tally([one], "greedy", drafts)
    figures = tally.figures(np.ones(len(tally.answers), dtype=bool))
    assert figures["cycles"] == len(walked)
    assert figures["by_position"] == pytest.approx(acceptance_by_position(walked, drafts))
    expected = acceptance_length(walked, drafts)
    assert figures["acceptance_length"] == (None if expected is None else pytest.approx(expected))


def test_taught_drafters_are_right_often(target: Target, drafters: list[Drafter]) -> None:
    """Else the comparison above would compare nothing but zeros."""
    target.model.generation_config.eos_token_id = NEVER
    for drafter in drafters:
        counts = Counter(cycle.accepted for cycle in speculative(target, drafter, [5, 7], 60, 3).cycles)
        assert len(counts) >= 3


def answer_of(rates: Sequence[Sequence[float]], group: str = "g", **changes: Any) -> Drafted:
    """An answer without an end, at whose first places drafts are accepted with these probabilities."""
    table = np.array(rates, dtype=np.float64)
    length = len(rates) + 1
    answer = Answer(1, 1 + length, None)
    tokens = [9, *range(100, 100 + length)]
    values = {"dataset": "chat", "group": group, "answer": answer, "token_ids": tokens}
    return Drafted(**values | {"rates": {"greedy": table, "sampled": table}} | changes)


def test_all_positions_overstate_a_walk_that_jumps_over_the_easy_places() -> None:
    # After the hard place 0 the walk lands on 1, whose draft leads over 2 to 3: place 2 is never asked.
    one = answer_of([[0, 0], [1, 0], [1, 1], [0, 0], [0, 0]])
    tally = Tally([one], "greedy", 2)
    figures = tally.figures(np.ones(len(tally.answers), dtype=bool))
    assert figures["cycles"] == 4  # places 0, 1, 3 and 4
    assert figures["acceptance_length"] == 1 + 1 / 4
    assert tally.all_positions() == 1 + 3 / 5


def test_drafts_past_the_answers_end_count_for_nothing() -> None:
    one = answer_of([[1, 1], [1, 1]])
    # Three tokens that end by themselves: at place 1 only one more can be accepted.
    assert one.answer.within(one.rates["greedy"]).tolist() == [[1, 1], [1, 0]]
    assert one.answer.full(2).tolist() == [True, True]
    # Cut after three there is no room for two drafts and the target's own token.
    assert replace(one.answer, limit=3).full(2).tolist() == [False, False]
    assert replace(one.answer, limit=4).full(2).tolist() == [True, False]


def test_answers_are_runs_of_the_mask() -> None:
    ids, mask = [4, 5, 6, 1, 7, 8, 9], [0, 1, 1, 1, 0, 1, 1]
    assert find_answers(ids, mask, [1]) == [Answer(1, 4, None), Answer(5, 7, 2)]
    assert find_answers(ids, mask, [1], 2) == [Answer(1, 3, 2), Answer(5, 7, 2)]
    whole = find_answers([4, 5, 6], [1, 1, 1], [1])[0]
    # Before a sample's first token there is no feature to draft from.
    assert (whole.places.tolist(), whole.positions.tolist()) == ([1], [0])


@given(
    rates=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=12),
)
def test_a_walk_in_expectation_writes_the_answer_once(rates: list[list[float]]) -> None:
    """Cycles times what they write is the way from the first place to past the last one."""
    joint = np.cumprod(np.array(rates), axis=1)
    places = len(joint)
    weights = visits(joint, np.ones(places, dtype=bool))
    assert weights[0] == 1.0
    assert ((weights >= 0) & (weights <= 1 + 1e-9)).all()
    written = (weights * (1 + joint.sum(axis=1))).sum()
    assert places - 1e-9 <= written <= places + 3 + 1e-9


def test_a_walk_in_expectation_is_the_mean_of_walks() -> None:
    generator = np.random.default_rng(3)
    rates = generator.uniform(0.2, 0.9, size=(8, 2))
    joint, full = np.cumprod(rates, axis=1), np.ones(8, dtype=bool)
    walks = np.zeros(8)
    for _ in range(4000):
        place = 0
        while place < 8:
            walks[place] += 1
            place += 1 + int((generator.uniform() < joint[place]).sum())
    assert walks / 4000 == pytest.approx(visits(joint, full), abs=0.03)


def tally_of(answers: Sequence[Drafted]) -> tuple[Tally, np.ndarray[Any, Any]]:
    tally = Tally(answers, "greedy", 2)
    return tally, np.ones(len(tally.answers), dtype=bool)


def test_groups_are_drawn_and_not_rows() -> None:
    good, bad = [[1, 1]] * 6, [[0, 0]] * 6
    answers = [answer_of(good if n % 2 else bad, f"group-{n % 2}") for n in range(40)]
    tally, rows = tally_of(answers)
    of_two = tally.figures(rows)
    apart, rows = tally_of([replace(one, group=str(n)) for n, one in enumerate(answers)])
    of_forty = apart.figures(rows)
    assert of_two["acceptance_length"] == of_forty["acceptance_length"]
    assert (of_two["groups"], of_forty["groups"]) == (2, 40)
    # Two groups may both be drawn good or both bad; of forty some are always of the other kind.
    assert (of_two["low"], of_two["high"]) == (1.0, 3.0)
    assert 1.0 < of_forty["low"] < of_forty["acceptance_length"] < of_forty["high"] < 2.0
    alone, rows = tally_of(answers[:1])
    assert alone.figures(rows)["low"] is None, "one group tells nothing of others"
    assert [row[:2] for row in tally.by_group()] == [["chat", "group-0"], ["chat", "group-1"]]


SUMS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
)


@given(sums=SUMS, scale=st.integers(2, 5), seed=st.integers(0, 9))
def test_drawn_sums_are_those_of_groups(sums: list[tuple[int, ...]], scale: int, seed: int) -> None:
    table = np.array(sums, dtype=np.float64)
    drawn = resampled(table, 50, seed)
    assert np.array_equal(drawn, resampled(table, 50, seed))
    assert np.allclose(resampled(table * scale, 50, seed), drawn * scale)
    assert (drawn >= len(table) * table.min(axis=0) - 1e-6).all()
    assert (drawn <= len(table) * table.max(axis=0) + 1e-6).all()
    # All groups alike: no doubt at all.
    same = np.repeat(table[:1], len(table), axis=0)
    assert np.allclose(resampled(same, 50, seed), same.sum(axis=0))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
def test_an_interval_lies_within_what_was_drawn(values: list[float]) -> None:
    found = interval(np.array([*values, np.nan]))
    assert found is not None
    assert min(values) <= found[0] <= found[1] <= max(values)
    assert interval(np.array([np.nan])) is None
    assert interval(np.array([2.0, np.inf] * 20)) == (2.0, np.inf)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for draw in range(200):
        groups = np.stack([np.ones(40), generator.normal(5, 2, 40)], axis=1)
        drawn = resampled(groups, 300, draw)
        low, high = interval(drawn[:, 1] / drawn[:, 0]) or (0.0, 0.0)
        hits += low <= 5 <= high
    assert 180 <= hits <= 198


def test_loops_are_named_where_they_flatter() -> None:
    loop = answer_of([[1, 1]] * 80, "loop", token_ids=[9, *[5, 6] * 41])
    lively = [answer_of([[0, 0]] * 40, f"group-{n}", dataset="code") for n in range(3)]
    drafted = [loop, *lively]
    tally, _ = tally_of(drafted)
    figures: dict[str, Any] = {"unique_ngrams": repetition_figures(drafted, {2: tally})}
    datasets = {name: {"kind": "prompts", "partition": "short"} for name in ("chat", "code")}
    figures["walk"] = {"2": {"greedy": walk_figures(tally, drafted, datasets)}}
    found = figures["unique_ngrams"]
    assert (found["degenerate_samples"], found["datasets"]["code"]) == (1, 1.0)
    assert found["datasets"]["chat"] < 0.1
    assert found["without_degenerate"] == {"2": 1.0}
    said = warnings(figures)
    assert "1 of 4 answers end in a loop" in said[0] and "1.00 without" in said[0]
    assert "chat 2%" in said[1] or "chat 3%" in said[1]
    bands = figures["walk"]["2"]["greedy"]["answer_position"]
    assert [(band["from"], band["to"]) for band in bands] == [(0, 16), (16, 32), (32, 64), (64, 128)]
    assert sum(band["cycles"] for band in bands) == figures["walk"]["2"]["greedy"]["all"]["cycles"]


# With the rows, states and checkpoint of a whole tiny build.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TinyBuild:
    build = make_tiny_build(tmp_path_factory.mktemp("tiny"))
    target = read_json(build.folder / "target.json")
    embedding = TargetWeights(build.folder / "target", target["files"]).embedding()
    drafter = drafter_of_build(3)
    drafter.embedding.copy_(embedding)
    save_checkpoint(build.folder / "checkpoint", drafter, {})
    return build


@pytest.fixture
def build(original: TinyBuild, tmp_path: Path) -> TinyBuild:
    return original.copied(tmp_path / "build")


def estimate(build: TinyBuild, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    recipe = {
        "version": 1,
        "draft_tokens": [3, 2],
        "rows_per_dataset": None,
        "datasets": {"chat": {"kind": "prompts", "partition": "short"}},
    }
    command = ["estimate_acceptance.py", "--recipe", json.dumps(recipe | changes)]
    for flag, name in {
        "--checkpoint": "checkpoint",
        "--tokenized": "tokenized_data.jsonl",
        "--manifests": "manifest.json",
        "--target": "target.json",
        "--target-path": "target",
        "--store": "store",
        "--out": "acceptance.json",
    }.items():
        command += [flag, str(build.folder / name)]
    monkeypatch.setattr(sys, "argv", command)
    estimate_acceptance.main()
    return read_json(build.folder / "acceptance.json")


def test_the_file_holds_what_the_report_needs(build: TinyBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(build, monkeypatch)
    first = (build.folder / "acceptance.json").read_bytes()
    held_out = sum(row["split"] == "held_out" for row in read_jsonl(build.folder / "tokenized_data.jsonl"))
    assert found["stage"] == "acceptance"
    assert set(found["walk"]) == {"3", "2"}
    for length, modes in found["walk"].items():
        assert set(modes) == {"greedy", "sampled"}
        for mode, parts in modes.items():
            whole = parts["all"]
            assert whole["groups"] == held_out == len(found["by_group"][length])
            assert len(whole["by_position"]) == int(length)
            assert whole["acceptance_length"] == pytest.approx(1 + sum(whole["by_position"]))
            assert whole["low"] <= whole["acceptance_length"] <= whole["high"]
            assert parts["datasets"]["chat"] == parts["partitions"]["short"] == whole
            assert parts["kinds"] == {"prompts": whole}
            assert found["all_positions"][length][mode] >= 1
    cycles = sum(row[2] for row in found["by_group"]["3"])
    assert cycles == pytest.approx(found["walk"]["3"]["greedy"]["all"]["cycles"])
    estimate(build, monkeypatch)
    assert (build.folder / "acceptance.json").read_bytes() == first
    fewer = estimate(build, monkeypatch, rows_per_dataset=4)
    assert fewer["walk"]["3"]["greedy"]["all"]["groups"] == 4


def test_answers_that_are_not_greedy_are_judged_by_the_targets_choices(
    build: TinyBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = estimate(build, monkeypatch)["walk"]["3"]["greedy"]["all"]
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [{**row, "greedy": False} for row in read_jsonl(path)])
    # These answers are greedy, so the stored states tell the same choices, but for near-ties.
    asked = estimate(build, monkeypatch)["walk"]["3"]["greedy"]["all"]
    assert asked["acceptance_length"] == pytest.approx(greedy["acceptance_length"], abs=0.05)


@torch.no_grad()
def test_sampled_acceptance_is_the_overlap_of_both_distributions(target: Target) -> None:
    drafter = random_drafter(target, 1)
    row, sample = sample_of(target, [3, 5, 8], [4, 9, 2, 11, 6, 7])
    starts = torch.arange(2, 7)
    head = target.head_weight().float()
    (found,) = overlaps(drafter, [sample], [starts], 2, head)
    logits = target.logits(sample.last).float()
    aux, ids = sample.aux[None], sample.token_ids[None]
    for place, start in enumerate(starts.tolist()):
        hidden = drafter.step(
            drafter.embed(ids[:, 1 : start + 2]),
            drafter.project(aux[:, : start + 1]),
            torch.arange(start + 1)[None],
        )[0, -1]
        drafted = torch.zeros(VOCABULARY)
        drafted[drafter.draft_token_ids()] = drafter.draft_logits(hidden).softmax(-1)
        expected = torch.minimum(drafted, logits[start + 1].softmax(-1)).sum()
        assert float(found[place, 0]) == pytest.approx(float(expected), abs=1e-5)
    assert found[-1, 1] == 0, "the sample ends there"
    assert found[0, 1] > 0
    # A draft vocabulary's top tokens: p is renormalised over it, and so larger by what lies outside.
    inside = logits[:, drafter.draft_token_ids()].log_softmax(-1)
    top = inside.topk(20)
    tokens = TopTokens(top.indices.int(), top.values, torch.zeros(len(inside)), logits.argmax(-1).int())
    (of_top,) = overlaps(drafter, [replace(sample, last=None, top=tokens)], [starts], 2, head)
    assert (of_top >= found - 1e-6).all()
    assert float(of_top[0, 0]) > float(found[0, 0])
    assert row.greedy


def test_chains_are_those_that_a_decoder_drafts(target: Target, drafters: list[Drafter]) -> None:
    ids = [*range(2, 12), *range(20, 9, -2)]
    _, sample = sample_of(target, ids[:4], ids[4:])
    for drafter in [*drafters, random_drafter(target, 4)]:
        starts = torch.arange(len(ids) - 2)
        (chains,) = draft_greedily(drafter, [sample], [starts], 5)
        for start, chain in zip(starts.tolist(), chains.tolist(), strict=True):
            features = sample.aux[None, : start + 1]
            decoder = DraftPass(drafter, torch.device("cpu"))
            assert chain == decoder.draft(features, ids[1 : start + 2], 5)


def test_batched_chains_are_those_of_each_sample_alone(target: Target) -> None:
    drafter = random_drafter(target, 2)
    samples = [sample_of(target, [3, 5, n], [4, 9, 2, n, 6, 7])[1] for n in range(2, 6)]
    starts = [torch.arange(2, 3 + n) for n in range(1, 5)]
    together = draft_greedily(drafter, samples, starts, 3)
    for sample, start, chain in zip(samples, starts, together, strict=True):
        assert torch.equal(draft_greedily(drafter, [sample], [start], 3)[0], chain)


def test_faults_are_named(build: TinyBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tells nothing of chat"):
        estimate(build, monkeypatch, datasets={})
    config = build.folder / "checkpoint" / "config.json"
    good = read_json(config)
    other = good["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    write_json(config, {**good, "eagle_config": other})
    with pytest.raises(GateError, match=r"takes layers \[1, 2, 4\]; the stored .* layers \[1, 2, 3\]"):
        estimate(build, monkeypatch)
    write_json(config, good)
    for shard in build.store.glob("hidden_states/*/*.safetensors"):
        data = bytearray(shard.read_bytes())
        # The header ends before; of the tensors little is left.
        data[12_000:] = bytes(len(data) - 12_000)
        shard.write_bytes(data)
    with pytest.raises(StoreError, match=r"hidden states of row row-0\d\d of dataset chat"):
        estimate(build, monkeypatch)
    path = build.folder / "tokenized_data.jsonl"
    write_jsonl(path, [row for row in read_jsonl(path) if row["split"] != "held_out"])
    with pytest.raises(GateError, match=r"(?s)no held-out answer.*split\.held_out"):
        estimate(build, monkeypatch)


def test_the_drafter_is_loaded_for_the_targets_embedding(build: TinyBuild) -> None:
    embedding = TargetWeights(build.folder / "target", None).embedding()
    assert load_drafter(build.folder / "checkpoint", embedding, torch.float32).config.layer_ids == (1, 2, 3)
