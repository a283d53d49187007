"""Kimi's chats, on a tokenizer of the same construction with the same ids of control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_targets
from eyrie.chat import Chat, ChatError
from eyrie.chat.kimi import is_kimi, with_call_ids
from eyrie.config import ConfigError

BOS, END, USER, ASSISTANT, SYSTEM, MIDDLE = 163584, 163586, 163587, 163588, 163594, 163601
SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END = 163595, 163596, 163597, 163598, 163599
THINK, THINK_END = 163606, 163607


@pytest.fixture
def chat() -> Chat:
    return chat_targets.chat("kimi")


def plain(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer.encode(text, allow_special_tokens=False)


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def ask(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"type": "function", "id": f"functions.add:{number}", "function": function}


def test_it_is_the_targets_own_slow_tokenizer(chat: Chat) -> None:
    assert is_kimi(chat_targets.folder("kimi"))
    assert not chat.tokenizer.is_fast
    assert chat.tokenizer.encode("a<|im_end|>") != plain(chat, "a<|im_end|>")


def test_a_finished_answer_keeps_its_thinking(chat: Chat) -> None:
    """The template itself renders <think></think> and the answer alone."""
    talk = [ask("你好 <|im_end|>"), answer("So\n", reasoning_content="Hm ")]
    assert "Hm" not in chat.tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    [row] = chat.rows(talk)
    asked = [USER, *plain(chat, "user"), MIDDLE, *plain(chat, "你好 <|im_end|>"), END]
    asked += [ASSISTANT, *plain(chat, "assistant"), MIDDLE, THINK]
    said = [*plain(chat, "Hm "), THINK_END, *plain(chat, "So\n"), END]
    assert row.ids == asked + said
    assert row.loss_mask == [0] * len(asked) + [1] * len(said)
    assert chat.prompt_ids(talk[:1]) == asked


def test_a_tool_loop_shows_each_turn_what_the_target_saw(chat: Chat) -> None:
    talk = [
        ask("2+2?"),
        answer("", reasoning_content="Add.", tool_calls=[call(0, '{"a":  2}')]),
        {"role": "tool", "content": "4", "tool_call_id": "functions.add:0"},
        answer("Four.", reasoning_content="Done."),
    ]
    first, second = chat.rows(talk)
    assert (first.turn, second.turn) == (0, 1)
    called = [*plain(chat, "Add."), THINK_END, SECTION, CALL, *plain(chat, "functions.add:0"), ARGUMENTS]
    called += [*plain(chat, '{"a":  2}'), CALL_END, SECTION_END, END]
    assert [n for n, one in zip(first.ids, first.loss_mask, strict=True) if one] == called
    result = [SYSTEM, *plain(chat, "tool"), MIDDLE, *plain(chat, "## Return of functions.add:0\n4"), END]
    opened = [ASSISTANT, *plain(chat, "assistant"), MIDDLE, THINK]
    said = [*plain(chat, "Done."), THINK_END, *plain(chat, "Four."), END]
    assert second.ids == first.ids + result + opened + said
    assert sum(second.loss_mask) == len(said)


def test_thinking_is_emptied_in_the_history_only(chat: Chat) -> None:
    turn = [ask("q"), answer("A", reasoning_content="R")]
    rows = chat.rows(turn * 3)
    assert [row.turn for row in rows] == [0, 1, 2]
    for row in rows:
        closed = [(a, b) for a, b in zip(row.ids, row.ids[1:], strict=False) if a == THINK]
        assert closed == [(THINK, THINK_END)] * row.turn + [(THINK, *plain(chat, "R"))]


def test_strings_longer_than_the_tokenizers_slice(chat: Chat) -> None:
    """The tokenizer cuts a rendered text every 400,000 characters: here through the end token."""
    head = len(chat.tokenizer.apply_chat_template([ask("")], add_generation_prompt=False)) - len("<|im_end|>")
    text = ("word " * 100_000)[: 400_000 - head - 4]
    talk = [ask(text), answer("A")]
    rendered = chat.tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    assert chat.tokenizer.encode(rendered).count(END) == 1
    [row] = chat.rows(talk)
    assert row.ids.count(END) == 2
    assert row.ids == [
        *(USER, *plain(chat, "user"), MIDDLE, *plain(chat, text), END),
        *(ASSISTANT, *plain(chat, "assistant"), MIDDLE, THINK, THINK_END, *plain(chat, "A"), END),
    ]


def test_calls_get_ids_of_kimis_form() -> None:
    named = with_call_ids(
        [
            answer(
                "", tool_calls=[{**call(0, "{}"), "id": "call_x"}, {**call(0, "{}"), "id": "functionsadd5"}]
            ),
            {"role": "tool", "content": "", "tool_call_id": "functionsadd5"},
            {"role": "tool", "content": "", "tool_call_id": "call_x"},
            answer("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": "{}"}}]),
            {"role": "tool", "content": ""},
        ]
    )
    assert [one["id"] for one in named[0]["tool_calls"]] == ["functions.add:0", "functions.add:1"]
    assert [one.get("tool_call_id") for one in named] == [
        *(None, "functions.add:1", "functions.add:0", None, "functions.add:2")
    ]


def test_a_model_that_opens_its_own_thinking_is_trained_to(tmp_path: Path) -> None:
    """K2-Thinking's prompt ends before <think>."""
    chat_targets.write_kimi(tmp_path)
    template = chat_targets.template("kimi")
    assert (
        template.count("{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}") == 1
    )
    own = template.replace(
        "{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}", ""
    )
    (tmp_path / "chat_template.jinja").write_text(own)
    chat = Chat(tmp_path, trusted=True)
    [row] = chat.rows([ask("q"), answer("A", reasoning_content="R")])
    said = [n for n, one in zip(row.ids, row.loss_mask, strict=True) if one]
    assert said == [THINK, *plain(chat, "R"), THINK_END, *plain(chat, "A"), END]


