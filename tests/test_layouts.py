"""Each layout on invented rows of its shape and of the shapes that others have taken for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import ConfigError
from eyrie.layouts import base, load_layout
from eyrie.layouts.base import ROLES, Conversation, SkipRow
from eyrie.layouts.sharegpt_chunks import without_page_remnants
from eyrie.media import without_media

NAMES = tuple(
    sorted(
        path.stem for path in Path(base.__file__).parent.glob("*.py") if path.stem not in ("__init__", "base")
    )
)
PAIR_FIELDS = {"prompt": "problem", "response": "solution", "system": "system"}

WEATHER = {"name": "weather", "parameters": {"type": "object"}}
WEATHER_TOOL = {"type": "function", "function": WEATHER}
IN_TURKU = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Turku"}'}}


def read(layout: str, row: Any, fields: dict[str, str] | None = None) -> Conversation:
    return load_layout(layout).read(row, fields or {})


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(made["role"], made["content"]) for made in conversation.messages]


def reason(layout: str, row: Any, fields: dict[str, str] | None = None) -> str:
    with pytest.raises(SkipRow) as skip:
        read(layout, row, fields)
    return skip.value.reason


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# --- by name ------------------------------------------------------------------------------------------------


def test_an_unknown_layout_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"saw layout 'sharegtp', expected one of alpaca, .*did you mean share"
    ):
        load_layout("sharegtp")


@pytest.mark.parametrize("name", ["base", "__init__", "../records"])
def test_what_is_no_layout_cannot_be_loaded(name: str) -> None:
    with pytest.raises(ConfigError):
        load_layout(name)


# --- messages -----------------------------------------------------------------------------------------------

HELLO = [user("Hi"), {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HELLO},
        {"messages": json.dumps(HELLO)},
        {"messages": json.dumps(json.dumps(HELLO))},
        {"conversations": HELLO},
        HELLO,
        {"messages": [{"content": "Hi", "role": "Human"}, {"content": "Hello", "role": "AI", "weight": 0.0}]},
        {"messages": [user([{"type": "text", "text": "Hi"}]), HELLO[1]]},
        {"messages": [user([{"type": "text", "value": "H"}, {"content": "i"}]), HELLO[1]]},
        {"messages": [user({"text": "Hi"}), HELLO[1]]},
        {"messages": [user(["Hi"]), HELLO[1]]},
        {"messages": [{"role": "user", "content": "an example", "is_demo": True}, *HELLO]},
    ],
)
def test_messages_of_every_shape_read_alike(row: Any) -> None:
    assert turns(read("messages", row)) == [("user", "Hi"), ("assistant", "Hello")]


def test_messages_may_bear_another_name_or_be_deeper() -> None:
    assert turns(read("messages", {"history": HELLO}, {"messages": "history"}))[0] == ("user", "Hi")
    assert turns(read("messages", {"body": {"messages": HELLO}}, {"messages": "body.messages"}))[0][1] == "Hi"


def test_a_developer_is_the_system_and_a_null_content_is_blank() -> None:
    row = {"messages": [{"role": "developer", "content": "Be brief"}, user(None)]}
    assert turns(read("messages", row)) == [("system", "Be brief"), ("user", "")]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thinking_content"])
def test_reasoning_is_found_under_every_name(key: str) -> None:
    row = {"messages": [user("Hi"), {"role": "assistant", "content": "Hello", key: "A greeting."}]}
    assert read("messages", row).messages[1]["reasoning_content"] == "A greeting."


def test_what_arrow_filled_with_null_is_absent() -> None:
    nothing = {"name": None, "tool_calls": None, "function_call": None, "reasoning_content": None}
    row = {
        "messages": [{**user("Hi"), **nothing}, {**HELLO[1], **nothing, "tool_call_id": None}],
        "tools": None,
    }
    conversation = read("messages", row)
    assert conversation.messages == HELLO
    assert conversation.tools is None


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [IN_TURKU]},
        {"role": "assistant", "tool_calls": json.dumps([IN_TURKU])},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Turku", "day": None}}}],
        },
        {"role": "assistant", "content": "", "function_call": IN_TURKU["function"]},
        {"role": "function_call", "content": json.dumps({"name": "weather", "arguments": {"city": "Turku"}})},
        {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(IN_TURKU["function"])}]},
    ],
)
def test_calls_of_every_shape_read_alike(turn: dict[str, Any]) -> None:
    result = {"role": "function", "name": "weather", "content": "rain", "tool_call_id": "c1"}
    messages = read("messages", {"messages": [user("Weather?"), turn, result]}).messages
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [IN_TURKU]}
    assert messages[2] == {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"}


def test_a_result_may_list_the_one_call_that_it_answers() -> None:
    messages = [user("a"), {"role": "tool", "content": "b", "tool_call_ids": ["c1"]}]
    assert read("messages", {"messages": messages}).messages[1] == {
        **{"role": "tool", "content": "b", "tool_call_id": "c1"}
    }
    messages[1]["tool_call_ids"] = ["c1", "c2"]
    assert "tool_call_id" not in read("messages", {"messages": messages}).messages[1]


def test_arguments_that_are_no_json_are_kept_to_the_letter() -> None:
    arguments = '{"path": "D:\\Users\\q"}'
    call = {"id": "c0", "type": "function", "function": {"name": "read", "arguments": arguments}}
    row = {"messages": [user("Read it"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert read("messages", row).messages[1]["tool_calls"] == [call]


@pytest.mark.parametrize("tools", [[WEATHER_TOOL], [WEATHER, WEATHER], json.dumps([WEATHER])])
def test_tools_of_every_shape_read_alike(tools: Any) -> None:
    assert read("messages", {"messages": HELLO, "tools": tools}).tools == [WEATHER_TOOL]


@pytest.mark.parametrize("tools", ["", "[]", [], None])
def test_no_tools_are_none(tools: Any) -> None:
    conversation = read("messages", {"messages": HELLO, "tools": tools})
    assert conversation.tools is None
    assert conversation.notes == ()


@pytest.mark.parametrize("tools", ["see the manual", [{"title": "weather"}], 7])
def test_tools_that_cannot_be_read_are_noted(tools: Any) -> None:
    conversation = read("messages", {"messages": HELLO, "tools": tools})
    assert (conversation.tools, conversation.notes) == (None, ("unreadable_tools",))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "Hi"}, "missing_column:messages"),
        ({"messages": "Hi"}, "bad_type:messages"),
        ({"messages": {"role": "user"}}, "bad_type:messages"),
        ({"messages": ["Hi", "Hello"]}, "bad_type:messages"),
        ("Hi", "bad_type:row"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "missing_column:role"),
        ({"messages": [user(7)]}, "bad_type:content"),
        ({"messages": [user([HELLO[1]])]}, "bad_type:content"),
        ({"messages": [user([{"type": "poem", "text": "Hi"}])]}, "bad_type:content"),
        ({"messages": [user("Hi"), {"role": "laguna_s", "content": "a"}]}, "unknown_role:laguna_s"),
        ({"messages": [{"role": None, "content": "a"}]}, "unknown_role:None"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "multimodal"),
        ({"messages": [user([{"type": "text", "text": "Hi"}, {"type": "input_audio"}])]}, "multimodal"),
        ({"messages": [user("<image>Who?")], "images": ["a.png"]}, "multimodal"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": ["ls"]}]}, "bad_type:tool_calls"),
    ],
)
def test_messages_skip_with_a_reason(row: Any, expected: str) -> None:
    assert reason("messages", row) == expected


# --- from and value -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asker", "answerer"), [("human", "gpt"), ("user", "assistant"), ("human", "assistant")]
)
def test_sharegpt_reads_either_vocabulary(asker: str, answerer: str) -> None:
    row = {"conversations": [{"from": asker, "value": "Hi"}, {"from": answerer, "value": "Hello"}]}
    assert turns(read("sharegpt", row)) == [("user", "Hi"), ("assistant", "Hello")]


def test_a_system_column_comes_first() -> None:
    row = {"system": "Think aloud", "conversations": [{"from": "user", "value": "Hi"}], "tools": "[]"}
    assert turns(read("sharegpt", row)) == [("system", "Think aloud"), ("user", "Hi")]
    assert turns(read("sharegpt", {**row, "conversations": []})) == []


def test_sharegpt_calls_and_observations() -> None:
    spoken = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Turku"}}'},
        {"from": "observation", "value": "rain"},
    ]
    conversation = read("sharegpt", {"conversations": spoken, "tools": json.dumps([WEATHER])})
    assert conversation.messages[1]["tool_calls"] == [IN_TURKU]
    assert conversation.messages[2] == {"role": "tool", "content": "rain"}
    assert conversation.tools == [WEATHER_TOOL]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": HELLO}, "missing_column:conversations"),
        ({"conversations": HELLO}, "missing_column:from"),
        ({"conversations": [{"from": "human", "markdown": "Hi"}]}, "missing_column:value"),
        ({"conversations": [{"from": "human", "value": 3}]}, "bad_type:content"),
        ({"conversations": [{"from": "ai-tool", "value": "x"}]}, "unknown_role:ai-tool"),
        ({"conversations": [{"from": "human", "value": "x"}], "system": 1}, "bad_type:system"),
    ],
)
def test_sharegpt_skips_with_a_reason(row: Any, expected: str) -> None:
    assert reason("sharegpt", row) == expected


def chunk(row_id: Any, *values: str) -> dict[str, Any]:
    spoken = [{"from": ("human", "gpt")[place % 2], "value": value} for place, value in enumerate(values)]
    return {"id": row_id, "conversations": spoken}


def test_only_first_chunks_are_read() -> None:
    assert turns(read("sharegpt_chunks", chunk("QWx3_0", "Hi", "")))[0] == ("user", "Hi")
    assert turns(read("sharegpt_chunks", chunk("QWx3", "Hi")))[0] == ("user", "Hi")
    assert reason("sharegpt_chunks", chunk("QWx3_12", "Hi")) == "not_first_chunk"
    assert reason("sharegpt_chunks", chunk("QWx3_1")) == "empty_conversation"
    assert reason("sharegpt_chunks", chunk(3, "Hi")) == "bad_type:id"
    assert (
        reason("sharegpt_chunks", {"conversations": [{"from": "human", "value": "Hi"}]})
        == "missing_column:id"
    )


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("<div>How do I <b>centre</b> this?</div>", "How do I centre this?"),
        ("what does &lt;p&gt; mean", "what does <p> mean"),
        ("why is a &lt; b &amp;&amp; c", "why is a < b && c"),
        ("pythonCopy code\nprint(1)\nis it safe?", "print(1)\nis it safe?"),
        ("Copy code", ""),
        ("```html\n<div>&amp;</div>\n```<br/>done", "```html\n<div>&amp;</div>\n```done"),
        ("is `<div>` a block?", "is `<div>` a block?"),
        ("```\n<p>never closed", "```\n<p>never closed"),
        ("List<int> x; a < b and c > d <|im_end|>", "List<int> x; a < b and c > d <|im_end|>"),
        ("please Copy code from here", "please Copy code from here"),
        ("one\u2028two", "one\u2028two"),
    ],
)
def test_remnants_of_the_page_go_and_nothing_else(raw: str, clean: str) -> None:
    assert without_page_remnants(raw) == clean
    row = chunk("a_0", raw, raw)
    assert turns(read("sharegpt_chunks", row)) == [("user", clean), ("assistant", raw)]


def test_exchanges_under_the_speakers_names() -> None:
    row = {
        "system": "s",
        "conversation": [{"human": "a", "assistant": "b"}, {"assistant": "d", "human": "c"}],
    }
    assert turns(read("turn_pairs", row)) == [
        *[("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]


# --- one string ---------------------------------------------------------------------------------------------

DECLARED = 'SYSTEM: You may call these -\n{"name": "weather", "parameters": {"type": "object"}}\n'
CALLED = """ASSISTANT: <functioncall> {"name": "weather", "arguments": '{"city": "Turku"}'} <|endoftext|>"""


def chat(*spoken: str, system: str = "") -> dict[str, Any]:
    return {"system": system, "chat": "\n\n\n".join(spoken) + "\n\n"}


def test_a_chat_string_with_a_call() -> None:
    row = chat(
        "USER: Weather?",
        CALLED,
        'FUNCTION RESPONSE: {"sky": "rain"}',
        "ASSISTANT: Rain. <|endoftext|>",
        system=DECLARED,
    )
    conversation = read("chat_string", row)
    assert turns(conversation) == [
        ("system", DECLARED.removeprefix("SYSTEM: ").strip()),
        *[("user", "Weather?"), ("assistant", ""), ("tool", '{"sky": "rain"}'), ("assistant", "Rain.")],
    ]
    assert conversation.messages[2]["tool_calls"] == [IN_TURKU]
    assert conversation.tools == [WEATHER_TOOL]
    assert conversation.system_declares_tools


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("""{"name": "weather", "arguments": '{"city": "Turku"}'}""", '{"city": "Turku"}'),
        ("""{"name": "weather", "arguments": {"city": "Turku"}}""", '{"city": "Turku"}'),
        (
            """{"name": "weather", "parameters": '{"city": "Saint-Jean d\\'Arc"}'}""",
            '{"city": "Saint-Jean d\'Arc"}',
        ),
        ("""{"name": "weather", "arguments": '{"say": "it's"}'}""", '{"say": "it\'s"}'),
        ("""{"name": "weather", "arguments": null}""", "{}"),
        ("""{"name": "weather"}""", "{}"),
    ],
)
def test_arguments_between_single_quotes(text: str, arguments: str) -> None:
    made = read(
        "chat_string", chat("USER: Hi", f"ASSISTANT: Let me see. <functioncall> {text} <|endoftext|>")
    )
    assert made.messages[1]["content"] == "Let me see."
    assert made.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": arguments}


