from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from eyrie.chat import Chat
from eyrie.config import EngineSettings, SamplingSettings
from eyrie.engines import Answered, Prompt
from eyrie.engines.checks import check_against_reference
from eyrie.engines.in_process import InProcessEngine, _common_length, _sample
from eyrie.records import content_key
from eyrie.stopping import Stopped, StopRequest
from eyrie.store import StoreError
from eyrie.target import Target
from tiny_target import LAYER_IDS, question, tiny_target

GREEDY = SamplingSettings(max_new_tokens=24)
DRAWN = SamplingSettings(max_new_tokens=24, temperature=0.9, top_p=0.8)


@functools.cache
def target() -> Target:
    return Target(tiny_target(), "float32", LAYER_IDS)


@functools.cache
def prompts() -> list[tuple[str, list[int]]]:
    chat = Chat(tiny_target())
    ids = [chat.prompt_ids(question(number)["messages"]) for number in range(20)]
    return [(content_key(one), one) for one in ids]


def answers(
    sampling: SamplingSettings = GREEDY,
    asked: Sequence[tuple[str, list[int]]] | None = None,
    **engine: Any,
) -> dict[str, Answered]:
    running = InProcessEngine(target(), EngineSettings(**engine), "float32")
    batches = list(running.answer(asked or prompts(), sampling))
    assert max(map(len, batches)) <= running.settings.batch_size
    return {one.key: one for batch in batches for one in batch}


@functools.cache
def answered_alone() -> dict[str, Answered]:
    return answers(batch_independent=True)


def test_answers_are_the_models_own() -> None:
    for key, ids in prompts()[:6]:
        expected = target().model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert answered_alone()[key].token_ids == expected[0, len(ids) :].tolist()


