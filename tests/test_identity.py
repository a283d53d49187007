from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie.config import DraftSettings, SamplingSettings
from eyrie.engines.canary import Canary, best_two
from eyrie.engines.identity import Expected, IdentityError, prove
from eyrie.engines.questions import Questions
from eyrie.engines.replies import AnswerRules, Dialect
from eyrie.engines.sglang import Sglang
from eyrie.engines.vllm import Vllm
from fault_server import FaultServer

PROMPT = [1, 5, 9, 12]
RULES = AnswerRules(512, frozenset({2}))
TARGET = {"name": "tiny", "hub_id": "someone/tiny", "hub_revision": None, "vocab_size": 512, "eos_ids": [2]}
EAGLE3 = DraftSettings(algorithm="EAGLE3")


def dialect(kind: str, model: str = "tiny") -> Dialect:
    return Sglang(RULES) if kind == "sglang" else Vllm(model, RULES)


def expected(kind: str, **changes: Any) -> Expected:
    sampling = SamplingSettings(max_new_tokens=64, temperature=0.7, top_p=0.9)
    return replace(Expected(kind, TARGET, Path("models/tiny"), sampling, 4096), **changes)


def proved(folder: Path, server: FaultServer, **changes: Any) -> dict[str, Any]:
    kind = changes.get("kind", server.shape)
    model = server.serving.model
    return prove(server.url, dialect(kind, model), expected(**{"kind": kind, **changes}), PROMPT, folder, 5.0)


def refused(folder: Path, server: FaultServer, **changes: Any) -> str:
    with pytest.raises(IdentityError) as caught:
        proved(folder, server, **changes)
    return str(caught.value)


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
def test_the_right_server_is_described_for_the_manifest(tmp_path: Path, shape: Any) -> None:
    with FaultServer(shape) as server:
        first = proved(tmp_path, server, command="serve --dtype=float32")
        assert proved(tmp_path, server, command="serve --dtype=float32") == first
    assert first["engine"] == shape
    assert first["version"] == "0.0-stand-in"
    assert first["context_length"] == 4096
    assert first["dtype"] == "float32"
    assert first["command"] == "serve --dtype=float32"
    record = json.loads((tmp_path / f"{shape}-0.0-stand-in-float32.json").read_text())
    assert record["prompt_ids"] == PROMPT
    assert record["token_ids"] == first["canary"] != []


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
def test_another_model_is_refused(tmp_path: Path, shape: Any) -> None:
    with FaultServer(shape, model="large", model_path="models/large") as server:
        said = refused(tmp_path, server)
        assert "seen: large, models/large" in said
        assert "expected: tiny or someone/tiny or models/tiny" in said
        assert "--served-model-name tiny" in said
        assert proved(tmp_path, server, served_model="large")["model"] == "large"
        assert "expected: small" in refused(tmp_path, server, served_model="small")


