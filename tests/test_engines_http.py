"""The engines that ask servers, against a stand-in that does everything wrong at times."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from eyrie.config import EngineSettings, SamplingSettings
from eyrie.engines import Answered, EngineError, Failed, Follow, Prompt, Result, sampling_seed
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.requesting import RequestingEngine
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm, served_model
from eyrie.records import content_key
from eyrie.stopping import Stopped, StopRequest
from fault_server import FAULTS, FaultServer, Serving, Shape, digest, generated

SAMPLING = SamplingSettings(max_new_tokens=12, max_in_flight=24)
DRAWN = SamplingSettings(max_new_tokens=12, temperature=0.8, max_in_flight=24)
SHAPES: tuple[Shape, ...] = ("vllm", "sglang")
# Every seed is a run over 300 prompts; all of them by EYRIE_FAULT_SEEDS=50.
SEEDS = int(os.environ.get("EYRIE_FAULT_SEEDS", "4"))
FAST = {"backoff": 0.01, "request_timeout": 60.0, "retries": 40, "ready_timeout": 20.0, "stop_grace": 5.0}


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    ids = [
        [draw.randrange(3, 500) for _ in range(draw.randrange(1, 30))] + [number] for number in range(count)
    ]
    return [(content_key(one), one) for one in ids]


def dialect(shape: Shape) -> Dialect:
    rules = AnswerRules(512, frozenset({2}))
    return Vllm("tiny", rules) if shape == "vllm" else Sglang(rules)


def engine(
    servers: Iterable[FaultServer], stop: StopRequest | None = None, **changes: Any
) -> RequestingEngine:
    servers = list(servers)
    settings = EngineSettings(kind=servers[0].shape, **{**FAST, **changes})
    urls = [server.url for server in servers]
    return RequestingEngine(urls, dialect(servers[0].shape), settings, stop or StopRequest(5.0))


def results(
    running: RequestingEngine,
    asked: Iterable[Prompt],
    sampling: SamplingSettings = SAMPLING,
    follow: Follow | None = None,
) -> list[Result]:
    return [one for group in running.answer(asked, sampling, follow) for one in group]


def expected(
    asked: Iterable[Prompt], sampling: SamplingSettings = SAMPLING
) -> dict[str, tuple[list[int], str]]:
    seeds = {key: sampling_seed(key) if sampling.temperature else None for key, _ in asked}
    return {key: generated(ids, seeds[key], sampling.max_new_tokens) for key, ids in asked}


def check_right(found: list[Result], asked: list[Prompt], sampling: SamplingSettings = SAMPLING) -> None:
    """Every prompt once, each with the answer that the server's model gives to it."""
    assert Counter(one.key for one in found) == Counter(key for key, _ in asked)
    assert [one for one in found if not isinstance(one, Answered)] == []
    seen = {one.key: (one.token_ids, one.finish_reason) for one in found if isinstance(one, Answered)}
    assert seen == expected(asked, sampling)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [SAMPLING, DRAWN])