def test_a_call_that_cannot_be_read_stays_text() -> None:
    text = """<functioncall> {"name": "weather", "arguments": '{"city": Infinity}'}"""
    assert read("chat_string", chat("USER: Hi", f"ASSISTANT: {text}")).messages[1] == {
        "role": "assistant",
        "content": text,
    }


def test_a_marker_within_a_line_is_text() -> None:
    row = chat("USER: Where do I type my name?", "ASSISTANT: Type USER: in the box. <|endoftext|>")
    assert turns(read("chat_string", row))[1] == ("assistant", "Type USER: in the box.")


@pytest.mark.parametrize("text", ["", None, " \n"])
def test_a_blank_chat_is_an_empty_conversation(text: str | None) -> None:
    assert read("chat_string", {"chat": text, "system": DECLARED}).messages == []


def test_a_chat_may_begin_with_a_function_response_or_end_on_the_user() -> None:
    assert turns(read("chat_string", chat("FUNCTION RESPONSE: ok")))[0][0] == "tool"
    assert (
        turns(read("chat_string", chat("USER: Hi", "ASSISTANT: Hello <|endoftext|>", "USER: Bye")))[2][1]
        == "Bye"
    )


@pytest.mark.parametrize(
    "spoken",
    [
        ("USER: Continue this:", "ASSISTANT: I think", "ASSISTANT: Done. <|endoftext|>"),
        ("USER: Continue this: <|endoftext|>", "ASSISTANT: Done. <|endoftext|>"),
        ("USER: Hi", "ASSISTANT: One <|endoftext|> more <|endoftext|>"),
    ],
)
def test_a_damaged_chat_is_not_cut_in_the_wrong_place(spoken: tuple[str, ...]) -> None:
    assert reason("chat_string", chat(*spoken)) == "damaged_turns"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"system": "s"}, "missing_column:chat"),
        ({"chat": ["USER: Hi"]}, "bad_type:chat"),
        ({"chat": "Human: Hi"}, "bad_type:chat"),
    ],
)
def test_chat_string_skips_with_a_reason(row: Any, expected: str) -> None:
    assert reason("chat_string", row) == expected


