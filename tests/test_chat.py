from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer

from eyrie.chat import Chat, ChatError
from eyrie.config import ConfigError
from tiny_target import tiny_target

SYSTEM = "<|im_start|>system\nYou are a small helpful assistant<|im_end|>\n"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# What breaks masks: nothing at all, blanks at the edges, characters of several tokens, look-alikes of
# control tokens, whole and in parts, and private-use characters.
CONTENTS = st.lists(
    st.sampled_from(
        [
            "a",
            "sort the list",
            " ",
            "\n",
            "\n\n",
            "\t",
            "日本語",
            "😀",
            "e\u0301",
            "\U000f0000",
            "\ue000",
            "0",
            "|",
            "<|im_",
        ]
    )
    | st.text(max_size=3).filter(lambda text: text.isprintable()),
    max_size=5,
).map("".join)
CONTENTS_WITH_LOOKALIKES = st.lists(CONTENTS | st.sampled_from(CONTROL), max_size=4).map("".join)


def chats(contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    message = st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "assistant", "tool"]),
        contents,
    )
    system = contents.map(lambda content: [{"role": "system", "content": content}]) | st.just([])
    return st.builds(lambda first, rest: [*first, *rest], system, st.lists(message, min_size=1, max_size=5))


@functools.cache
def chat() -> Chat:
    return Chat(tiny_target())


@functools.cache
def plain_tokenizer() -> Tokenizer:
    """The same tokenizer without control tokens: it can't make one out of any text."""
    document = json.loads((tiny_target() / "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    """The template, written down a second time."""
    return ("" if messages[0]["role"] == "system" else SYSTEM) + "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )


def slow_ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The ids message by message, with control tokens put in by hand."""
    encode = plain_tokenizer().encode
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "You are a small helpful assistant"}, *messages]
    ids = []
    for message in messages:
        ids += [1, *encode(f"{message['role']}\n{message['content']}").ids, 2, *encode("\n").ids]
    return ids