def test_the_target_is_known_by_its_folder_however_it_is_spelled(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    records = tmp_path / "records"
    with FaultServer(model=str(tmp_path / "link"), model_path=str(tmp_path / "link")) as server:
        assert proved(records, server, path=folder)["model"] == str(tmp_path / "link")
        assert "another model" in refused(records, server, path=tmp_path)


def test_another_revision_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer("sglang") as server:
        monkeypatch.setattr(Questions, "get", with_revision("abc"))
        said = refused(tmp_path, server, target={**TARGET, "hub_revision": "def"})
        assert "another revision\n  seen: abc\n  expected: def" in said
        proved(tmp_path, server, target={**TARGET, "hub_revision": "abc"})


def with_revision(revision: str) -> Any:
    get = Questions.get
    return lambda self, *paths: {**get(self, *paths), "revision": revision}


@pytest.mark.parametrize(("shape", "flag"), [("vllm", "--max-model-len"), ("sglang", "--context-length")])
def test_a_short_context_is_refused(tmp_path: Path, shape: Any, flag: str) -> None:
    with FaultServer(shape, context_length=2048) as server:
        said = refused(tmp_path, server, context=2049)
        assert "seen: 2048 tokens\n  expected: 2049 tokens" in said
        assert f"{flag} 2049" in said
        assert proved(tmp_path, server, context=2048)["context_length"] == 2048


@pytest.mark.parametrize(("seen", "words"), [("EAGLE", "EAGLE"), (None, "none")])
def test_eagle_in_place_of_eagle3_is_refused(tmp_path: Path, seen: str | None, words: str) -> None:
    with FaultServer("sglang", speculative_algorithm=seen) as server:
        said = refused(tmp_path, server, draft=EAGLE3)
    assert f"seen: {words}\n  expected: EAGLE3" in said
    assert "--speculative-algorithm EAGLE3" in said


def test_speculation_that_was_not_meant_is_refused(tmp_path: Path) -> None:
    with FaultServer("sglang", speculative_algorithm="EAGLE3") as server:
        assert "expected: none" in refused(tmp_path, server, draft=DraftSettings())
        assert proved(tmp_path, server, draft=EAGLE3)["speculation"] == "EAGLE3"


def test_vllm_s_speculation_is_told_in_its_development_mode(tmp_path: Path) -> None:
    with FaultServer(speculative_algorithm="EAGLE") as server:
        assert "seen: EAGLE\n" in refused(tmp_path, server, draft=EAGLE3)
    with FaultServer(speculative_algorithm="EAGLE3") as server:
        assert proved(tmp_path, server, draft=EAGLE3)["speculation"] == "EAGLE3"


def test_else_it_is_read_in_vllm_s_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = 'vllm serve m --speculative-config \'{"method": "%s"}\''
    monkeypatch.setattr(Questions, "get", without("/server_info?config_format=json"))
    with FaultServer() as server:
        assert proved(tmp_path, server, draft=EAGLE3, command=command % "eagle3")["speculation"] == "EAGLE3"
        assert "seen: EAGLE\n" in refused(tmp_path, server, draft=EAGLE3, command=command % "eagle")
        assert "seen: none" in refused(tmp_path, server, draft=EAGLE3, command="vllm serve m")
        # Where nothing tells that it speculates, it does not.
        assert "seen: none" in refused(tmp_path, server, draft=EAGLE3)
        monkeypatch.setattr(Questions, "get_text", lambda *_: "vllm:spec_decode_num_drafts_total 0.0")
        assert "VLLM_SERVER_DEV_MODE" in refused(tmp_path, server, draft=EAGLE3)


def without(page: str) -> Any:
    get = Questions.get
    return lambda self, *paths: {} if page in paths else get(self, *paths)


def test_hidden_states_of_one_layer_are_refused(tmp_path: Path) -> None:
    draft = DraftSettings(algorithm="EAGLE3", hidden_width=21504)
    with FaultServer("sglang", speculative_algorithm="EAGLE3", hidden_width=7168) as server:
        said = refused(tmp_path, server, draft=draft)
    assert "seen: 7168 columns\n  expected: 21504 columns" in said
    assert "--enable-return-hidden-states" in said
    with FaultServer("sglang", speculative_algorithm="EAGLE3", hidden_width=21504) as server:
        assert proved(tmp_path, server, draft=draft)["hidden_width"] == 21504
    with FaultServer() as server:
        assert "hidden_width" in refused(tmp_path, server, draft=DraftSettings(hidden_width=192))


@pytest.mark.parametrize(("shape", "kind"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_a_server_of_the_other_kind_is_refused(tmp_path: Path, shape: Any, kind: str) -> None:
    with FaultServer(shape) as server:
        said = refused(tmp_path, server, kind=kind)
    assert "engine.kind" in said or "token ids" in said
    assert not server.answered


def test_sampling_that_is_not_taken_is_told(tmp_path: Path) -> None:
    with FaultServer(poison=(9,)) as server:
        said = refused(tmp_path, server)
    assert "status 400" in said and "this prompt is refused" in said and "temperature=0.7" in said


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with FaultServer() as server:
        pass
    assert "engine.urls" in refused(tmp_path, server)


def test_another_canary_than_the_recorded_is_refused(tmp_path: Path) -> None:
    with FaultServer() as server:
        proved(tmp_path, server)
    with FaultServer(vocab_size=300) as server:
        said = refused(tmp_path, server)
    assert "vllm-0.0-stand-in-auto.json at token " in said
    assert "delete" in said


def test_in_float32_all_servers_are_held_to_one_canary(tmp_path: Path) -> None:
    answers = {"command": "serve --dtype float32"}
    with FaultServer("sglang") as server:
        proved(tmp_path, server, **answers)
        assert proved(tmp_path, server)["command"] == "python tests/fault_server.py"
    with FaultServer("vllm", vocab_size=300) as server:
        assert "sglang-0.0-stand-in-float32.json" in refused(tmp_path, server, **answers)
        # In bfloat16 another engine may round otherwise.
        proved(tmp_path, server, command="serve --dtype bfloat16")


CANARY = Canary(PROMPT, [7, 8, 9], [17, 18, 19], [2.0, 0.01, 3.0])


@given(at=st.integers(0, 2), token=st.integers(20, 400))
def test_a_canary_may_differ_where_two_tokens_are_equally_good(at: int, token: int) -> None:
    """Only in the runner-up, and only where it was as good up to rounding."""

    def with_token(new: int) -> Canary:
        ids = [*CANARY.token_ids[:at], new, *CANARY.token_ids[at + 1 :]]
        return replace(CANARY, token_ids=ids)

    assert CANARY.differs(CANARY, 0.0) is None
    assert CANARY.differs(with_token(token), 100.0) is not None
    runner_up = with_token(CANARY.seconds[at])
    assert CANARY.differs(runner_up, CANARY.margins[at]) is None
    assert CANARY.differs(runner_up, CANARY.margins[at] - 0.001) == (
        f"at token {at}, where the margin was {CANARY.margins[at]:.4f}"
    )


def test_a_canary_of_another_length_differs() -> None:
    shorter = replace(CANARY, token_ids=[7, 8])
    assert CANARY.differs(shorter, 100.0) == "at token 2: the end"
    assert Canary(**asdict(shorter)).differs(CANARY, 100.0) == "at token 2: the end"


def test_both_shapes_of_probabilities_are_read() -> None:
    vllm = {"choices": [{"logprobs": {"top_logprobs": [{"token_id:8": -0.25, "token_id:3": -2.0}]}}]}
    sglang = {"meta_info": {"output_top_logprobs": [[[-2.0, 3, None], [-0.25, 8, None]]]}}
    for kind, reply in (("vllm", vllm), ("sglang", sglang)):
        assert list(best_two(kind, reply)) == [[(-0.25, 8), (-2.0, 3)]]