@pytest.mark.parametrize(
    ("system", "tools"),
    [
        ("SYSTEM: no functions", None),
        (
            DECLARED + "\n" + '{"name": "tide"}\n',
            [WEATHER_TOOL, {"type": "function", "function": {"name": "tide"}}],
        ),
        (DECLARED + "and more words", None),
        (DECLARED + '{"name": "cut', None),
    ],
)
def test_declared_functions(system: str, tools: Any) -> None:
    assert read("chat_string", chat("USER: Hi", system=system)).tools == tools


# --- columns ------------------------------------------------------------------------------------------------


def test_pairs_read_the_named_columns_alone() -> None:
    row = {"problem": "Loop?", "solution": "for", "system": "s", "seed": "int n;", "input": "x"}
    assert turns(read("pairs", row, {"prompt": "problem"})) == [("user", "Loop?")]
    assert turns(read("pairs", row, PAIR_FIELDS)) == [
        ("system", "s"),
        ("user", "Loop?"),
        ("assistant", "for"),
    ]
    assert turns(read("pairs", {"problem": None}, {"prompt": "problem"})) == [("user", "")]


def test_pairs_guess_no_column() -> None:
    with pytest.raises(ConfigError, match=r"guesses no column: name it"):
        read("pairs", {"prompt": "Hi"})


