"""Ids from a spelled-out conversation: special tokens where their spelling stands, literal text elsewhere."""

import re
from collections.abc import Callable

import pytest

from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import Tokenizer

Spell = Callable[[str], list[int]]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def spell(tokenizer: Tokenizer) -> Spell:
    """Text with special spellings to ids; what an independent encoder would send."""
    pattern = re.compile("(" + "|".join(sorted(map(re.escape, tokenizer.added), key=len, reverse=True)) + ")")

    def ids(text: str) -> list[int]:
        out: list[int] = []
        for piece in pattern.split(text):
            out += [tokenizer.added[piece]] if piece in tokenizer.added else tokenizer.encode(piece)
        return out

    return ids
