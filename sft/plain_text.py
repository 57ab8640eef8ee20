"""Plain text from a file to contexts whose every token is a target. Nothing is cut off: long documents become several."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.policy.encoding.tokenizer import EncodingError, Tokenizer
from burnish.sft.data import DataError, read_records

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)


def load_text(path: Path, max_tokens: int, tokenizer: Tokenizer) -> "Dataset":
    """Read and encode a whole file; other fields than `text` are left alone.

    Args:
        path: .jsonl or .parquet.
        max_tokens: longest context.

    Returns:
        A data set with the columns line, ids and loss_mask: <bos> text <eos>, in pieces that overlap by one token, so
        that every token of a document but its first is predicted once.

    Raises:
        DataError: the first record that has no text in its field `text`; names file and line.
        FileNotFoundError: no such file.
    """
    from datasets import Dataset

    columns: dict[str, list] = {"line": [], "ids": [], "loss_mask": []}
    num_documents = 0
    for line, record in read_records(path):
        where = f"{path} line {line}"
        text = record.get("text")
        if "text" not in record:
            raise DataError(f"{where}: field 'text' is missing; plain text needs one string `text` a record")
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: 'text' must be a string that is not empty, got {text!r:.40}")
        try:
            ids = [tokenizer.special.bos, *tokenizer.encode(text), tokenizer.special.eos]
        except EncodingError as error:
            raise DataError(f"{where}: {error}") from None
        num_documents += 1
        for start in range(0, len(ids) - 1, max_tokens - 1):
            piece = ids[start : start + max_tokens]
            columns["line"].append(line)
            columns["ids"].append(piece)
            columns["loss_mask"].append([False] + [True] * (len(piece) - 1))
    if not num_documents:
        raise DataError(f"{path} holds no document to train on")
    tokens = sum(map(sum, columns["loss_mask"]))
    logger.info("Data %s: %d documents, %d contexts, %d targets", path, num_documents, len(columns["ids"]), tokens)
    return Dataset.from_dict(columns)
