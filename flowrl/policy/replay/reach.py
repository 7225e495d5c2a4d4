"""How much of a prompt a pipeline reads: tokenizers cut long ones, and some pipelines drop the end
of what an encoder made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowrl.policy.replay.arguments import tensors_in
from flowrl.policy.replay.encoders import Question
from flowrl.policy.replay.items import Item
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.unread import leaves, mapped
from flowrl.runtime.log import quiet
from flowrl.runtime.text import printable

WORDS = 520  # of the overlong prompt; more where the pipeline says that it takes more
TOKENS = 4  # in a row, by which it is known


@dataclass(frozen=True, eq=False)
class Reader:
    """A text encoder. most: tokens of a prompt that reach the denoisers; None: all of those that
    were tried."""

    name: str
    tokenizer: Any
    most: int | None
    tried: int

    def cuts(self, texts: Sequence[str]) -> list[bool]:
        """Which of some texts have tokens that are not read."""
        if self.most is None:
            return [False] * len(texts)
        return [len(ids) > self.most for ids in _ids(self.tokenizer, texts)]

    def end(self, text: str) -> str:
        """The last of a text that is read."""
        return self.tokenizer.decode(_ids(self.tokenizer, [text])[0][: self.most])[-40:]

    def __str__(self) -> str:
        return f"{self.name} {self.most or f'{self.tried} or more'}"


def cut(found: Sequence[Reader], texts: Sequence[str]) -> str | None:
    """What to say of texts whose ends no encoder reads."""
    each = zip(*(reader.cuts(texts) for reader in found), strict=True)
    ends = [text for text, own in zip(texts, each, strict=bool(found)) if all(own)]
    if not ends:
        return None
    last = max(found, key=lambda reader: reader.most or 0)
    return (
        f"{len(ends)} of {len(texts)} prompts are longer than the model reads (tokens:"
        f" {', '.join(map(str, found))}), and what comes later in them changes nothing; the first,"
        f" {printable(repr(ends[0]), 120)}, is read up to {printable(repr(last.end(ends[0])))}:"
        " shorten them, or raise max_sequence_length where the pipeline takes it"
    )


def surely_read(prober: Prober, texts: Sequence[str]) -> bool:
    """Whether texts are so short that nothing is to be found out about them."""
    kinds = _tokenizers(prober.runner.pipe)
    least = min([prober.longest, *(kind.model_max_length for kind in kinds)])
    room = least - max(2, least // 8)  # templates and marks of begin and end take some
    long = [text for text in texts if len(text.encode()) > room]  # a token is a byte or more
    return all(len(ids) <= room for kind in kinds for ids in _ids(kind, long))


def readers(prober: Prober) -> list[Reader]:
    """The text encoders that are given the prompt, and how much of it they read: of an overlong
    prompt of one word, where its tokens lie among those of each encoder, and up to where a change
    of what the encoder answers changes what the denoisers are given."""
    answers = prober.runner.answers
    text = " ".join(["word"] * max(WORDS, prober.longest + 8))
    items = [Item(text, prober.overlong.conditions)]
    if not prober.runner.single:
        items = [prober.record[0], *items]

    def given() -> list[Tensor]:
        """What the first calls of the denoisers are given."""
        first = prober.run(items, 8, stop=lambda j, it: True)[0]
        return [t for call in first.calls for t in tensors_in(call.args)]

    answers.heard = []
    try:
        given()
        asked, usual = list(answers.heard), given()  # then with answers from memory

        def matters(question: Question, begin: int) -> bool:
            """Whether the denoisers are given others where an answer is changed from a token on."""
            key, size = question.key, len(_row(question))
            before = answers.kept[key]
            answers.kept[key] = mapped(lambda path, t: _changed(t, size, begin), before)
            try:
                pairs = zip(given(), usual, strict=True)
                return not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
            finally:
                answers.kept[key] = before

        out = []
        for name in dict.fromkeys(question.name.partition(".")[0] for question in asked):
            places = [  # ((length, start) of the words, their tokenizer, how many they are ...)
                (_longest_part(_row(q), set(words)), kind, len(words), q)
                for q in asked
                if q.name.partition(".")[0] == name
                for kind in _tokenizers(prober.runner.pipe)
                for words in _ids(kind, [text])
            ]
            (most, start), kind, tried, question = max(places, key=lambda place: place[0][0])
            size, held = len(_row(question)), leaves(answers.kept[question.key]).values()
            pooled = not any(size in t.shape for t in held if not t.is_meta)
            if most > TOKENS and not pooled and not matters(question, start + most - 1):
                tokens = range(start, start + most)
                most = bisect_left(tokens, True, key=lambda k: not matters(question, k))
            if most > TOKENS:
                whole = most > tried - 2  # the first may be another one in a sentence
                out.append(Reader(name, kind, None if whole else most, tried))
        return out
    finally:
        answers.heard = None


def _tokenizers(pipe: Any) -> list[Any]:
    """Those of a pipeline, and those within its processors."""
    parts = list(pipe.components.values())
    found = [*parts, *(getattr(part, "tokenizer", None) for part in parts)]
    return [part for part in found if isinstance(part, PreTrainedTokenizerBase)]


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    with quiet():
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def _row(question: Question) -> list[int]:
    """The tokens of a question; none where it has none."""
    tokens = (t for t in tensors_in((question.args, question.kwargs)) if t.ndim == 2)
    row = next((t for t in tokens if not t.is_floating_point()), None)
    return [] if row is None else row[0].tolist()


def _longest_part(row: list[int], of: set[int]) -> tuple[int, int]:
    """(length, start) of the longest part of a row that is made of these tokens."""
    best, begin = (0, 0), 0
    for k, token in enumerate([*row, None]):
        if token not in of:
            best = max(best, (k - begin, begin), key=lambda part: part[0])
            begin = k + 1
    return best


def _changed(t: Tensor, size: int, begin: int) -> Tensor:
    """Other values from a token on, in a tensor that has this number of them."""
    axis = next((k for k, own in enumerate(t.shape) if own == size), None)
    if axis is None or t.is_meta:
        return t
    t = t.clone()
    t.narrow(axis, begin, size - begin).mul_(1.5).add_(0.5)
    return t
