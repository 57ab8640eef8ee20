"""Recall documents: random tokens, then the same tokens again, loss where the earlier ones decide what comes next.

They teach a fresh policy to take words from its context, and nothing of what the words mean. A document is a pure
function of (seed, index), so a run goes on from a position alone.
"""

import random
from collections.abc import Callable

from burnish.policy.encoding.tokenizer import Tokenizer
from burnish.policy.training.packing import Sample
from burnish.sft.config import RecallConfig

MAX_SPAN = 4
"""Longest stretch that a cue of the lookup layout asks for, in tokens."""


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that stand for words, with and without a leading space, or for ASCII punctuation.

    Left out: special tokens, single letters, and pieces that are no text or no word (bytes, blanks, digits).
    """
    found = []
    for token_id in range(tokenizer.vocab_size):
        if token_id in tokenizer.added_ids:
            continue
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode(errors="replace")
        is_mark = len(raw) == 1 and 33 <= raw[0] < 127 and not text.isalnum()
        is_word = len(raw) > 1 and "\ufffd" not in text and text.isprintable() and any(map(str.isalpha, text))
        if is_mark or is_word:
            found.append(token_id)
    return found


class RecallDocuments:
    """The endless sequence of recall documents of one seed.

    Args:
        tokenizer: of the policy.
        config: shares of the layouts and lengths.
        seed: any text or number; sequences of different seeds have nothing in common.

    Raises:
        ValueError: the tokenizer has too few words for documents of max_words different ones.
    """

    def __init__(self, tokenizer: Tokenizer, config: RecallConfig, seed: int | str) -> None:
        self._words, self._special = word_ids(tokenizer), tokenizer.special
        self._config, self._seed = config, seed
        if len(self._words) < config.max_words:
            raise ValueError(
                f"data.recall.max_words={config.max_words}, but tokenizer {tokenizer.name} has only "
                f"{len(self._words)} words; lower it"
            )
        self._layouts: dict[Callable[[random.Random], Sample], float] = {
            self._repeat: config.repeat,
            self._turn: config.turn,
            self._lookup: config.lookup,
        }

    def document(self, index: int) -> Sample:
        """The document with this index; its targets are the tokens that its earlier ones decide."""
        chance = random.Random(f"{self._seed}/{index}")
        (layout,) = chance.choices(list(self._layouts), list(self._layouts.values()))
        return layout(chance)

    def slice(self, start: int, stop: int) -> list[Sample]:
        """Documents start..stop-1, numbered from 0 as rollouts of one batch."""
        samples = [self.document(index) for index in range(start, stop)]
        for number, sample in enumerate(samples):
            sample.rollout = number
        return samples

    def _length(self, chance: random.Random) -> int:
        return chance.randint(self._config.min_words, self._config.max_words)

    def _repeat(self, chance: random.Random) -> Sample:
        """<bos> words <user> the words again."""
        words = chance.choices(self._words, k=self._length(chance))
        return _sample([self._special.bos, *words, self._special.user], words)

    def _turn(self, chance: random.Random) -> Sample:
        """A chat turn that says the user's words again, and ends."""
        special, words = self._special, chance.choices(self._words, k=self._length(chance))
        shown = [special.bos, special.user, *words, special.assistant, special.end_think]
        return _sample(shown, [*words, special.eos])

    def _lookup(self, chance: random.Random) -> Sample:
        """<bos> different words <user> then (one of them as a cue, the words that follow it), several times."""
        words = chance.sample(self._words, self._length(chance))
        ids, mask = [self._special.bos, *words, self._special.user], [False] * (len(words) + 2)
        size = 2 * len(ids)
        while len(ids) < size:
            cue = chance.randrange(len(words) - 1)
            span = words[cue + 1 : cue + 1 + chance.randint(1, MAX_SPAN)]
            ids += [words[cue], *span]
            mask += [False, *[True] * len(span)]
        return Sample(ids=ids, loss_mask=mask)


def _sample(shown: list[int], predicted: list[int]) -> Sample:
    return Sample(ids=shown + predicted, loss_mask=[False] * len(shown) + [True] * len(predicted))