def test_answers_are_the_servers(shape: Shape, sampling: SamplingSettings) -> None:
    asked = prompts(60)
    assert expected(asked, SAMPLING) != expected(asked, DRAWN)
    with FaultServer(shape) as server:
        check_right(results(engine([server]), asked, sampling), asked, sampling)
        assert set(server.asked.values()) == {1}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_fails_every_prompt_is_answered_once_and_right(seed: int) -> None:
    """All faults at once, on one or two servers, of which one dies and comes back."""
    shape, asked = SHAPES[seed % 2], prompts(300, seed)
    draw = random.Random(seed)
    share = draw.choice([0.01, 0.03])
    faults = {name: share / 4 if name in ("hang", "drip") else share for name in FAULTS}
    settings = {"faults": faults, "fault_seed": seed, "hang_seconds": 20.0, "delay": 0.01}
    with FaultServer(shape, **settings) as one, FaultServer(shape, **settings) as other:
        servers = [one, other][: 1 + (seed // 2) % 2]
        killer = threading.Timer(draw.uniform(0.05, 0.3), die_for_a_while, args=(servers[0], 0.2))
        killer.start()
        running = engine(servers, request_timeout=2.0)
        found = results(running, asked)
        killer.join()
        check_right(found, asked)
        assert sum((server.faults for server in servers), Counter())
        assert running.errors()


def die_for_a_while(server: FaultServer, seconds: float) -> None:
    server.die()
    time.sleep(seconds)
    server.revive()


# How the client is to see each fault; a reply that names no model is told from the request by its own name.
KINDS = {
    "unavailable": "unavailable",
    "server_error": "server_error",
    "reset": "reset",
    "hang": "timeout",
    "drip": "timeout",
    "abort": "aborted",
    "truncated": "malformed_reply",
    "cut_off": "reset",
    "wrong_count": "wrong_count",
    "wrong_token": "wrong_tokens",
    "wrong_model": "wrong_model",
    "wrong_prompt": "wrong_prompt",
    "wrong_finish": "wrong_finish",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_kind_and_is_asked_again(shape: Shape, fault: str) -> None:
    asked = prompts(4)
    kind = "wrong_prompt" if (shape, fault) == ("sglang", "wrong_model") else KINDS[fault]
    with FaultServer(shape, faults={fault: 1.0}, last_faulty_attempt=1, hang_seconds=3.0) as server:
        running = engine([server], request_timeout=0.3 if kind == "timeout" else 60.0)
        check_right(results(running, asked), asked)
        assert set(running.errors()) == {kind}
        # A machine that stands still for a moment makes one more timeout, of a right answer.
        assert server.asked.total() == 4 + running.errors()[kind]
        assert running.errors()[kind] == 4 or kind == "timeout"


def test_what_stays_wrong_fails_under_its_kind() -> None:
    asked = prompts(3)
    with FaultServer("sglang", faults={"abort": 1.0}) as server:
        found = results(engine([server], retries=2), asked)
        assert {(type(one), one.key) for one in found} == {(Failed, key) for key, _ in asked}
        assert {one.reason for one in found if isinstance(one, Failed)} == {"aborted"}
        assert set(server.asked.values()) == {3}


def test_a_refused_request_is_not_asked_again() -> None:
    asked = prompts(10)
    with FaultServer("vllm", poison=(asked[4][1][0],)) as server:
        found = {one.key: one for one in results(engine([server]), asked)}
        refused = {key for key, ids in asked if asked[4][1][0] in ids}
        assert {key for key, one in found.items() if isinstance(one, Failed)} == refused
        assert all(found[key].reason == "rejected" for key in refused)
        assert max(server.asked.values()) == 1


def test_a_server_that_only_fails_stops_the_work() -> None:
    with (
        FaultServer("vllm", faults={"server_error": 1.0}) as server,
        pytest.raises(EngineError, match=r"the last 50 prompts got no answer, each asked 2 times"),
    ):
        results(engine([server], retries=1), prompts(400))


def test_without_any_server_the_work_stops_after_a_while() -> None:
    asked, found = prompts(400), []
    with FaultServer("vllm", delay=0.01) as server:
        running = engine([server], ready_timeout=0.5)
        with pytest.raises(
            EngineError, match=r"no server has answered for \d+ s.*engine.ready_timeout, 0 s"[:34]
        ):
            for group in running.answer(asked, SAMPLING):
                found += group
                server.die()
    assert 0 < len(found) < 400
    assert all(isinstance(one, Answered) for one in found)


def test_servers_side_by_side_are_kept_full_and_a_dead_ones_work_goes_to_the_other() -> None:
    asked, found = prompts(200), []
    with FaultServer("vllm") as one, FaultServer("vllm") as other:
        for server in (one, other):
            server.go.clear()
        running = engine([one, other])
        for group in running.answer(asked, SAMPLING):
            found += group
            if one.running == other.running == SAMPLING.max_in_flight:
                assert running.running() == 2 * SAMPLING.max_in_flight
                one.die()
                other.go.set()
        check_right(found, asked)
        assert one.most_running == other.most_running == SAMPLING.max_in_flight
        # How many more reach it until it is gone is a matter of the machine; the rest is the other's work.
        assert SAMPLING.max_in_flight <= sum(one.asked.values()) < 100 < sum(other.asked.values())


def test_a_server_that_came_back_must_prove_itself() -> None:
    def verify(url: str) -> None:
        raise EngineError(f"{url} serves another model")

    with FaultServer("vllm", delay=0.05) as server:
        running = engine([server])
        running.verify = verify
        # It dies with requests in flight, so that its absence is seen.
        killer = threading.Timer(0.3, die_for_a_while, args=(server, 0.3))
        killer.start()
        with pytest.raises(EngineError, match="serves another model"):
            for _ in running.answer(prompts(2000), SAMPLING):
                pass
        killer.join()


def test_prompts_are_taken_as_they_are_needed() -> None:
    taken = 0

    def source() -> Iterator[Prompt]:
        nonlocal taken
        for prompt in prompts(500):
            taken += 1
            yield prompt

    with FaultServer("vllm", delay=0.02) as server:
        done = 0
        for group in engine([server]).answer(source(), SAMPLING):
            done += len(group)
            assert taken - done <= 3 * SAMPLING.max_in_flight + 256
        assert taken == done == 500
        assert server.most_running <= SAMPLING.max_in_flight


@pytest.mark.parametrize("shape", SHAPES)
def test_the_next_turn_is_asked_with_what_was_answered(shape: Shape) -> None:
    first = prompts(30)
    ids_of = dict(first)
    turns = {key: 1 for key, _ in first}

    def follow(answered: Answered) -> Prompt | None:
        """Three turns in all: each goes on from prompt and answer, with a next question of two tokens."""
        turn = turns[answered.key]
        if turn == 3:
            return None
        ids = [*ids_of[answered.key], *answered.token_ids, 7, 8 + turn]
        key = content_key(ids)
        ids_of[key], turns[key] = ids, turn + 1
        return key, ids

    with FaultServer(shape, faults={"reset": 0.05, "abort": 0.05}) as server:
        found = results(engine([server]), first, follow=follow)
    assert Counter(turns[one.key] for one in found) == {1: 30, 2: 30, 3: 30}
    check_right(found, list(ids_of.items()))


def test_a_wish_to_stop_lets_running_answers_finish() -> None:
    asked, stop = prompts(400), StopRequest(10.0)
    found: list[Result] = []
    with FaultServer("vllm", delay=0.1) as server:
        with pytest.raises(Stopped, match=r"stopped by the test; what was finished is in the store"):
            for group in engine([server], stop).answer(asked, SAMPLING):
                found += group
                stop.request("the test")
        assert {digest(ids) for key, ids in asked if key in {one.key for one in found}} == set(server.asked)
        assert 0 < len(found) < 400


def test_a_wish_to_stop_waits_no_longer_than_it_may() -> None:
    stop = StopRequest(0.3)
    with FaultServer("vllm", faults={"hang": 1.0}, hang_seconds=20.0) as server:
        groups = engine([server], stop, request_timeout=15.0).answer(prompts(50), SAMPLING)
        assert next(groups) == []
        stop.request("the test")
        start = time.monotonic()
        with pytest.raises(Stopped):
            for _ in groups:
                pass
        assert time.monotonic() - start < 5.0


def test_the_served_model_is_looked_up() -> None:
    with FaultServer("vllm", model="one") as server:
        assert served_model(server.url, None) == served_model(server.url, "one") == "one"
        with pytest.raises(EngineError, match=r"serves one\n  expected: two\n  change: engine.served_model"):
            served_model(server.url, "two")


def test_the_stand_in_knows_its_answers_beforehand() -> None:
    """The oracle itself: answers differ by prompt and seed, and both endings happen."""
    answers = [generated(ids, None, 12) for _, ids in prompts(50)]
    assert len({tuple(ids) for ids, _ in answers}) == 50
    assert {reason for _, reason in answers} == {"stop", "length"}
    assert all(len(ids) == 12 for ids, reason in answers if reason == "length")
    assert generated([1, 2], 1, 12) != generated([1, 2], 2, 12)
    assert generated([1, 2], 1, 12, Serving(eos_ids=(3,))) != generated([1, 2], 1, 12)
