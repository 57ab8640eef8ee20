"""Conversations that grow: append-only ids, sampled ids as they are, a new context instead of a slice."""

import random

import pytest

from burnish.policy.encoding.config import EncodingConfig, History
from burnish.policy.encoding.conversation import Conversation, training_contexts
from burnish.policy.encoding.messages import Message, Role, ToolCall
from burnish.policy.encoding.render import render, with_tools
from burnish.policy.encoding.tokenizer import Tokenizer

CHAT = EncodingConfig()
KEEP = EncodingConfig(thinking=True)
DROP = EncodingConfig(thinking=True, history=History.drop)
BASH = {"name": "bash", "parameters": {"required": ["command"]}}


def user(text: str) -> Message:
    return Message(role=Role.user, content=text)


def assistant(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message(role=Role.assistant, content=text, reasoning=reasoning, tool_calls=calls)


def other_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids that decode to `text` but are not what the tokenizer would choose: one a byte."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def test_sampled_ids_survive_where_the_text_would_merge(tokenizer: Tokenizer) -> None:
    # public case B08: "he" "llo" sampled, "hello" is one token
    sampled = [*other_ids("cat", tokenizer), tokenizer.special.eos]
    assert tokenizer.encode("cat") != sampled[:-1]
    conversation = Conversation(tokenizer, CHAT)
    prompt = conversation.append([user("go")])
    assert conversation.ids == prompt
    conversation.append_sampled(sampled)
    tool_ids = conversation.append([user("<output>\nx\n</output>")])
    assert conversation.ids == prompt + sampled + tool_ids
    second = [*tokenizer.encode("cat"), tokenizer.special.eos]
    conversation.append_sampled(second)
    assert conversation.ids == prompt + sampled + tool_ids + second
    expected = [False] * len(prompt) + [True] * len(sampled) + [False] * len(tool_ids) + [True] * len(second)
    assert conversation.loss_mask == expected
    assert len(conversation.contexts) == 1


def test_a_turn_cut_at_its_limit_gets_an_end_that_carries_no_loss(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, CHAT)
    conversation.append([user("go")])
    sampled = tokenizer.encode("echo amber-")
    assert conversation.append_sampled(sampled).truncated
    assert conversation.ids[-len(sampled) :] == sampled
    added = conversation.append([user("more")])
    assert added[:2] == [tokenizer.special.eos, tokenizer.special.user]
    assert conversation.loss_mask[-len(added) :] == [False] * len(added)
    assert len(conversation.contexts) == 1


def test_an_emoji_split_over_two_turns_of_ids_survives(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, CHAT)
    conversation.append([user("go")])
    half = tokenizer.encode("🙂")[:2]
    conversation.append_sampled([*half, tokenizer.special.eos])
    conversation.append([user("on")])
    assert [i for i, t in zip(conversation.ids, conversation.loss_mask, strict=True) if t] == [
        *half,
        tokenizer.special.eos,
    ]


def test_dropped_reasoning_opens_a_new_context_and_each_token_is_trained_once(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, DROP)
    conversation.append([user("one")])
    first = [*tokenizer.encode("why"), tokenizer.special.end_think, *other_ids("so", tokenizer), tokenizer.special.eos]
    conversation.append_sampled(first)
    before = list(conversation.ids)
    new = conversation.append([user("two")])
    assert len(conversation.contexts) == 2
    assert new == conversation.ids
    assert conversation.contexts[0].ids == before
    # the sampled ids of the answer, not an encoding of its text, are the new context's input
    answer = first[first.index(tokenizer.special.end_think) + 1 :]
    header = [tokenizer.special.assistant, tokenizer.special.end_think]
    start = next(i for i in range(len(new)) if new[i : i + 2] == header) + 2
    assert new[start : start + len(answer)] == answer
    assert not any(conversation.loss_mask)
    conversation.append_sampled([tokenizer.special.end_think, tokenizer.special.eos])
    assert sum(conversation.loss_mask) == 2
    assert sum(map(sum, (context.loss_mask for context in conversation.contexts))) == len(first) + 2


def test_tools_or_keep_never_open_a_second_context(tokenizer: Tokenizer) -> None:
    for config, tools in ((KEEP, ()), (DROP, (BASH,)), (CHAT, ())):
        conversation = Conversation(tokenizer, config, tools)
        for turn in range(4):
            conversation.append([user(f"u{turn}")])
            end = [tokenizer.special.end_think] if config.thinking else []
            conversation.append_sampled([*end, *tokenizer.encode("a"), tokenizer.special.eos])
        assert len(conversation.contexts) == 1


def test_a_second_user_message_after_the_header_opens_a_new_context(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, CHAT)
    conversation.append([user("a")])
    conversation.append([user("b")])
    assert len(conversation.contexts) == 2
    assert tokenizer.decode(conversation.ids).count("<｜Assistant｜>") == 1


def test_a_refused_message_leaves_the_conversation_unchanged(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, CHAT)
    conversation.append([user("a")])
    before = list(conversation.ids)
    with pytest.raises(ValueError, match="lone surrogate"):
        conversation.append([user("\ud800")])
    assert (conversation.ids, len(conversation.messages)) == (before, 1)
    conversation.append_sampled([tokenizer.special.eos])
    with pytest.raises(ValueError, match="ends with the assistant's header"):
        conversation.append_sampled([tokenizer.special.eos])


def test_training_contexts_train_every_turn_once_in_the_form_it_was_generated_in(tokenizer: Tokenizer) -> None:
    messages = [user("u1"), assistant("a1", "r1"), user("u2"), assistant("a2", "r2"), user("u3")]
    (kept,) = training_contexts(messages, tokenizer, KEEP)
    trained = tokenizer.decode(i for i, t in zip(kept.ids, kept.loss_mask, strict=True) if t)
    eos = "<｜end▁of▁sentence｜>"
    assert trained == f"r1</think>a1{eos}r2</think>a2{eos}"
    dropped = training_contexts(messages, tokenizer, DROP)
    texts = [tokenizer.decode(i for i, t in zip(c.ids, c.loss_mask, strict=True) if t) for c in dropped]
    assert texts == [f"r1</think>a1{eos}", f"r2</think>a2{eos}"]
    assert "<｜Assistant｜></think>a1" in tokenizer.decode(dropped[1].ids)


def random_messages(rng: random.Random) -> list[Message]:
    words = ["a", " b", "<", "\n", "\n\n", "🙂", "ls", "</think>", "<｜User｜>", ""]

    def text() -> str:
        return "".join(rng.choices(words, k=rng.randint(0, 4)))

    messages = [Message(role=Role.system, content=text())] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 4)):
        messages += [user(text()) for _ in range(rng.randint(1, 2))]
        if turn and rng.random() < 0.2:
            messages.append(Message(role=Role.system, content=text()))
        for _ in range(rng.randint(0, 2)):
            ids = [f"c{i}" for i in range(rng.randint(1, 3))]
            calls = tuple(ToolCall(name="bash", arguments={"command": text()}, id=i) for i in ids)
            messages.append(assistant(text(), text(), *calls))
            rng.shuffle(ids)
            messages += [Message(role=Role.tool, content=text(), tool_call_id=i) for i in ids]
        messages.append(assistant(text(), text()))
    return messages