def test_pairs_skip_with_a_reason() -> None:
    assert reason("pairs", {"prompt": "Hi"}, {"prompt": "problem"}) == "missing_column:problem"
    assert reason("pairs", {"problem": 7}, {"prompt": "problem"}) == "bad_type:problem"
    assert (
        reason("pairs", {"problem": "Hi"}, {"prompt": "problem", "response": "out"}) == "missing_column:out"
    )


def test_alpaca_joins_instruction_and_input() -> None:
    row = {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day", "text": "### Instruction"}
    assert turns(read("alpaca", row)) == [("user", "Translate.\n\nGuten Tag"), ("assistant", "Good day")]


@pytest.mark.parametrize("given_input", ["", None, " ", "<noinput>", "<noInput>"])
def test_alpaca_without_input(given_input: str | None) -> None:
    assert turns(read("alpaca", {"instruction": "Hi", "input": given_input})) == [("user", "Hi")]


def test_alpaca_history_comes_first() -> None:
    row = {"instruction": "c", "history": [["a", "b"]], "system": "s", "response": "d"}
    spoken = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns(read("alpaca", row)) == spoken


def test_alpaca_skips_with_a_reason() -> None:
    assert reason("alpaca", {"input": "q", "output": "a"}) == "missing_column:instruction"
    assert reason("alpaca", {"instruction": "q", "input": 0}) == "bad_type:input"
    assert reason("alpaca", {"instruction": "q", "history": [["a"]]}) == "bad_type:history"


def step(role: str, text: Any, system_prompt: Any = None) -> dict[str, Any]:
    return {"cutoff_date": None, "mask": False, "role": role, "system_prompt": system_prompt, "text": text}


def test_a_trajectory() -> None:
    row = {"trajectory": [step("system", None, "Be an agent"), step("user", "Fix it"), step("ai", None)]}
    assert turns(read("trajectory", row)) == [
        ("system", "Be an agent"),
        ("user", "Fix it"),
        ("assistant", ""),
    ]
    assert reason("trajectory", {"trajectory": [{"action": "ls"}]}) == "missing_column:role"
    assert reason("trajectory", {"trajectory": HELLO}) == "missing_column:text"


def test_reasoning_in_its_own_column() -> None:
    answer = {"role": "assistant", "content": "14", "reasoning_content": "4+8+2"}
    row = {"problem": "Sum?", "thinking": "4+8+2", "response": "14"}
    assert read("reasoning_pairs", row).messages == [user("Sum?"), answer]
    renamed = {"q": "Sum?", "t": "4+8+2", "a": "14"}
    assert (
        read("reasoning_pairs", renamed, {"problem": "q", "thinking": "t", "response": "a"}).messages[1]
        == answer
    )


def test_reasoning_inside_the_response_is_taken_out() -> None:
    row = {"problem": "Sum?", "response": "<think>\n4+8+2\n</think>\n\n14", "thinking": ""}
    assert read("reasoning_pairs", row).messages[1] == {
        "role": "assistant",
        "content": "14",
        "reasoning_content": "4+8+2",
    }


def test_no_reasoning_is_no_key() -> None:
    row = {"problem": "Sum?", "thinking": " ", "response": "14"}
    assert "reasoning_content" not in read("reasoning_pairs", row).messages[1]
    assert reason("reasoning_pairs", {"problem": "Sum?"}) == "missing_column:response"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("Hi"), {"role": "assistant", "content": "a"}], "rejected": [user("Hi"), HELLO[1]]},
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"prompt": [user("Hi")], "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"prompt": "Hi", "chosen": [user("Hi"), {"role": "assistant", "content": "a"}], "rejected": "b"},
    ],
)
def test_preference_shares_a_prompt(row: Any) -> None:
    assert turns(read("preference", row)) == [("user", "Hi"), ("assistant", "a")]


def test_preference_without_a_common_prompt_has_none() -> None:
    row = {"chosen": [user("Hi"), HELLO[1]], "rejected": [user("Ho"), HELLO[1]]}
    assert read("preference", row).messages == []
    assert reason("preference", {"chosen": "a"}) == "missing_column:rejected"


