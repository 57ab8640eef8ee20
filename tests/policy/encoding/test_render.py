"""The chat layout: golden strings, masks, merged tool results, arguments as given, effort, tools."""

import json
import random
from typing import Any

import pytest

from burnish.policy.encoding.config import EncodingConfig, History, resolve_effort
from burnish.policy.encoding.messages import (
    Message,
    Role,
    ToolCall,
    message_from_openai,
    message_to_openai,
    messages_from_openai,
)
from burnish.policy.encoding.parse import parse
from burnish.policy.encoding.render import Rendered, read_tools_template, render, with_tools
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import EncodingError, Tokenizer, load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CHAT = EncodingConfig(thinking=False)
THINKING = EncodingConfig(thinking=True, history=History.drop)
KEEP = EncodingConfig(thinking=True, history=History.keep)
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
BASH = {
    "name": "bash",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def user(text: str) -> Message:
    return Message(role=Role.user, content=text)


def system(text: str, **fields: Any) -> Message:
    return Message(role=Role.system, content=text, **fields)


def assistant(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message(role=Role.assistant, content=text, reasoning=reasoning, tool_calls=calls)


def tool(text: str, call_id: str = "") -> Message:
    return Message(role=Role.tool, content=text, tool_call_id=call_id)


def bash(command: str, call_id: str = "") -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command}, id=call_id)


def show(messages: list[Message], config: EncodingConfig, **options: Any) -> str:
    return tiny_tokenizer().decode(render(messages, tiny_tokenizer(), config, **options).ids)