def test_an_answer_ends_with_the_end_token_or_is_cut() -> None:
    reasons = Counter(one.finish_reason for one in answered_alone().values())
    assert min(reasons["stop"], reasons["length"]) > 0
    for one in answered_alone().values():
        assert one.token_ids.count(2) == (one.finish_reason == "stop") == (one.token_ids[-1] == 2)
        assert one.finish_reason == "stop" or len(one.token_ids) == 24


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
def test_batches_change_nothing_but_rounding(batch_size: int) -> None:
    together = answers(batch_size=batch_size)
    for key, ids in prompts():
        alone, one = answered_alone()[key], together[key]
        assert (one.token_ids, one.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert one.states.token_ids == ids + one.token_ids
        torch.testing.assert_close(one.states.aux, alone.states.aux, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.states.last, alone.states.last, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_alone_means_the_same_bytes_in_any_company(sampling: SamplingSettings) -> None:
    chosen = random.Random(1).sample(prompts(), 7)
    few = answers(sampling, chosen, batch_size=4, batch_independent=True)
    many = answers(sampling, batch_size=32, batch_independent=True)
    for key, _ in chosen:
        assert few[key].token_ids == many[key].token_ids
        assert few[key].states.digest() == many[key].states.digest()


def test_the_plan_of_batches_follows_from_the_prompts_alone() -> None:
    engine = InProcessEngine(target(), EngineSettings(batch_size=6))
    shuffled = random.Random(2).sample(prompts(), len(prompts()))
    one, other = (list(engine.answer(asked, GREEDY)) for asked in (prompts(), shuffled))
    assert [[a.states.digest() for a in batch] for batch in one] == [
        [a.states.digest() for a in batch] for batch in other
    ]


def test_drawing_depends_on_the_prompt_and_not_on_its_batch() -> None:
    alone, together = answers(DRAWN, batch_independent=True), answers(DRAWN, batch_size=20)
    assert {key: one.token_ids for key, one in alone.items()} == {
        key: one.token_ids for key, one in together.items()
    }
    assert {tuple(one.token_ids) for one in alone.values()} != {
        tuple(one.token_ids) for one in answered_alone().values()
    }


def test_drawn_tokens_come_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    points = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sampling = SamplingSettings(max_new_tokens=1, temperature=1.0)
    logits = probabilities.log().expand(1000, -1)
    assert _sample(logits, points, sampling).bincount().tolist() == [50, 500, 150, 300]
    nucleus = sampling.model_copy(update={"top_p": 0.79})
    assert _sample(logits, points, nucleus).bincount(minlength=4).tolist() == [0, 625, 0, 375]
    cold = sampling.model_copy(update={"temperature": 0.01})
    assert set(_sample(logits, points, cold).tolist()) == {1}


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_common_beginning(rows: list[list[int]]) -> None:
    length = _common_length(rows)
    assert all(row[:length] == rows[0][:length] and len(row) > length for row in rows)
    longer = length + 1
    assert any(row[:longer] != rows[0][:longer] or len(row) == longer for row in rows)


def test_the_next_turn_is_answered_in_the_next_pass() -> None:
    """Each conversation goes on once, with what was answered and a question of two tokens."""
    ids_of = dict(prompts()[:6])
    first = set(ids_of)

    def follow(answered: Answered) -> Prompt | None:
        if answered.key not in first:
            return None
        ids = [*ids_of[answered.key], *answered.token_ids, 7, 8]
        ids_of[content_key(ids)] = ids
        return content_key(ids), ids

    engine = InProcessEngine(target(), EngineSettings(batch_size=4, batch_independent=True), "float32")
    groups = list(engine.answer(prompts()[:6], GREEDY, follow))
    assert [len(group) for group in groups] == [4, 2, 4, 2]
    assert [one.key in first for group in groups for one in group] == [True] * 6 + [False] * 6
    alone = answers(
        asked=[(key, ids) for key, ids in ids_of.items() if key not in first], batch_independent=True
    )
    assert {one.key: one.token_ids for group in groups[2:] for one in group} == {
        key: one.token_ids for key, one in alone.items()
    }


def test_a_wish_to_stop_ends_between_batches_and_after_the_grace_within_one() -> None:
    for grace, batches in ((60.0, 1), (0.0, 0)):
        stop = StopRequest(grace)
        engine = InProcessEngine(target(), EngineSettings(batch_size=4), "float32", stop)
        groups = engine.answer(prompts(), GREEDY)
        if batches:
            assert len(next(groups)) == 4
        stop.request("the test")
        with pytest.raises(Stopped):
            next(groups)


def test_captured_states_are_those_of_the_answering_pass() -> None:
    engine = InProcessEngine(target(), EngineSettings(batch_size=6))
    samples = [one.states.token_ids for one in answered_alone().values()]
    captured = [states for group in engine.capture(samples, "float32") for states in group]
    assert sorted(states.token_ids for states in captured) == sorted(samples)
    by_tokens = {tuple(one.states.token_ids): one.states for one in answered_alone().values()}
    for states in captured:
        expected = by_tokens[tuple(states.token_ids)]
        torch.testing.assert_close(states.aux, expected.aux, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(states.last, expected.last, rtol=1e-3, atol=1e-3)
        assert check_against_reference(target(), states) < 1e-4


def test_captured_alone_means_the_same_bytes_in_any_company() -> None:
    engine = InProcessEngine(target(), EngineSettings(batch_size=4, batch_independent=True))
    samples = [one.states.token_ids for one in answered_alone().values()]
    few, many = (
        {
            tuple(states.token_ids): states.digest()
            for group in engine.capture(chosen, "float32")
            for states in group
        }
        for chosen in (samples[:5], samples)
    )
    assert few.items() <= many.items()


def test_the_last_states_give_the_next_tokens() -> None:
    for (_, ids), one in zip(prompts(), (answered_alone()[key] for key, _ in prompts()), strict=True):
        predicted = target().logits(one.states.last[len(ids) - 1 : -1]).argmax(dim=-1)
        assert predicted.tolist() == one.token_ids


def target_with(folder: Path, change: Any) -> Target:
    model = LlamaForCausalLM.from_pretrained(tiny_target())
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return Target(folder, "float32", [0, 3, 5])


def test_states_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    silent = target_with(tmp_path, lambda model: model.model.embed_tokens.weight.zero_())
    with pytest.raises(StoreError, match="layer 0 are all zero"):
        list(InProcessEngine(silent, EngineSettings()).capture([[5, 6]], "float32"))


def test_states_too_large_for_their_dtype_are_refused(tmp_path: Path) -> None:
    loud = target_with(tmp_path, lambda model: model.model.embed_tokens.weight.mul_(1e7))
    engine = InProcessEngine(loud, EngineSettings())
    assert list(engine.capture([[5, 6]], "bfloat16"))
    with pytest.raises(StoreError, match=r"not finite as torch.float16; change hidden_states.dtype"):
        list(engine.capture([[5, 6]], "float16"))
