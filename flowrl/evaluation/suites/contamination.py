"""Counts prompts of a suite that were trained on: equal ones, near duplicates, runs of shared
words.

This file imports nothing of flowrl.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

GRAM = 8  # words in a row that count as copied
NEAR = (4, 5)  # fraction 4/5: Jaccard index of words from which on prompts are near duplicates


def contamination(training: Iterable[str], suite: Iterable[str]) -> dict[str, Any]:
    """Count which of a suite's different prompts are training prompts, and which come close.

    exact: equal after normalisation (words alone, lower case, Unicode NFKC). near: not equal, but
    the sets of words have a Jaccard index of at least 0.8, whatever their order. shared_8_grams:
    eight words in a row occur in a training prompt too. examples: [kind, prompt].
    """
    seen = {words(text) for text in training}
    texts = {words(text): text for text in suite}
    copied = {gram for own in seen for gram in grams(own)}
    rest = [own for own in texts if own not in seen]
    close = near_duplicates([set(own) for own in seen], [set(own) for own in rest])
    found = {
        "exact": [own for own in texts if own in seen],
        "near": [own for own, near in zip(rest, close, strict=True) if near],
        "shared_8_grams": [own for own in texts if not copied.isdisjoint(grams(own))],
    }
    examples = [[kind, texts[own]] for kind, members in found.items() for own in members[:3]]
    counts = {kind: len(members) for kind, members in found.items()}
    return {"training": len(seen), "suite": len(texts), **counts, "examples": examples}


def words(text: str) -> tuple[str, ...]:
    """Split a text into the words that are compared, in lower case and without marks.

    >>> words("A  red circle, left-of 2 Ｂlue squares!")
    ('a', 'red', 'circle', 'left', 'of', '2', 'blue', 'squares')
    """
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def grams(own: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (own[i : i + GRAM] for i in range(len(own) - GRAM + 1))


def near_duplicates(training: Sequence[set[str]], suite: Sequence[set[str]]) -> list[bool]:
    """Whether each set of the suite has a Jaccard index of at least 4/5 with any training set.

    Such sets share one of their rarest words: the first |A| - ceil(4/5 |A|) + 1 of each in a common
    order (prefix filtering, Chaudhuri et al. 2006), so few pairs are compared.
    """
    frequency = Counter(word for own in training for word in own)
    index: dict[str, list[set[str]]] = defaultdict(list)
    for own in training:
        for word in _rarest(own, frequency):
            index[word].append(own)

    def close(own: set[str]) -> bool:
        others = (other for word in _rarest(own, frequency) for other in index[word])
        return any(NEAR[1] * len(own & other) >= NEAR[0] * len(own | other) for other in others)

    return [close(own) for own in suite]


def _rarest(own: set[str], frequency: Counter[str]) -> list[str]:
    """Words of a set, one of which every near duplicate holds too."""
    shared = -(-NEAR[0] * len(own) // NEAR[1])  # words that a near duplicate holds, rounded up
    return sorted(own, key=lambda word: (frequency[word], word))[: len(own) - shared + 1]