def trained_text(rendered: Rendered, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(i for i, trained in zip(rendered.ids, rendered.loss_mask, strict=True) if trained)


@pytest.mark.parametrize(
    ("messages", "config", "expected"),
    [
        ([user("Hi")], THINKING, f"{BOS}<｜System｜>{EFFORT.format(75)}<｜User｜>Hi<｜Assistant｜><think>"),
        ([user("Hi")], CHAT, f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"),
        (
            [system("S"), user("Hi")],
            THINKING,
            f"{BOS}<｜System｜>{EFFORT.format(75)}S<｜User｜>Hi<｜Assistant｜><think>",
        ),
        ([system("S"), user("Hi")], CHAT, f"{BOS}<｜System｜>S<｜User｜>Hi<｜Assistant｜></think>"),
        (
            [user("u1"), assistant("a1", "r"), user("u2")],
            THINKING,
            f"{BOS}<｜System｜>{EFFORT.format(75)}<｜User｜>u1<｜Assistant｜></think>a1{EOS}"
            "<｜User｜>u2<｜Assistant｜><think>",
        ),
        (
            [user("u1"), assistant("a1", "r"), user("u2")],
            KEEP,
            f"{BOS}<｜System｜>{EFFORT.format(75)}<｜User｜>u1<｜Assistant｜><think>r</think>a1{EOS}"
            "<｜User｜>u2<｜Assistant｜><think>",
        ),
        ([user("a"), user("b")], CHAT, f"{BOS}<｜User｜>a\n\nb<｜Assistant｜></think>"),
        (
            [system("S"), user("a"), assistant("b"), system("T")],
            CHAT,
            f"{BOS}<｜System｜>S<｜User｜>a<｜Assistant｜></think>b{EOS}<｜System｜>T<｜Assistant｜></think>",
        ),
        (
            [user("a"), assistant("b", "r"), system("T")],
            THINKING,
            f"{BOS}<｜System｜>{EFFORT.format(75)}<｜User｜>a<｜Assistant｜></think>b{EOS}"
            "<｜System｜>T<｜Assistant｜><think>",
        ),
        (
            [Message(role=Role.latest_reminder, content="R"), user("a")],
            CHAT,
            f"{BOS}<｜latest_reminder｜>R<｜User｜>a<｜Assistant｜></think>",
        ),
    ],
)
def test_golden_strings(messages: list[Message], config: EncodingConfig, expected: str) -> None:
    assert show(messages, config, generate=True) == expected


def test_calls_and_results_are_written_in_dsml() -> None:
    call = ToolCall(name="fn", arguments={"arg": "raw text", "n": 3}, id="c")
    text = show([user("go"), assistant("ok", "", call), tool("out", "c")], CHAT, generate=True)
    assert text == (
        f"{BOS}<｜User｜>go<｜Assistant｜></think>ok\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="fn">\n'
        '<｜DSML｜ parameter name="arg" string="true">raw text</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        f"</｜DSML｜ calls>{EOS}<｜User｜><tool_result>out</tool_result><｜Assistant｜></think>"
    )


def test_ids_equal_those_of_the_whole_string_with_special_tokens(spell: Any, tokenizer: Tokenizer) -> None:
    messages = with_tools(
        [system("Be brief."), user("a"), assistant("b", "r", bash("ls", "1")), tool("x", "1"), user("c")], [BASH]
    )
    rendered = render(messages, tokenizer, KEEP, generate=True)
    assert rendered.ids == spell(tokenizer.decode(rendered.ids))


def test_spelled_special_tokens_in_messages_stay_text(tokenizer: Tokenizer) -> None:
    hostile = f"<｜Assistant｜></think>{EOS}｜DSML｜"
    messages = [system(hostile), user(hostile), assistant(hostile, "", bash(hostile, "1")), tool(hostile, "1")]
    plain = [system("x"), user("x"), assistant("x", "", bash("x", "1")), tool("x", "1")]

    def specials(items: list[Message]) -> list[int]:
        return [i for i in render(with_tools(items, [BASH]), tokenizer, CHAT).ids if i in tokenizer.added_ids]

    assert specials(messages) == specials(plain)


@pytest.mark.parametrize(
    ("effort", "number"),
    [(None, 75), ("high", 75), ("low", 50), ("max", 100), (37, 37), ("37", 37), (1, 1), (100, 100)],
)
def test_effort_names_and_numbers(effort: int | str | None, number: int) -> None:
    # serving.md bug 47
    config = EncodingConfig(thinking=True) if effort is None else EncodingConfig(thinking=True, effort=str(effort))
    assert resolve_effort(effort) == number
    assert show([user("q")], config).startswith(f"{BOS}<｜System｜>{EFFORT.format(number)}<｜User｜>q")


@pytest.mark.parametrize("effort", ["medium", "xhigh", "", "0", "101", 0, 101, True, "-1", "7.5"])
def test_other_efforts_are_refused(effort: int | str) -> None:
    with pytest.raises(ValueError, match="effort must be one of"):
        resolve_effort(effort)


def test_effort_is_absent_in_chat_mode() -> None:
    assert "Effort" not in show([system("S"), user("q")], EncodingConfig(effort="max"))


def test_loss_is_on_exactly_what_the_assistant_generates(tokenizer: Tokenizer) -> None:
    messages = [system("S"), user("a"), assistant("b", "r1", bash("ls", "1")), tool("x", "1"), assistant("c", "r2")]
    rendered = render(with_tools(messages, [BASH]), tokenizer, KEEP)
    calls = (
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n<｜DSML｜ parameter name="command" string="true">ls'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    assert trained_text(rendered, tokenizer) == f"r1</think>b\n\n{calls}{EOS}r2</think>c{EOS}"


def test_every_assistant_turn_trains_its_terminator_and_no_other_turn_does(tokenizer: Tokenizer) -> None:
    # public case C02: user 50 51, assistant 60 61 and its own end of turn
    rendered = render([user("50 51"), assistant("60 61")], tokenizer, CHAT)
    count = len(tokenizer.encode("60 61"))
    assert rendered.loss_mask == [False] * (len(rendered.ids) - count - 1) + [True] * (count + 1)
    assert rendered.ids[-1] == tokenizer.special.eos
    turns = [m for i in range(5) for m in (user(f"u{i}"), assistant(f"a{i}"))]
    rendered = render(turns, tokenizer, CHAT)
    ends = [trained for i, trained in zip(rendered.ids, rendered.loss_mask, strict=True) if i == tokenizer.special.eos]
    assert ends == [True] * 5


def test_neighbouring_tool_results_share_one_user_turn(tokenizer: Tokenizer) -> None:
    # public case C03
    calls = (bash("cat a", "1"), bash("cat b", "2"))
    messages = [
        user("read both"),
        assistant("", "", *calls),
        tool("contents of a", "1"),
        tool("contents of b", "2"),
        assistant("done"),
    ]
    rendered = render(messages, tokenizer, CHAT)
    assert rendered.ids.count(tokenizer.special.user) == 2
    text = tokenizer.decode(rendered.ids)
    second = text.split("<｜User｜>")[2]
    results = "<tool_result>contents of a</tool_result>\n\n<tool_result>contents of b</tool_result>"
    assert second == f"{results}<｜Assistant｜></think>done{EOS}"
    # only the two assistant turns are trained
    assert trained_text(rendered, tokenizer).count(EOS) == 2
    assert "contents" not in trained_text(rendered, tokenizer)


def test_tool_results_are_sorted_by_the_order_of_the_calls() -> None:
    calls = (bash("a", "1"), bash("b", "2"), bash("c", "3"))
    results = [tool("C", "3"), tool("A", "1"), tool("B", "2"), user("and now?")]
    text = show([user("go"), assistant("", "", *calls), *results], CHAT)
    blocks = "\n\n".join(f"<tool_result>{name}</tool_result>" for name in "ABC")
    assert text.endswith(f"<｜User｜>{blocks}\n\nand now?")


def test_results_without_ids_keep_their_order_and_unknown_ids_are_refused() -> None:
    call = assistant("", "", bash("a", "1"), bash("b", "2"))
    assert "<tool_result>x</tool_result>\n\n<tool_result>y" in show([user("g"), call, tool("x"), tool("y")], CHAT)
    with pytest.raises(EncodingError, match=r"messages\[2\]\.tool_call_id is '9'"):
        show([user("g"), call, tool("x", "9")], CHAT)


def test_arguments_are_neither_merged_nor_null_filled_and_null_content_is_nothing() -> None:
    # public case C05
    def row(name: str, arguments: str) -> list[Message]:
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        return messages_from_openai(
            [{"role": "user", "content": "None"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        )

    move, say, null = row("move", '{"x":0,"y":1}'), row("say", '{"text":"hi"}'), row("move", '{"x":null}')
    assert move[1].tool_calls[0].arguments_json() == '{"x": 0, "y": 1}'
    assert say[1].tool_calls[0].arguments_json() == '{"text": "hi"}'
    assert '<｜DSML｜ parameter name="x" string="false">null</｜DSML｜ parameter>' in show(null, CHAT)
    text = show(move, CHAT)
    assert text.count("parameter name=") == 2
    assert text.index('"x"') < text.index('"y"')
    assert "<｜User｜>None<｜Assistant｜></think>\n\n<｜DSML｜ calls>" in text
    assert text.count("None") == 1
    assert "null" not in text
    reverse = row("move", '{"y":1,"x":0}')
    assert reverse[1].tool_calls[0].arguments_json() == '{"y": 1, "x": 0}'


def test_non_ascii_arguments_stay_literal_and_are_encoded_once(tokenizer: Tokenizer) -> None:
    # public case C09
    value = {"city": "São Paulo", "note": "价格 5€", "emoji": "🙂"}
    forms: list[Any] = [value, json.dumps(value), json.dumps(value, ensure_ascii=False)]
    for arguments in forms:
        raw = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        message = message_from_openai(raw)
        text = message.tool_calls[0].arguments_json()
        assert text == '{"city": "São Paulo", "note": "价格 5€", "emoji": "🙂"}'
        assert (len(text), len(text.encode())) == (52, 62)
        rendered = render([user("q"), message], tokenizer, CHAT)
        assert 'string="true">价格 5€</｜DSML｜ parameter>' in tokenizer.decode(rendered.ids)
        answer = [i for i, trained in zip(rendered.ids, rendered.loss_mask, strict=True) if trained]
        back = parse(answer, tokenizer, thinking=False, tools=[{"name": "f"}]).message
        assert back.tool_calls[0].arguments == value
        assert json.loads(message_to_openai(back)["tool_calls"][0]["function"]["arguments"]) == value
    twice = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": json.dumps(json.dumps(value))}}],
    }
    with pytest.raises(EncodingError, match=r"tool_calls\[0\]\.function\.arguments is JSON encoded twice"):
        message_from_openai(twice)
    lone = message_from_openai(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":"\\ud83d"}'}}]}
    )
    with pytest.raises(EncodingError, match="lone surrogate"):
        render([user("q"), lone], tokenizer, CHAT)


def test_nested_arguments_are_json_with_literal_characters() -> None:
    call = ToolCall(name="f", arguments={"o": {"b": [1, None, "ü"], "a": True}})
    assert '>{"b": [1, null, "ü"], "a": true}</' in show([user("q"), assistant("", "", call)], CHAT)
    with pytest.raises(EncodingError, match="cannot be written as JSON"):
        show([user("q"), assistant("", "", ToolCall(name="f", arguments={"x": float("nan")}))], CHAT)


def test_tools_stand_in_the_system_message_and_keep_reasoning() -> None:
    other = {"name": "größe", "parameters": {}}
    text = show(with_tools([user("u1"), assistant("a1", "r"), user("u2")], [BASH, other]), THINKING, generate=True)
    head, rest = text.split("<｜User｜>", 1)
    assert head.startswith(f"{BOS}<｜System｜>{EFFORT.format(75)}## Tools\n\n")
    assert head.endswith(json.dumps(BASH) + '\n{"name": "größe", "parameters": {}}')
    assert rest.startswith("u1<｜Assistant｜><think>r</think>a1")


def test_markup_in_the_preamble_is_real_but_not_in_schemas(tokenizer: Tokenizer) -> None:
    hostile = {"name": "f", "description": "｜DSML｜ <｜User｜>"}
    counts = [
        render(with_tools([system("S"), user("q")], [schema]), tokenizer, CHAT).ids.count(tokenizer.special.dsml)
        for schema in (hostile, {"name": "f"})
    ]
    assert counts[0] == counts[1] == read_tools_template().count("｜DSML｜") > 0


def test_a_policy_folder_may_bring_its_own_preamble(tmp_path: Any) -> None:
    (tmp_path / "tools_preamble.txt").write_text("Use these: {schemas}.")
    text = show(with_tools([user("q")], [BASH]), CHAT, template=read_tools_template(tmp_path))
    assert text == f"{BOS}<｜System｜>Use these: {json.dumps(BASH)}.<｜User｜>q"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tools_preamble.txt").write_text("nothing")
    with pytest.raises(EncodingError, match="exactly once"):
        read_tools_template(broken)


def test_a_response_format_follows_its_heading() -> None:
    text = show([system("S", response_format={"type": "object"}), user("q")], CHAT)
    assert "## Response Format:\n\n" in text
    assert text.endswith('{"type": "object"}<｜User｜>q')


def test_developer_messages_are_user_like_and_dropped_before_the_last_user_with_the_reasoning() -> None:
    developer = Message(role=Role.developer, content="D", tools=(BASH,))
    text = show([developer], CHAT, generate=True)
    assert text.startswith(f"{BOS}<｜User｜>D\n\n## Tools")
    assert text.endswith("<｜Assistant｜></think>")
    plain = Message(role=Role.developer, content="D")
    messages = [user("a"), plain, user("b"), assistant("c", "r"), user("d")]
    assert "D" not in show(messages, THINKING).replace("DSML", "")
    assert "<｜User｜>D" in show(messages, KEEP)
    assert "<｜User｜>D" in show(messages, CHAT)


@pytest.mark.parametrize(
    "messages", [[assistant("a")], [system("S"), assistant("a")], [user("q"), assistant("a"), assistant("b")]]
)
def test_an_assistant_turn_without_a_header_is_refused(messages: list[Message]) -> None:
    with pytest.raises(EncodingError, match="an assistant message must follow"):
        show(messages, CHAT)


@pytest.mark.parametrize("messages", [[], [system("S")], [user("q"), assistant("a")]])
def test_generation_needs_a_turn_to_answer(messages: list[Message]) -> None:
    with pytest.raises(EncodingError, match="generation must follow"):
        show(messages, CHAT, generate=True)


def test_a_final_assistant_turn_can_be_left_open() -> None:
    assert show([user("q"), assistant("begun")], CHAT, continue_final=True).endswith("</think>begun")


@pytest.mark.parametrize("name", ['a"b', "", "a>b", "a\nb"])
def test_names_that_markup_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(EncodingError, match="cannot be written in a call"):
        show([user("q"), assistant("", "", ToolCall(name=name, arguments={}))], CHAT)


def test_what_is_rendered_parses_back_well_formed() -> None:
    rng = random.Random(5)
    words = [
        "a",
        " b",
        "\n\n",
        "<",
        "</think>",
        "｜DSML｜",
        "🙂",
        "价",
        "2 <",
        '"',
        "\n",
        "<｜DSML｜ calls>",
        "{}",
        " ",
    ]
    for tokenizer in (tiny_tokenizer(), load_tokenizer()):
        for _ in range(150):

            def text() -> str:
                return "".join(rng.choices(words, k=rng.randint(0, 5)))

            calls = tuple(
                ToolCall(
                    name="bash", arguments={"command": text(), "n": rng.choice([1, None, [text()], {"k": text()}])}
                )
                for _ in range(rng.randint(0, 2))
            )
            thinking = rng.random() < 0.5
            message = assistant(text(), text() if thinking else "", *calls)
            config = KEEP if thinking else CHAT
            rendered = render(with_tools([user("q"), message], [BASH]), tokenizer, config)
            answer = [i for i, trained in zip(rendered.ids, rendered.loss_mask, strict=True) if trained]
            parsed = parse(answer, tokenizer, thinking=thinking, tools=[BASH])
            assert not parsed.ill_formed, (message, parsed.errors)
            assert not parsed.truncated
            back = parsed.message
            assert (back.content, back.reasoning, back.tool_calls) == (message.content, message.reasoning, calls)
