"""A conversation that grows: ids are only ever appended, and sampled ids are never encoded again.

Where the format rewrites the past (reasoning dropped at a new user turn, a user message after the header was written),
the conversation opens a new context instead of slicing the old one. A sampled token carries loss in one context only:
in a later one it is input.
"""

from collections.abc import Sequence
from typing import Any

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.messages import Message, Role
from burnish.policy.encoding.parse import Parsed, parse
from burnish.policy.encoding.render import Rendered, render, with_tools
from burnish.policy.encoding.tokenizer import Tokenizer


class Conversation:
    """Messages and the contexts they became.

    Args:
        tokenizer: the policy's.
        config: thinking, effort, history. `history: keep` never opens a second context by itself.
        tools: function schemas offered to the assistant.
        template: text before the tool schemas; None takes ours.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: EncodingConfig,
        tools: Sequence[dict[str, Any]] = (),
        template: str | None = None,
    ) -> None:
        self.contexts: list[Rendered] = [Rendered([], [])]
        """All contexts, the growing one last. Each token the assistant generated has loss in exactly one of them."""
        self.messages: list[Message] = []
        self._tokenizer = tokenizer
        self._config = config
        self._tools = tuple(tools)
        self._template = template
        self._encoded: dict[str, list[int]] = {}
        self._first_trained = 0

    @property
    def ids(self) -> list[int]:
        """The current context: what an engine continues."""
        return self.contexts[-1].ids

    @property
    def loss_mask(self) -> list[bool]:
        return self.contexts[-1].loss_mask

    def append(self, messages: Sequence[Message], *, generate: bool | None = None) -> list[int]:
        """Add messages and return the ids they added.

        Args:
            messages: any roles; an assistant message given here is encoded from its text and trained.
            generate: end with the assistant's header; None does so unless an assistant message comes last.

        Returns:
            The ids appended to the current context. All of its ids where a new context was opened: `contexts` tells.

        Raises:
            EncodingError: see `render`; the conversation is then unchanged.
        """
        num_before = sum(message.role is Role.assistant for message in self.messages)
        return self._extend([*self.messages, *messages], num_before, generate)

    def append_sampled(self, ids: Sequence[int]) -> Parsed:
        """Add the ids an engine sampled for the assistant's turn, as they are; returns how they read.

        Raises:
            ValueError: the context does not end with the assistant's header.
        """
        special = self._tokenizer.special
        header = [special.assistant, special.think if self._config.thinking else special.end_think]
        if self.ids[-2:] != header:
            raise ValueError(
                "append_sampled needs a context that ends with the assistant's header: append messages first"
            )
        parsed = parse(ids, self._tokenizer, thinking=self._config.thinking, tools=self._all_tools())
        num_before = sum(message.role is Role.assistant for message in self.messages)
        self._extend([*self.messages, parsed.message], num_before, False)
        return parsed

    def _all_tools(self) -> list[dict[str, Any]]:
        return [*self._tools, *(tool for message in self.messages for tool in message.tools)]

    def _extend(self, messages: list[Message], num_before: int, generate: bool | None) -> list[int]:
        if generate is None:
            generate = messages[-1].role is not Role.assistant
        rendered = self._render(messages, generate, self._first_trained)
        old = self.ids
        is_extension = rendered.ids[: len(old)] == old
        if not is_extension:
            self._first_trained = num_before
            rendered = self._render(messages, generate, num_before)
            self.contexts.append(rendered)
        else:
            self.contexts[-1] = rendered
        self.messages = messages
        return rendered.ids[len(old) :] if is_extension else list(rendered.ids)

    def _render(self, messages: list[Message], generate: bool, first_trained: int) -> Rendered:
        return render(
            with_tools(messages, self._tools),
            self._tokenizer,
            self._config,
            generate=generate,
            template=self._template,
            is_trained=lambda turn: turn >= first_trained,
            encode=self._encode,
        )

    def _encode(self, text: str) -> list[int]:
        # the whole history is laid out again at every turn; its texts are encoded once
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer.encode(text)
        return self._encoded[text]


def training_contexts(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    config: EncodingConfig,
    tools: Sequence[dict[str, Any]] = (),
    template: str | None = None,
) -> list[Rendered]:
    """The contexts a finished conversation trains: each assistant turn has loss once, in the form it was generated in.

    With reasoning kept, or in chat mode, that is one context. With `history: drop` and thinking there is one for every
    stretch between user turns.

    Raises:
        EncodingError: see `render`.
    """
    conversation = Conversation(tokenizer, config, tools, template)
    chunk: list[Message] = []
    for message in messages:
        chunk.append(message)
        if message.role is Role.assistant:
            conversation.append(chunk, generate=False)
            chunk = []
    return [context for context in conversation.contexts if any(context.loss_mask)]