# --- both kinds of turns in one list ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conversations", "messages"])
def test_turns_of_both_kinds_in_one_list(name: str) -> None:
    nothing = {"from": None, "value": None}
    row = {name: [{"from": "human", "value": "Hi"}, {**HELLO[1], **nothing}], "system": "s"}
    assert turns(read("mixed_turns", row)) == [("system", "s"), ("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"speaker": "x"}]}, "missing_column:role"),
        ({"conversations": [{"from": "laguna_s", "value": "Hi"}]}, "unknown_role:laguna_s"),
        ({"chat": "Hi"}, "missing_column:conversations"),
    ],
)
def test_mixed_turns_skip_with_a_reason(row: Any, expected: str) -> None:
    assert reason("mixed_turns", row) == expected


# --- a chat in one text -------------------------------------------------------------------------------------

IN_ONE_TEXT = [
    (
        "chatml_text",
        "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|endoftext|>",
    ),
    ("chatml_text", "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\nHello"),
    ("inst_text", "<s>[INST] Hi [/INST] Hello </s>"),
    ("inst_text", "[INST]Hi[/INST]Hello</s>"),
    ("instruction_text", "Below is an instruction.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>"),
    ("instruction_text", "###Instruction: Hi\n### Output: Hello"),
    ("dialogue_text", "\n\nHuman: Hi\n\nAssistant: Hello"),
    ("dialogue_text", "### User: Hi\n### Assistant: Hello\n### Human: "),
    (
        "harmony_text",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
    ),
    (
        "harmony_text",
        "<|start|>user<|message|>Hi<|end|>\n<|start|>assistant<|message|>Hello<|end|><|start|>assistant",
    ),
]


@pytest.mark.parametrize(("layout", "text"), IN_ONE_TEXT)
@pytest.mark.parametrize("bare", [True, False])
def test_a_chat_in_one_text(layout: str, text: str, bare: bool) -> None:
    row = text if bare else {"text": text}
    assert turns(read(layout, row))[:2] == [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("layout", "text", "spoken"),
    [
        (
            "chatml_text",
            "<|im_start|>user\nWhat does <|im_start|>user mean?<|im_end|>\n<|im_start|>assistant\n",
            [("user", "What does <|im_start|>user mean?")],
        ),
        (
            "inst_text",
            "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
        (
            "instruction_text",
            "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n3\n\n### Instruction:\nAgain.",
            [("user", "Add.\n\n1, 2"), ("assistant", "3"), ("user", "Again.")],
        ),
        (
            "dialogue_text",
            "System: s\nHuman: is Assistant: a name?\nAssistant:",
            [("system", "s"), ("user", "is Assistant: a name?")],
        ),
    ],
)
def test_marks_are_told_from_words(layout: str, text: str, spoken: list[tuple[str, str]]) -> None:
    assert turns(read(layout, text)) == spoken


@pytest.mark.parametrize(
    ("layout", "text", "expected"),
    [
        ("chatml_text", "Just words.", "bad_type:text"),
        ("chatml_text", "words <|im_start|>user\nHi<|im_end|>", "bad_type:text"),
        ("chatml_text", "<|im_start|>laguna_s\nHi<|im_end|>", "unknown_role:laguna_s"),
        ("inst_text", "Just words.", "bad_type:text"),
        ("inst_text", "[INST] what is [INST]? [/INST] a mark", "damaged_turns"),
        ("inst_text", "Hello [INST] Hi [/INST]", "damaged_turns"),
        ("inst_text", "[INST] Hi", "damaged_turns"),
        ("instruction_text", "Just words.", "bad_type:text"),
        ("instruction_text", "### Response:\nHello", "damaged_turns"),
        ("instruction_text", "### Instruction:\na\n### Instruction:\nb", "damaged_turns"),
        ("dialogue_text", "Once upon a time\nHuman: Hi", "bad_type:text"),
        ("dialogue_text", "Human: write a play\nHuman: Hello\nAssistant: done", "damaged_turns"),
        ("harmony_text", "Just words.", "bad_type:text"),
        ("harmony_text", "<|start|>user<|end|><|start|>user<|message|>Hi<|end|>", "damaged_turns"),
        ("harmony_text", "<|start|>laguna_s<|message|>Hi<|end|>", "unknown_role:laguna_s"),
    ],
)
def test_a_text_without_its_marks_or_with_too_many_is_skipped(layout: str, text: str, expected: str) -> None:
    assert reason(layout, {"text": text}) == expected


@pytest.mark.parametrize(
    "layout", ["chatml_text", "inst_text", "instruction_text", "dialogue_text", "harmony_text"]
)
@pytest.mark.parametrize("text", ["", " \n", None])
def test_a_blank_text_is_an_empty_conversation(layout: str, text: Any) -> None:
    assert read(layout, {"text": text}).messages == []


# --- channels -----------------------------------------------------------------------------------------------

REASONED = [user("2 + 2?"), {"role": "assistant", "content": "4", "reasoning_content": "Easy."}]


@pytest.mark.parametrize(
    "spoken",
    [
        [{"role": "assistant_analysis", "content": "Easy."}, {"role": "assistant_final", "content": "4"}],
        [
            {"role": "assistant", "channel": "analysis", "content": "Easy."},
            {"role": "assistant", "channel": "final", "content": "4"},
        ],
        [{"role": "assistant", "content": "4", "thinking": "Easy."}],
    ],
)
def test_what_is_said_on_analysis_is_reasoning(spoken: list[Any]) -> None:
    assert read("harmony_messages", {"messages": [user("2 + 2?"), *spoken]}).messages == REASONED
    assert read("harmony_messages", {"conversations": [user("2 + 2?"), *spoken]}).messages == REASONED


def test_reasoning_that_leads_to_no_words_stays_where_it_is() -> None:
    analysis = {"role": "assistant_analysis", "content": "Hm."}
    silent = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert read("harmony_messages", {"messages": [user("a"), analysis, user("b"), analysis]}).messages == [
        *(user("a"), silent, user("b"), silent)
    ]
    assert reason(
        "harmony_messages", {"messages": [user("a"), {"role": "assistant_aside", "content": "x"}]}
    ) == ("unknown_role:assistant_aside")


def test_a_harmony_text_with_reasoning_a_call_and_its_result() -> None:
    text = (
        "<|start|>system<|message|>Be brief<|end|><|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ask.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Turku"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Rain.<|return|>"
    )
    assert read("harmony_text", {"text": text}).messages == [
        {"role": "system", "content": "Be brief"},
        user("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [IN_TURKU], "reasoning_content": "Ask."},
        {"role": "tool", "content": "rain", "name": "weather"},
        {"role": "assistant", "content": "Rain."},
    ]


# --- prompts and their completions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Ho"},
        {"prompt": HELLO[:1], "completion": None, "chosen": HELLO[1]},
        {"prompt": json.dumps(HELLO[:1]), "completion": HELLO},
    ],
)
def test_a_prompt_is_a_text_or_a_list_from_row_to_row(row: Any) -> None:
    assert turns(read("prompt_messages", row)) == [("user", "Hi"), ("assistant", "Hello")]