def test_growing_ids_equal_the_one_shot_rendering_or_a_new_context_is_opened(tokenizer: Tokenizer) -> None:
    rng = random.Random(11)
    num_new = num_same = 0
    for _ in range(250):
        messages = random_messages(rng)
        config = rng.choice([CHAT, KEEP, DROP])
        tools = rng.choice([(), (BASH,)])
        conversation = Conversation(tokenizer, config, tools)
        seen: list[Message] = []
        chunk: list[Message] = []
        for message in messages:
            if message.role is Role.assistant:
                before, num_contexts = list(conversation.ids), len(conversation.contexts)
                added = conversation.append(chunk)
                seen += chunk
                full = render(with_tools(seen, tools), tokenizer, config, generate=True)
                assert conversation.ids == full.ids
                extends = full.ids[: len(before)] == before
                assert (len(conversation.contexts) == num_contexts) == extends
                assert added == (full.ids[len(before) :] if extends else full.ids)
                num_new, num_same = num_new + (not extends), num_same + extends
                conversation.append([message])
                seen.append(message)
                assert conversation.ids == render(with_tools(seen, tools), tokenizer, config).ids
                chunk = []
            else:
                chunk.append(message)
        if config is not DROP or tools:
            assert len(conversation.contexts) == 1
            assert conversation.loss_mask == render(with_tools(seen, tools), tokenizer, config).loss_mask
        trained = sum(sum(context.loss_mask) for context in conversation.contexts)
        kept = render(with_tools(seen, tools), tokenizer, CHAT if config is CHAT else KEEP)
        assert trained == sum(kept.loss_mask), "each generated token has loss in exactly one context"
    assert num_new > 20
    assert num_same > 100


def test_extending_a_long_conversation_encodes_only_what_is_new(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(tokenizer, CHAT)
    for turn in range(20):
        conversation.append([user(f"unlike text {turn}")])
        conversation.append_sampled([*tokenizer.encode("ls"), tokenizer.special.eos])
    texts: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: texts.append(text) or encode(text))
    conversation.append([user("new")])
    assert texts == ["new"]
