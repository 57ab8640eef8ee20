"""Reading sampled turns: tool calls under every cut, tolerance with a verdict, nothing held back for ever."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from burnish.policy.encoding.dsml import ParseErrorKind
from burnish.policy.encoding.parse import Delta, Parsed, StreamParser, parse
from burnish.policy.encoding.tokenizer import Tokenizer

Spell = Callable[[str], list[int]]
EOS = "<｜end▁of▁sentence｜>"
BASH = {"name": "bash", "parameters": {"type": "object", "required": ["command"]}}
FREE = {"name": "free"}
TOOLS = [BASH, FREE]
INVOKE = (
    '<｜DSML｜ invoke name="bash">\n<｜DSML｜ parameter name="command" string="true">ls 2>&1</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>"
)
BLOCK = f"<｜DSML｜ calls>\n{INVOKE}\n</｜DSML｜ calls>"


@pytest.fixture
def read(tokenizer: Tokenizer, spell: Spell) -> Callable[..., Parsed]:
    def read(text: str, *, thinking: bool = False, tools: list[dict[str, Any]] = TOOLS) -> Parsed:
        return parse(spell(text), tokenizer, thinking=thinking, tools=tools)

    return read


def by_bytes(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The same text with one token for every byte: a cut at every byte."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    out: list[int] = []
    for token_id in ids:
        raw = tokenizer.token_bytes(token_id)
        out += [token_id] if token_id in tokenizer.added_ids else [single[bytes([byte])] for byte in raw]
    return out


def joined(deltas: list[Delta]) -> tuple[str, str, list[Any]]:
    calls = [delta.call for delta in deltas if delta.call]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def kinds(parsed: Parsed) -> set[str]:
    return {str(error.kind) for error in parsed.errors}


def test_a_plain_answer(read: Callable[..., Parsed]) -> None:
    parsed = read(f"hello{EOS}")
    assert (parsed.message.content, parsed.ill_formed, parsed.truncated) == ("hello", False, False)
    parsed = read("hello")
    assert (parsed.message.content, parsed.ill_formed, parsed.truncated) == ("hello", False, True)


def test_reasoning_content_and_calls(read: Callable[..., Parsed]) -> None:
    message = read(f"why</think>so\n\n{BLOCK}{EOS}", thinking=True).message
    assert (message.reasoning, message.content) == ("why", "so")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("bash", {"command": "ls 2>&1"})]


def test_sampled_ids_are_kept_as_they_are(read: Callable[..., Parsed], tokenizer: Tokenizer, spell: Spell) -> None:
    for text in (f"a\n\n{BLOCK}{EOS}", "cut", f"<｜User｜>{EOS}"):
        assert list(read(text).message.sampled_ids or ()) == spell(text)


@pytest.mark.parametrize("space", [" ", ""])
def test_closing_tags_never_leak_into_arguments(space: str, tokenizer: Tokenizer, spell: Spell) -> None:
    # serving.md bug 43: cut at every byte, in the spelling of either version
    text = f"\n\n{BLOCK}{EOS}".replace("｜DSML｜ ", f"｜DSML｜{space}").replace("｜DSML｜calls", "｜DSML｜ calls")
    ids = by_bytes(spell(text), tokenizer)
    for cut in range(len(ids) + 1):
        parser = StreamParser(tokenizer, thinking=False, tools=TOOLS)
        deltas = [*parser.feed(ids[:cut]), *parser.feed(ids[cut:]), *parser.finish()]
        _, content, calls = joined(deltas)
        assert content == ""
        assert [call.arguments for call in calls] == [{"command": "ls 2>&1"}]
        assert parser.result().ill_formed == (space == "")


def test_an_orphan_invoke_counts_only_when_the_turn_ends_with_it(read: Callable[..., Parsed]) -> None:
    # serving.md bug 44
    for text in (f"{INVOKE}{EOS}", f"Now:\n\n{INVOKE}{EOS}", f"Now:\n{INVOKE}\n</｜DSML｜ calls>{EOS}"):
        parsed = read(text)
        assert [call.arguments for call in parsed.message.tool_calls] == [{"command": "ls 2>&1"}]
        assert parsed.message.content == ("" if text.startswith("<") else "Now:")
        assert kinds(parsed) == {"missing_wrapper"}
    for wrapper in ("toolcalls", "tool_calls", " tool_calls", " function_calls"):
        parsed = read(f"<｜DSML｜{wrapper}>\n{INVOKE}\n</｜DSML｜{wrapper}>{EOS}")
        assert (len(parsed.message.tool_calls), parsed.message.content) == (1, "")
        assert kinds(parsed) == {"missing_wrapper"}


@pytest.mark.parametrize(
    "text",
    [
        f"Write {INVOKE} to list files.",
        f"Like this:\n{INVOKE}\nand then go on.",
        '```\n<｜DSML｜ invoke name="bash">\n```',
        "The opener is <｜DSML｜ invoke name=",
        "<｜DSML｜",
        "a <｜DSML｜ call> b",
        "<｜DSML｜" + "x" * 100,
        INVOKE.replace("bash", "sh"),
        "<｜DSML｜tool_calls>\nno",
    ],
)
def test_prose_that_quotes_markup_is_content(text: str, read: Callable[..., Parsed]) -> None:
    parsed = read(text + EOS)
    assert parsed.message.content == text
    assert parsed.message.tool_calls == ()
    assert parsed.ill_formed


def test_without_tools_nothing_is_parsed(read: Callable[..., Parsed]) -> None:
    parsed = read(f"a\n\n{BLOCK}{EOS}", tools=[])
    assert (parsed.message.content, parsed.message.tool_calls) == (f"a\n\n{BLOCK}", ())
    assert read(f"a\n\n{BLOCK}</think>b{EOS}", tools=[], thinking=True).message.reasoning == f"a\n\n{BLOCK}"


def test_markup_spelled_in_plain_tokens_is_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(f"</think>\n\n{BLOCK}"), tokenizer.special.eos]
    parsed = parse(ids, tokenizer, thinking=False, tools=TOOLS)
    assert (parsed.message.content, parsed.message.tool_calls) == (f"</think>\n\n{BLOCK}", ())
    assert not parsed.ill_formed


def test_a_calls_opener_ends_reasoning(read: Callable[..., Parsed]) -> None:
    # serving.md bug 45
    parsed = read(f"thinking{BLOCK}{EOS}", thinking=True)
    assert (parsed.message.reasoning, parsed.message.content) == ("thinking", "")
    assert len(parsed.message.tool_calls) == 1
    assert "calls_in_reasoning" in kinds(parsed)
    parsed = read(f"not {INVOKE} yet</think>done{EOS}", thinking=True)
    assert (parsed.message.reasoning, parsed.message.content) == (f"not {INVOKE} yet", "done")
    assert parsed.message.tool_calls == ()
    parsed = read(f"a <｜DSML｜ calls</think>done{EOS}", thinking=True)
    assert (parsed.message.reasoning, parsed.message.content) == ("a <｜DSML｜ calls", "done")


@pytest.mark.parametrize(("flag", "value"), [("true", "42"), ("false", 42)])
def test_the_string_flag_decides_the_type(flag: str, value: object, read: Callable[..., Parsed]) -> None:
    # serving.md bug 46
    parameter = f'<｜DSML｜ parameter name="n" string="{flag}">42</｜DSML｜ parameter>'
    text = (
        f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="free">\n{parameter}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}'
    )
    parsed = read(text)
    assert parsed.message.tool_calls[0].arguments == {"n": value}
    assert not parsed.ill_formed


@pytest.mark.parametrize(
    "end", ["2 <", "\n\n", "\n", "\n\n<", "a\n\n<｜DSML｜", "a\n\n<｜DSML｜ cal", "<｜DSML｜ invoke"]
)
@pytest.mark.parametrize("finish", ["", EOS])
@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_held_back_is_flushed_at_the_end(
    end: str, finish: str, thinking: bool, tokenizer: Tokenizer, spell: Spell
) -> None:
    parser = StreamParser(tokenizer, thinking=thinking, tools=TOOLS)
    deltas = [delta for token_id in spell(end + finish) for delta in parser.feed([token_id])]
    reasoning, content, _ = joined([*deltas, *parser.finish()])
    assert (reasoning if thinking else content) == end


def test_text_is_not_held_longer_than_needed(tokenizer: Tokenizer, spell: Spell) -> None:
    parser = StreamParser(tokenizer, thinking=False, tools=TOOLS)
    assert joined(parser.feed(spell("go on"))) == ("", "go on", [])
    assert joined(parser.feed(spell("\n\n<"))) == ("", "", [])
    assert joined(parser.feed(spell("b"))) == ("", "\n\n<b", [])
    plain = StreamParser(tokenizer, thinking=False)
    assert joined(plain.feed(spell("x\n\n<"))) == ("", "x\n\n<", [])


def test_a_call_is_committed_when_its_invoke_closes(tokenizer: Tokenizer, spell: Spell) -> None:
    parser = StreamParser(tokenizer, thinking=False, tools=TOOLS)
    assert joined(parser.feed(spell(f"\n\n<｜DSML｜ calls>\n{INVOKE.removesuffix('>')}")))[2] == []
    assert [call.name for call in joined(parser.feed(spell(">")))[2]] == ["bash"]


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        (INVOKE.replace("bash", "sh"), ParseErrorKind.unknown_tool),
        (INVOKE.replace("command", "cmd"), ParseErrorKind.missing_argument),
        (INVOKE.replace('"true"', '"false"'), ParseErrorKind.bad_argument),
        (INVOKE.replace('"true"', '"maybe"'), ParseErrorKind.malformed_call),
        (INVOKE.replace("</｜DSML｜ parameter>\n", ""), ParseErrorKind.malformed_call),
        (INVOKE.replace("ls", "l</think>s"), ParseErrorKind.malformed_call),
        (INVOKE.replace("true", "false").replace("ls 2>&1", '"\\ud800"'), ParseErrorKind.bad_argument),
        (INVOKE.replace("true", "false").replace("ls 2>&1", "NaN"), ParseErrorKind.bad_argument),
        ("", ParseErrorKind.empty_calls),
        ("words", ParseErrorKind.malformed_call),
    ],
)
def test_a_call_that_does_not_hold_comes_back_as_content(
    inner: str, kind: ParseErrorKind, read: Callable[..., Parsed]
) -> None:
    text = f"ok\n\n<｜DSML｜ calls>\n{inner}\n</｜DSML｜ calls>"
    parsed = read(text + EOS)
    assert (parsed.message.content, parsed.message.tool_calls) == (text, ())
    assert str(kind) in kinds(parsed)


def test_a_good_call_stands_beside_a_bad_one(read: Callable[..., Parsed]) -> None:
    bad = INVOKE.replace("bash", "sh")
    parsed = read(f"\n\n<｜DSML｜ calls>\n{INVOKE}\n{bad}\n{INVOKE}\n</｜DSML｜ calls>{EOS}")
    assert len(parsed.message.tool_calls) == 2
    assert parsed.message.content == "\n" + bad
    assert kinds(parsed) == {"unknown_tool"}


def test_a_cut_call_is_content_and_not_the_policys_mistake(read: Callable[..., Parsed]) -> None:
    text = f"ok\n\n<｜DSML｜ calls>\n{INVOKE[:-20]}"
    parsed = read(text)
    assert (parsed.message.content, parsed.message.tool_calls) == (text, ())
    assert (parsed.truncated, parsed.ill_formed) == (True, False)
    parsed = read(f"ok\n\n<｜DSML｜ calls>\n{INVOKE}")
    assert (len(parsed.message.tool_calls), parsed.truncated, parsed.ill_formed) == (1, True, False)


@pytest.mark.parametrize(
    ("text", "thinking", "kind", "content"),
    [
        (f"only thoughts{EOS}", True, "unclosed_reasoning", ""),
        (f"a</think>b{EOS}", False, "reserved_token", "a</think>b"),
        (f"a<｜User｜>b{EOS}", False, "reserved_token", "a<｜User｜>b"),
        (f"a{EOS}b", False, "ids_after_end", "a"),
        (f"a\n\n{BLOCK}\ntail{EOS}", False, "text_after_calls", "atail"),
        (f"a{BLOCK}{EOS}", False, "spacing", "a"),
        (f"a\n\n<｜DSML｜ calls>\n{INVOKE}{EOS}", False, "unclosed_calls", "a"),
        (f"a\n\n{BLOCK.replace(chr(10), '')}{EOS}", False, "spacing", "a"),
    ],
)
def test_departures_are_named(text: str, thinking: bool, kind: str, content: str, read: Callable[..., Parsed]) -> None:
    parsed = read(text, thinking=thinking)
    assert kind in kinds(parsed)
    assert parsed.message.content == content


def test_broken_utf8_is_ill_formed_only_where_the_policy_ended_the_turn(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🙂")[:2]
    cut = parse(half, tokenizer, thinking=False)
    assert (cut.message.content, cut.ill_formed) == ("�", False)
    ended = parse([*half, tokenizer.special.eos], tokenizer, thinking=False)
    assert (ended.message.content, kinds(ended)) == ("�", {"invalid_utf8"})


def test_any_ids_in_any_pieces_read_alike_and_never_raise(tokenizer: Tokenizer, spell: Spell) -> None:
    rng = random.Random(7)
    parts = [
        "a", "\n", "\n\n", "<", "🙂", " ", "x" * 70, "</think>", "<think>", "｜DSML｜", "<｜DSML｜ calls>", "</｜DSML｜ calls>",
        INVOKE, INVOKE[:40], INVOKE.replace("bash", "sh"), "</｜DSML｜ invoke>", '<｜DSML｜ invoke name="free">\n',
        "<｜DSML｜tool_calls>", BLOCK, "\n\n" + BLOCK, "<｜User｜>", "</｜DSML｜", "call", "s>",
    ]  # fmt: skip
    num_calls = 0
    for _ in range(600):
        text = "".join(rng.choices(parts, k=rng.randint(0, 7))) + rng.choice([EOS, EOS, ""])
        ids = spell(text)
        if rng.random() < 0.3:
            ids += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 5))]
        thinking, tools = rng.random() < 0.5, rng.choice([TOOLS, TOOLS, []])
        whole = parse(ids, tokenizer, thinking=thinking, tools=tools)
        pieces = by_bytes(ids, tokenizer) if rng.random() < 0.5 else ids
        parser = StreamParser(tokenizer, thinking=thinking, tools=tools)
        deltas = [delta for token_id in pieces for delta in parser.feed([token_id])] + parser.finish()
        streamed = parser.result()
        assert joined(deltas) == (
            streamed.message.reasoning,
            streamed.message.content,
            list(streamed.message.tool_calls),
        )
        assert joined(deltas) == (whole.message.reasoning, whole.message.content, list(whole.message.tool_calls)), text
        assert kinds(streamed) == kinds(whole), text
        assert streamed.truncated == whole.truncated
        num_calls += len(whole.message.tool_calls)
        if not tools and not thinking:
            until_end = ids[: ids.index(tokenizer.special.eos)] if tokenizer.special.eos in ids else ids
            assert whole.message.content == tokenizer.decode(until_end)
    assert num_calls > 50


def test_long_answers_stream_in_linear_time(tokenizer: Tokenizer, spell: Spell) -> None:
    parser = StreamParser(tokenizer, thinking=True, tools=TOOLS)
    ids = spell("thought\n\n" * 3000 + "</think>" + "word " * 3000)
    for token_id in ids:
        parser.feed([token_id])
        assert len(parser._buffer) < 100