def test_a_prompt_may_have_system_and_tools_beside_it() -> None:
    conversation = read("prompt_messages", {"prompt": "[Hi]", "system": "s", "tools": [WEATHER]})
    assert turns(conversation) == [("system", "s"), ("user", "[Hi]")]
    assert conversation.tools == [WEATHER_TOOL]
    assert turns(read("prompt_messages", {"prompt": None})) == [("user", "")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": ["Hi"]}, "bad_type:prompt"),
        ({"prompt": 3}, "bad_type:prompt"),
        ({"prompt": [{"from": "human", "value": "Hi"}]}, "missing_column:role"),
        ({"completion": "Hi"}, "missing_column:prompt"),
    ],
)
def test_prompt_messages_skip_with_a_reason(row: Any, expected: str) -> None:
    assert reason("prompt_messages", row) == expected


# --- lists of texts -----------------------------------------------------------------------------------------


def test_texts_are_spoken_in_turn_or_by_the_user_alone() -> None:
    assert turns(read("string_list", {"data": ["a", "b", "c"]})) == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert turns(read("user_turns", {"turns": ["a", "b"], "system": "s"})) == [
        *(("system", "s"), ("user", "a"), ("user", "b"))
    ]


@pytest.mark.parametrize(("layout", "name"), [("string_list", "data"), ("user_turns", "turns")])
def test_a_text_in_place_of_a_list_is_refused(layout: str, name: str) -> None:
    for value in ("Hi", '["Hi"]', [["Hi"]], [user("Hi")], None):
        assert reason(layout, {name: value}) == f"bad_type:{name}"
    assert read(layout, {name: [], "system": "s"}).messages == []


# --- beside, below and before the first turn ----------------------------------------------------------------


@pytest.mark.parametrize("conversation", [HELLO[:1], [HELLO[:1]], json.dumps(HELLO[:1])])
@pytest.mark.parametrize("answer", [HELLO[1], "Hello", {"content": "Hello"}])
def test_a_generated_message_beside_the_conversation(conversation: Any, answer: Any) -> None:
    row = {"conversation": conversation, "generated_message": answer}
    assert turns(read("generated_message", row)) == [("user", "Hi"), ("assistant", "Hello")]


def test_a_generated_message_skips_with_a_reason() -> None:
    assert turns(read("generated_message", {"conversation": HELLO[:1]})) == [("user", "Hi")]
    assert reason("generated_message", {"conversation": ["Hi"]}) == "bad_type:conversation"
    assert reason("generated_message", {"conversation": [{"human": "Hi"}]}) == "missing_column:role"


RESPONSE = {"choices": [{"index": 0, "message": HELLO[1], "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"messages": HELLO[:1]}, "response": RESPONSE},
        {"request": {"body": {"messages": HELLO[:1]}}, "response": {"status_code": 200, "body": RESPONSE}},
        {"request": json.dumps({"messages": HELLO[:1]}), "response": json.dumps(RESPONSE)},
        {"request": {"messages": HELLO[:1]}, "response": {"body": json.dumps(RESPONSE)}},
    ],
)
def test_a_request_and_its_response(row: Any) -> None:
    assert turns(read("request_log", row)) == [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize("response", [None, {}, {"error": {"code": 500}}, {"choices": []}, {"choices": [{}]}])
def test_a_request_that_failed_has_no_answer(response: Any) -> None:
    row = {"body": {"messages": HELLO[:1], "tools": [WEATHER]}, "response": response}
    conversation = read("request_log", row, {"request": "body"})
    assert turns(conversation) == [("user", "Hi")]
    assert conversation.tools == [WEATHER_TOOL]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"request": "What is 2+2?", "response": "4"}, "bad_type:request"),
        ({"request": {"prompt": "Hi"}}, "missing_column:request.messages"),
        ({"request": {"messages": "Hi"}}, "bad_type:messages"),
        ({"request": {"messages": HELLO}, "response": 4}, "bad_type:response"),
    ],
)
def test_request_logs_skip_with_a_reason(row: Any, expected: str) -> None:
    assert reason("request_log", row) == expected


