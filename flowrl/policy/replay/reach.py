"""Find out how much of a prompt a pipeline reads: tokenizers cut long prompts, and some pipelines
drop the end of an encoder's output."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowrl.policy.replay.arguments import tensors_in
from flowrl.policy.replay.encoders import EncoderCall
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.unread import leaves, mapped
from flowrl.runtime.log import quiet
from flowrl.runtime.text import printable

WORDS = 520  # number of words in the overlong prompt; more if the pipeline says that it takes more
TOKENS = 4  # number of its tokens in a row by which the overlong prompt is recognised


@dataclass(frozen=True, eq=False)
class Reader:
    """A text encoder, and how much of a prompt it reads."""

    name: str  # name of the component
    tokenizer: Any  # tokenizer that makes its tokens
    # number of a prompt's tokens that reach the denoisers; None: all that were tried
    most: int | None
    tried: int  # number of tokens of the prompt that was tried

    def cuts(self, texts: Sequence[str]) -> list[bool]:
        """Tell for each text whether it has tokens that are not read."""
        if self.most is None:
            return [False] * len(texts)
        return [len(ids) > self.most for ids in _ids(self.tokenizer, texts)]

    def end(self, text: str) -> str:
        """Return the last characters of a text that are read."""
        return self.tokenizer.decode(_ids(self.tokenizer, [text])[0][: self.most])[-40:]

    def __str__(self) -> str:
        return f"{self.name} {self.most or f'{self.tried} or more'}"


def cut(found: Sequence[Reader], texts: Sequence[str]) -> str | None:
    """Write a sentence about texts whose ends no encoder reads; None if there are none."""
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
    """Whether texts are so short that they are certainly read whole."""
    kinds = _tokenizers(prober.runner.pipe)
    least = min([prober.longest, *(kind.model_max_length for kind in kinds)])
    room = least - max(2, least // 8)  # templates and marks of begin and end need some tokens
    # shorter texts fit in any case, since a token is a byte or more
    long = [text for text in texts if len(text.encode()) > room]
    return all(len(ids) <= room for kind in kinds for ids in _ids(kind, long))


def readers(prober: Prober) -> list[Reader]:
    """Find the text encoders that get the prompt, and how much of it they read."""
    return Reach(prober).readers()


class Reach:
    """Find out how much of a prompt is read, by runs on an overlong prompt of one word: where its
    tokens lie among those of each encoder, and up to where a change of the encoder's answer changes
    the inputs of the denoisers."""

    def __init__(self, prober: Prober) -> None:
        self.prober, self.answers = prober, prober.runner.answers
        text = " ".join(["word"] * max(WORDS, prober.longest + 8))
        self.items = [PromptItem(text, prober.overlong.conditions)]
        if not prober.runner.single:
            self.items = [prober.record[0], *self.items]
        self.words = [(kind, _ids(kind, [text])[0]) for kind in _tokenizers(prober.runner.pipe)]

    def readers(self) -> list[Reader]:
        self.answers.heard = []
        try:
            self._given()
            # the second run gets its answers from memory
            questions, self.usual = list(self.answers.heard), self._given()
            names = dict.fromkeys(question.name.partition(".")[0] for question in questions)
            found = (self._reader(name, questions) for name in names)
            return [reader for reader in found if reader is not None and reader.most != 0]
        finally:
            self.answers.heard = None

    def _reader(self, name: str, questions: Sequence[EncoderCall]) -> Reader | None:
        """Find how many of the words a text encoder reads; None if it gets none of them."""
        places = [
            (*_longest_part(_row(question), set(words)), kind, len(words), question)
            for question in questions
            for kind, words in self.words
            if question.name.partition(".")[0] == name
        ]
        best = max(places, key=lambda place: place[0], default=None)
        if best is None or best[0] <= TOKENS:
            return None
        most, start, kind, tried, question = best
        size, kept = len(_row(question)), leaves(self.answers.kept[question.key]).values()
        pooled = not any(size in t.shape for t in kept if not t.is_meta)
        if not pooled and not self._matters(question, start + most - 1):
            tokens = range(start, start + most)
            most = bisect_left(tokens, True, key=lambda k: not self._matters(question, k))
        whole = most > tried - 2  # - 2: the first word of a sentence may have another token
        return Reader(name, kind, None if whole else most, tried)

    def _given(self) -> list[Tensor]:
        """Return the tensors that the first calls of the denoisers get."""
        first = self.prober.run(self.items, 8, stop=lambda j, it: True)[0]
        return [t for call in first.calls for t in tensors_in(call.args)]

    def _matters(self, question: EncoderCall, begin: int) -> bool:
        """Whether the denoisers get other tensors if an answer is changed from a token on."""
        key, size = question.key, len(_row(question))
        before = self.answers.kept[key]
        self.answers.kept[key] = mapped(lambda path, t: _changed(t, size, begin), before)
        try:
            pairs = zip(self._given(), self.usual, strict=True)
            return not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
        finally:
            self.answers.kept[key] = before


def _tokenizers(pipe: Any) -> list[Any]:
    """List the tokenizers of a pipeline, and those within its processors."""
    parts = list(pipe.components.values())
    found = [*parts, *(getattr(part, "tokenizer", None) for part in parts)]
    return [part for part in found if isinstance(part, PreTrainedTokenizerBase)]


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    with quiet():
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def _row(question: EncoderCall) -> list[int]:
    """Return the tokens of a question; [] if it has none."""
    tokens = (t for t in tensors_in((question.args, question.kwargs)) if t.ndim == 2)
    row = next((t for t in tokens if not t.is_floating_point()), None)
    return [] if row is None else row[0].tolist()


def _longest_part(row: list[int], of: set[int]) -> tuple[int, int]:
    """Find (length, start) of the longest part of a row that consists of these tokens."""
    best, begin = (0, 0), 0
    for k, token in enumerate([*row, None]):
        if token not in of:
            best = max(best, (k - begin, begin), key=lambda part: part[0])
            begin = k + 1
    return best


def _changed(t: Tensor, size: int, begin: int) -> Tensor:
    """Change the values from a token on, in a tensor that has `size` tokens."""
    axis = next((k for k, own in enumerate(t.shape) if own == size), None)
    if axis is None or t.is_meta:
        return t
    t = t.clone()
    t.narrow(axis, begin, size - begin).mul_(1.5).add_(0.5)
    return t
