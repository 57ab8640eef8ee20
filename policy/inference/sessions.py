"""What a chat server remembers so that a conversation goes on token-exactly: sampled turns and resident contexts.

A client sends its whole history as text at every turn. Where an assistant message in it is one that this server
sampled, its ids are taken from here instead of being encoded again; and where a prompt extends a context that the
engine still holds, the request goes on from it.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from burnish.policy.encoding.messages import Message, Role


class SampledTurns:
    """Ids of assistant turns by the conversation that led to them. Bounded: the oldest are forgotten.

    Args:
        capacity: turns kept.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._turns: OrderedDict[str, tuple[str, tuple[int, ...]]] = OrderedDict()

    def recall(self, messages: Sequence[Message], setting: str) -> list[Message]:
        """The messages, assistant turns sampled here with their ids.

        Args:
            messages: a client's history.
            setting: what else decides the ids (tools, thinking, ...): part of the key.

        A turn whose reasoning the client left out gets it back; one whose text the client changed is not recognised.
        """
        out: list[Message] = []
        for message, key in zip(messages, _keys(messages, setting), strict=True):
            reasoning, ids = self._turns.get(key, ("", None)) if message.role is Role.assistant else ("", None)
            if ids is not None and message.reasoning in ("", reasoning):
                self._turns.move_to_end(key)
                out.append(replace(message, sampled_ids=ids, reasoning=reasoning))
            else:
                out.append(message)
        return out

    def remember(self, messages: Sequence[Message], turn: Message, setting: str) -> None:
        """Keep the ids of a turn that was just sampled after `messages`."""
        if turn.sampled_ids is None:
            return
        key = _keys([*messages, turn], setting)[-1]
        self._turns[key] = (turn.reasoning, turn.sampled_ids)
        self._turns.move_to_end(key)
        while len(self._turns) > self._capacity:
            self._turns.popitem(last=False)


def _keys(messages: Sequence[Message], setting: str) -> list[str]:
    """One key a message: a running hash over it and all before it, without reasoning and ids."""
    digest = hashlib.sha256(setting.encode())
    keys = []
    for message in messages:
        said: list[Any] = [message.role, message.content, [[call.name, call.arguments] for call in message.tool_calls]]
        said += [message.tools, message.response_format]
        # lone surrogates are refused later, by the encoding
        digest.update(json.dumps(said).encode())
        keys.append(digest.hexdigest())
    return keys


class ResidentContexts:
    """Contexts the engine keeps between two turns, found again by their ids.

    Args:
        capacity: contexts kept; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._idle: OrderedDict[str, list[int]] = OrderedDict()

    def take(self, ids: Sequence[int]) -> str | None:
        """The idle context that covers most of `ids`, which the request then owns; None where there is none."""
        best, covered = None, 0
        for context_id, fed in self._idle.items():
            if covered < len(fed) < len(ids) and list(ids[: len(fed)]) == fed:
                best, covered = context_id, len(fed)
        if best is not None:
            del self._idle[best]
        return best

    def put(self, context_id: str, ids: Sequence[int]) -> list[str]:
        """Keep the context of a finished request; returns the contexts to release for it.

        Args:
            ids: prompt and sampled ids; the last one was never fed.
        """
        self._idle[context_id] = list(ids[:-1])
        return [self._idle.popitem(last=False)[0] for _ in range(max(0, len(self._idle) - self._capacity))]