def test_a_history_comes_before_the_question() -> None:
    row = {"query": "c", "history": [["a", "b"]], "system": "s", "response": "d"}
    spoken = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert turns(read("history_pairs", row)) == spoken
    assert turns(read("history_pairs", {"query": "c", "history": None})) == [("user", "c")]
    assert reason("history_pairs", {"query": "c", "history": [["a"]]}) == "bad_type:history"
    assert reason("history_pairs", {"instruction": "c"}) == "missing_column:query"


def tree(role: str, text: Any, *replies: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "text": text, "replies": list(replies), **more}


def test_a_tree_is_followed_along_its_best_replies() -> None:
    prompt = tree(
        "prompter",
        "Hi",
        tree("assistant", "worse", rank=1),
        tree("assistant", "gone", rank=0, deleted=True),
        tree("assistant", "Hello", tree("prompter", "Bye"), tree("prompter", "again"), rank=0),
        tree("assistant", "unranked", rank=None),
    )
    assert turns(read("message_tree", {"prompt": prompt})) == [
        *(("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", "bad_type:prompt"),
        ({"text": "Hi"}, "missing_column:role"),
        (tree("prompter", "Hi", "Hello"), "bad_type:prompt"),
        (tree("prompter", "Hi", tree("laguna_s", "Hello")), "unknown_role:laguna_s"),
    ],
)
def test_trees_skip_with_a_reason(prompt: Any, expected: str) -> None:
    assert reason("message_tree", {"prompt": prompt}) == expected


def test_of_single_messages_those_that_answer_none_are_prompts() -> None:
    row = {"text": "Hi", "role": "prompter", "parent_id": None, "deleted": False}
    assert turns(read("message_rows", row)) == [("user", "Hi")]
    assert reason("message_rows", row | {"parent_id": "m1"}) == "not_a_root"
    assert reason("message_rows", row | {"deleted": True}) == "deleted"
    assert reason("message_rows", {"text": "Hi", "role": "prompter"}) == "missing_column:parent_id"


# --- token ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, True], "labels": None},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": "[5, 6, 7]", "loss_mask": "[0, 1, 1]"},
    ],
)
def test_tokens_pass_through(row: Any) -> None:
    conversation = read("pretokenized", row)
    assert conversation.tokens == base.Tokens([5, 6, 7], [0, 1, 1])
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [5, 6]}, "missing_column:loss_mask"),
        ({"loss_mask": [1]}, "missing_column:input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "length_mismatch:loss_mask"),
        ({"input_ids": [5, 6], "labels": [-100, 6, 7]}, "length_mismatch:labels"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "bad_type:labels"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "bad_type:loss_mask"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0.5]}, "bad_type:loss_mask"),
        ({"input_ids": [[5, 6]], "loss_mask": [[0, 1]]}, "bad_type:input_ids"),
        ({"input_ids": [5, True], "loss_mask": [0, 1]}, "bad_type:input_ids"),
        ({"input_ids": [5, -1], "loss_mask": [0, 1]}, "bad_type:input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "no_supervised_text"),
        ({"input_ids": [], "loss_mask": []}, "no_supervised_text"),
    ],
)
def test_tokens_skip_with_a_reason(row: Any, expected: str) -> None:
    assert reason("pretokenized", row) == expected


# --- pictures -----------------------------------------------------------------------------------------------

PICTURES = [
    ("messages", {"messages": [user("<image>\nWho is it?")]}),
    ("messages", {"messages": [user("Who is it?\n<image>")]}),
    ("messages", {"messages": [user("Who is it?")], "image": "a.png"}),
    (
        "messages",
        {"messages": [user([{"type": "image", "image": "x"}, {"type": "text", "text": "Who is it?"}])]},
    ),
    ("messages", {"messages": [user([{"image": "x"}, {"text": "Who is it?"}])]}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "<video>Who is it?"}], "video_path": "a.mp4"}),
    ("history_pairs", {"query": "<img>https://a.example/b.png</img>Who is it?"}),
    ("user_turns", {"turns": ["Who is it?"], "images": ["a.png"]}),
    ("alpaca", {"instruction": "Who is it?", "audio_url": "https://a.example/b.wav"}),
]


@pytest.mark.parametrize(("layout", "row"), PICTURES)
def test_pictures_are_refused_unless_the_text_alone_will_do(layout: str, row: Any) -> None:
    assert reason(layout, row) == "multimodal"
    text, had_media = without_media(row)
    assert had_media
    assert turns(read(layout, text)) == [("user", "Who is it?")]


@pytest.mark.parametrize(
    "words",
    ["What does <image> mean in this XML?", "<img src='a.png'> or <image/>?", "is a < b?", "use <|image|>"],
)
def test_words_about_pictures_are_text(words: str) -> None:
    row = {"messages": [user(words)], "image": None, "images": []}
    assert turns(read("messages", row)) == [("user", words)]
    assert without_media({"messages": [user(words)]}) == ({"messages": [user(words)]}, False)


# --- whatever comes -----------------------------------------------------------------------------------------