def test_a_model_that_does_not_think_has_no_reasoning(tmp_path: Path) -> None:
    """The first K2: no tokens for thinking, and a template without a place for it."""
    chat_targets.write_kimi(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for number in (THINK, THINK_END):
        del settings["added_tokens_decoder"][str(number)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = chat_targets.template("kimi").replace("{{- message.content }}", "{{ message.content }}")
    lines = [line for line in template.split("\n") if not line.startswith("<think>")]
    own = "\n".join(lines).split("<|im_assistant|>assistant<|im_middle|>{{")[0]
    (tmp_path / "chat_template.jinja").write_text(own + "<|im_assistant|>assistant<|im_middle|>{%- endif -%}")
    chat = Chat(tmp_path, trusted=True)
    [row] = chat.rows([ask("q"), answer("A"), ask("q"), answer("A")])
    assert sum(row.loss_mask) == 2 * len([*plain(chat, "A"), END])
    with pytest.raises(ChatError) as caught:
        chat.rows([ask("q"), answer("A", reasoning_content="R")])
    assert caught.value.reason == "reasoning_lost"


def test_another_kimis_ids_are_refused(tmp_path: Path) -> None:
    """Kimi K3 has the ids of K2.5's turn markers for other tokens."""
    chat_targets.write_kimi(tmp_path, **{"<|im_end|>": 163589, "<|end_of_msg|>": 163586})
    with pytest.raises(ConfigError, match=r"<\|im_end\|> 163589 \(expected 163586\)"):
        Chat(tmp_path, trusted=True)


def test_another_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    chat_targets.write_kimi(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "OtherTokenizer"
    settings["auto_map"]["AutoTokenizer"] = ["tokenization_kimi.OtherTokenizer", None]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for trusted in (False, True):
        with pytest.raises(ConfigError, match="tokenizer"):
            Chat(tmp_path, trusted)
