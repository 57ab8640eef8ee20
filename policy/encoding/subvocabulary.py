"""The `tiny` sub-vocabulary: a subset of the real tokenizer that is itself a real byte-level BPE tokenizer.

It holds the special tokens of the chat encoding, the 256 byte tokens (so any bytes round-trip), every token of the given
texts, and then the tokens of lowest merge rank until `size`. Its merges are the original's restricted to the subset, in
the original order. `ignore_merges` maps a word of the pre-tokeniser that is one token straight to it, so the pieces its
merges pass through are not needed; they are kept for the tokens of words that split. The given texts therefore get the
same tokens as from the original. Ids are compacted in the original order: BOS 0, EOS 1, pad 2, text tokens, the others.

tiny_vocabulary.json holds the texts and the original ids that came out of them; `python -m
burnish.policy.encoding.subvocabulary` rewrites the ids after the texts were edited.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from burnish.policy.encoding.tokenizer import (
    SPELLINGS,
    EncodingError,
    Tokenizer,
    byte_alphabet,
    load_tokenizer,
)

TINY_FILE = Path(__file__).with_name("tiny_vocabulary.json")
TINY_SIZE = 1024
TASK_TOKENS = ("action", "query", "authority", "domain", "title", "read_url")


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    spellings = [spelling for group in SPELLINGS.values() for spelling in group]
    spellings += [f"<｜{name}｜>" for name in TASK_TOKENS]
    return {tokenizer.added[spelling] for spelling in spellings if spelling in tokenizer.added}


def build_subvocabulary(texts: Iterable[str], size: int, tokenizer: Tokenizer) -> list[int]:
    """Choose the original ids of a sub-vocabulary.

    Args:
        texts: words or longer texts whose tokens must all be in it.
        size: number of ids.
        tokenizer: the full tokenizer.

    Returns:
        `size` original ids, ascending: the compact id is the index in the list.

    Raises:
        EncodingError: the texts need more than `size` ids.
    """
    model = tokenizer.document()["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges = [_pair(merge) for merge in model["merges"]]
    parts = {left + right: (left, right) for left, right in merges}
    names = {index: token for token, index in vocabulary.items()}

    chosen = _special_ids(tokenizer) | {vocabulary[char] for char in byte_alphabet()}
    pending: list[str] = []
    for word in {word for text in texts for word in tokenizer.split_words(text)}:
        word_ids = tokenizer.encode(word)
        chosen.update(word_ids)
        if len(word_ids) > 1:
            pending += [names[index] for index in word_ids]
    closed: set[str] = set()
    while pending:
        token = pending.pop()
        chosen.add(vocabulary[token])
        if token in parts and token not in closed:
            closed.add(token)
            pending.extend(parts[token])
    if len(chosen) > size:
        raise EncodingError(f"the texts need {len(chosen)} ids, more than size {size}: give fewer texts or more size")
    for left, right in merges:
        if len(chosen) == size:
            break
        if vocabulary[left] in chosen and vocabulary[right] in chosen:
            chosen.add(vocabulary[left + right])
    return sorted(chosen)


def subset_document(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    """The tokenizer.json of the sub-vocabulary `ids` (original ids, ascending) of `tokenizer`."""
    document = tokenizer.document()
    compact = {original: index for index, original in enumerate(ids)}
    model = document["model"]
    vocabulary = {token: index for token, index in model["vocab"].items() if index in compact}
    model["vocab"] = {token: compact[index] for token, index in vocabulary.items()}
    model["ignore_merges"] = True
    model["merges"] = [
        [left, right]
        for left, right in map(_pair, model["merges"])
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    document["added_tokens"] = [
        {**token, "id": compact[token["id"]]} for token in document["added_tokens"] if token["id"] in compact
    ]
    return document


def _pair(merge: str | list[str]) -> tuple[str, str]:
    # older files spell a merge as one string with a space
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


@cache
def tiny_tokenizer() -> Tokenizer:
    """The committed sub-vocabulary of the installed tokenizer: what a `tiny` policy folder holds."""
    full = load_tokenizer()
    return Tokenizer(subset_document(full, json.loads(TINY_FILE.read_text())["ids"]), "tiny")


def rebuild_tiny_file() -> None:
    """Choose the ids of tiny_vocabulary.json anew from its texts."""
    content = json.loads(TINY_FILE.read_text())
    ids = build_subvocabulary(content["texts"], TINY_SIZE, load_tokenizer())
    lines = [" " + json.dumps(text, ensure_ascii=False) for text in content["texts"]]
    rows = [" " + ", ".join(map(str, ids[start : start + 20])) for start in range(0, len(ids), 20)]
    about = json.dumps(content["about"])
    TINY_FILE.write_text(
        f'{{"about": {about},\n"texts": [\n' + ",\n".join(lines) + '\n],\n"ids": [\n' + ",\n".join(rows) + "\n]}\n"
    )


if __name__ == "__main__":
    rebuild_tiny_file()