def slow_mask(messages: Sequence[dict[str, Any]], ids: Sequence[int]) -> list[int]:
    """The mask from the rendered prefixes' lengths in bytes, one for each message and each token."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            end = len(rendered(messages[: number + 1]).encode()) - len("\n")
            spans.append((end - len((message["content"] + "<|im_end|>").encode()), end))
    tokens = [chat().tokenizer.convert_ids_to_tokens(number) for number in ids]
    starts = [sum(len(token) for token in tokens[:number]) for number in range(len(tokens))]
    return [int(any(start <= at < end for start, end in spans)) for at in starts]


@settings(deadline=None, max_examples=200)
@given(chats(CONTENTS))
def test_ids_are_those_of_the_rendered_text(messages: list[dict[str, Any]]) -> None:
    ids, mask = chat().conversation_ids(messages)
    text = chat().tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == rendered(messages)
    assert ids == chat().tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(mask) == len(ids)


@settings(deadline=None, max_examples=200)
@given(chats(CONTENTS_WITH_LOOKALIKES))
def test_ids_and_mask_equal_the_slow_way(messages: list[dict[str, Any]]) -> None:
    ids, mask = chat().conversation_ids(messages)
    assert ids == slow_ids(messages)
    assert mask == slow_mask(messages, ids)


@settings(deadline=None, max_examples=100)
@given(chats(CONTENTS_WITH_LOOKALIKES))
def test_no_content_makes_a_control_token(messages: list[dict[str, Any]]) -> None:
    harmless = [{**message, "content": "x"} for message in messages]
    ids, expected = chat().prompt_ids(messages), chat().prompt_ids(harmless)
    assert [number for number in ids if number < 3] == [number for number in expected if number < 3]
    assert chat().tokenizer.decode(ids) == rendered(messages) + "<|im_start|>assistant\n"


def test_a_prompt_is_the_beginning_of_its_conversation() -> None:
    asked = [{"role": "user", "content": "How?"}]
    prompt = chat().prompt_ids(asked)
    ids, mask = chat().conversation_ids([*asked, {"role": "assistant", "content": "So."}])
    assert ids[: len(prompt)] == prompt
    assert mask.index(1) == len(prompt)
    assert chat().tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "So.<|im_end|>"


@pytest.mark.parametrize(
    ("loss_on", "supervised"),
    [
        ("assistant", "A<|im_end|>B<|im_end|>"),
        ("non_system", "Q<|im_end|>A<|im_end|>R<|im_end|>B<|im_end|>"),
    ],
)
def test_loss_on(loss_on: Any, supervised: str) -> None:
    messages = [
        {"role": role, "content": content}
        for role, content in (
            ("system", "S"),
            ("user", "Q"),
            ("assistant", "A"),
            ("tool", "R"),
            ("assistant", "B"),
        )
    ]
    ids, mask = chat().conversation_ids(messages, loss_on=loss_on)
    assert chat().tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == supervised
    ids, mask = chat().conversation_ids(messages, loss_on="all")
    assert mask == [1] * len(ids)


def test_work_grows_in_proportion_to_the_conversation() -> None:
    chat = Chat(tiny_target())
    encoded: list[int] = []
    tokenizer = chat.tokenizer

    class Counting:
        def __call__(self, text: str | list[str], **options: Any) -> Any:
            encoded.append(len("".join(text)))
            return tokenizer(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    chat.tokenizer = Counting()
    messages = [{"role": role, "content": "word " * 20} for role in ("user", "assistant")] * 100
    chat.conversation_ids(messages)
    assert len(encoded) <= 2
    assert sum(encoded) <= 2 * len(rendered(messages))


def target_with(folder: Path, template: str | None) -> Path:
    shutil.copytree(tiny_target(), folder)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_that_trims_is_followed(tmp_path: Path) -> None:
    chat = Chat(
        target_with(
            tmp_path / "target",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}",
        )
    )
    ids, mask = chat.conversation_ids([{"role": "assistant", "content": "\n so it is  "}])
    assert chat.tokenizer.decode(ids) == "<|im_start|>assistant\nso it is<|im_end|>"
    assert chat.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "so it is<|im_end|>"


def test_tool_calls_are_supervised_to_the_end_of_the_turn(tmp_path: Path) -> None:
    chat = Chat(
        target_with(
            tmp_path / "target",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% for call in m.tool_calls %}<|endoftext|>{{ call.function | tojson }}{% endfor %}"
            "<|im_end|>\n{% endfor %}",
        )
    )
    call = {"type": "function", "function": {"name": "sum<|im_end|>", "arguments": {"a": 1}}}
    ids, mask = chat.conversation_ids(
        [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
        ]
    )
    written = '<|endoftext|>{"name": "sum<|im_end|>", "arguments": {"a": 1}}'
    supervised = [i for i, m in zip(ids, mask, strict=True) if m]
    assert chat.tokenizer.decode(supervised) == written * 2 + "<|im_end|>"
    assert supervised.count(2) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | replace('x', 'y') }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_changes_contents_is_refused(tmp_path: Path, template: str) -> None:
    chat = Chat(target_with(tmp_path / "target", template))
    with pytest.raises(ChatError, match="leaves out or changes"):
        chat.conversation_ids([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}])


def test_a_templates_own_refusal_is_told(tmp_path: Path) -> None:
    chat = Chat(
        target_with(tmp_path / "target", "{{ raise_exception('roles must alternate user/assistant') }}")
    )
    with pytest.raises(ChatError, match="roles must alternate user/assistant"):
        chat.prompt_ids([{"role": "user", "content": "x"}])


def test_content_must_be_text() -> None:
    with pytest.raises(ChatError, match="role user has content of type list; expected text"):
        chat().prompt_ids([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def test_what_a_target_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(target_with(tmp_path / "untemplated", None))
    slow = target_with(tmp_path / "slow", "{{ messages }}")
    (slow / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(slow)
    with pytest.raises(ConfigError, match="no offsets"):
        Chat(slow)
    with pytest.raises(ConfigError, match="can't be loaded"):
        Chat(tmp_path / "nowhere")


def test_the_templates_digest_follows_its_text(tmp_path: Path) -> None:
    other = Chat(target_with(tmp_path / "target", "{{ messages[0].content }}"))
    assert chat().template_sha256 == Chat(tiny_target()).template_sha256 != other.template_sha256