COLUMNS = sorted({c for name in NAMES for c in (*load_layout(name).COLUMNS, *load_layout(name).OPTIONAL)})
KEYS = [
    *("role", "from", "content", "value", "text", "system_prompt", "tool_calls", "function", "name", "type"),
    *("messages", "body", "choices", "message", "replies", "rank", "channel", "thinking"),
]
WORDS = st.one_of(
    st.sampled_from([*ROLES, *CALLED.split(), CALLED, DECLARED, "[", "text", "image"]),
    st.sampled_from([text for _, text in IN_ONE_TEXT]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, *PAIR_FIELDS.values()]), inner, max_size=4)
    ),
    max_leaves=12,
)
ROWS = VALUES | st.dictionaries(st.sampled_from([*COLUMNS, "problem", "solution"]), VALUES, max_size=5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(row=ROWS)
def test_any_row_is_a_conversation_or_skipped_with_a_reason(name: str, row: Any) -> None:
    before = repr(row)
    try:
        conversation = read(name, row, PAIR_FIELDS if name == "pairs" else {})
    except SkipRow as skip:
        assert skip.reason
    else:
        for made in conversation.messages:
            assert made["role"] in ("system", "user", "assistant", "tool")
            assert isinstance(made["content"], str)
    assert repr(row) == before


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), max_size=5))
def test_the_same_conversation_in_any_layout(spoken: list[tuple[str, str]]) -> None:
    as_messages = [{"role": role, "content": text} for role, text in spoken]
    as_sharegpt = [{"from": role, "value": text} for role, text in spoken]
    as_steps = [step(role, text) for role, text in spoken]
    assert turns(read("messages", {"messages": as_messages})) == spoken
    assert turns(read("sharegpt", {"conversations": as_sharegpt})) == spoken
    if all(role != "system" or text.strip() for role, text in spoken):
        assert turns(read("trajectory", {"trajectory": as_steps})) == spoken


WORDS_ALONE = st.text(
    st.characters(categories=["L", "N"], include_characters=" ,.é猫"), min_size=1, max_size=12
)
SAID = WORDS_ALONE.map(str.strip).filter(bool)


def written_in(layout: str, pairs: list[tuple[str, str]]) -> Any:
    """A row of the layout with these questions and answers."""
    *before, (last, end) = pairs
    spoken = [made for pair in pairs for made in (user(pair[0]), {"role": "assistant", "content": pair[1]})]
    texts = [text for pair in pairs for text in pair]
    tree_of_last: list[Any] = []
    for made in reversed(spoken):
        tree_of_last = [tree(made["role"], made["content"], *tree_of_last)]
    rows: dict[str, Any] = {
        "messages": {"messages": json.dumps(spoken)},
        "harmony_messages": {"messages": spoken},
        "sharegpt": {"conversations": [{"from": made["role"], "value": made["content"]} for made in spoken]},
        "mixed_turns": {"messages": spoken},
        "trajectory": {"trajectory": [step(made["role"], made["content"]) for made in spoken]},
        "prompt_messages": {"prompt": spoken[:-1], "completion": end},
        "preference": {
            "chosen": spoken,
            "rejected": [*spoken[:-1], {"role": "assistant", "content": end + "!"}],
        },
        "string_list": {"data": texts},
        "generated_message": {"conversation": spoken[:-1], "generated_message": spoken[-1]},
        "turn_pairs": {"conversation": [{"human": asked, "assistant": said} for asked, said in pairs]},
        "request_log": {
            "request": {"messages": spoken[:-1]},
            "response": {"choices": [{"message": spoken[-1]}]},
        },
        "history_pairs": {"query": last, "response": end, "history": [list(pair) for pair in before]},
        "alpaca": {"instruction": last, "output": end, "history": [list(pair) for pair in before]},
        "message_tree": {"prompt": tree_of_last[0]},
        "chat_string": {
            "chat": "".join(f"USER: {asked}\n\nASSISTANT: {said} <|endoftext|>\n\n" for asked, said in pairs)
        },
        "chatml_text": "".join(
            f"<|im_start|>{made['role']}\n{made['content']}<|im_end|>\n" for made in spoken
        ),
        "harmony_text": "".join(
            f"<|start|>{made['role']}<|message|>{made['content']}<|end|>" for made in spoken
        ),
        "inst_text": "".join(f"<s>[INST] {asked} [/INST] {said} </s>" for asked, said in pairs),
        "instruction_text": "".join(
            f"\n### Instruction:\n{asked}\n### Response:\n{said}" for asked, said in pairs
        ),
        "dialogue_text": "".join(f"\n\nHuman: {asked}\n\nAssistant: {said}" for asked, said in pairs),
    }
    return rows[layout]


MANY_TURNS = [
    *("alpaca", "chat_string", "chatml_text", "dialogue_text", "generated_message", "harmony_messages"),
    *(
        "harmony_text",
        "history_pairs",
        "inst_text",
        "instruction_text",
        "message_tree",
        "messages",
        "mixed_turns",
    ),
    *("preference", "prompt_messages", "request_log", "sharegpt", "string_list", "trajectory", "turn_pairs"),
]


@settings(max_examples=20)
@given(pairs=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3))
def test_every_layout_gives_the_same_conversation(pairs: list[tuple[str, str]]) -> None:
    expected = [turn for asked, said in pairs for turn in (("user", asked), ("assistant", said))]
    for layout in MANY_TURNS:
        assert turns(read(layout, written_in(layout, pairs))) == expected, layout
