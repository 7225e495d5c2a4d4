"""Rewards as words of a command line: jpeg, jpeg=0.5, jpeg.quality=80, my/file.py:red."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.rewards.core.find import setting_kinds
from flowrl.runtime.typed_text import value_of


def parse_words(words: Sequence[str], names: Mapping[str, str] = {}) -> dict[str, dict[str, Any]]:
    """Read words of the command line for `load_set`: NAME, NAME=WEIGHT and NAME.SETTING=VALUE.

    >>> parse_words(["jpeg", "jpeg.quality=80", "clip=0.5"])
    {'jpeg': {'weight': 1.0, 'quality': 80}, 'clip': {'weight': 0.5}}

    NAME may be "file.py:function", whose label is the function's name. A word of another form, or a
    weight or setting given twice -> ValueError. names: label -> name of its reward, unless a word
    says it.
    """
    out: dict[str, dict[str, Any]] = {}
    given: set[tuple[str, str]] = set()  # (label, setting); the setting is "" where a word has none
    parsed = [_parse(text) for text in words]
    names = {**names, **{w.label: w.value for w in parsed if w.setting == "name" and w.value}}
    for word in parsed:
        _check_new(word, given)
        given |= word.gives()
        named = {"name": f"{word.file}:{word.label}"} if word.file else {}
        entry = out.setdefault(word.label, {"weight": 1.0, **named})
        name = entry.get("name") or names.get(word.label, word.label)
        if not word.label or not _entered(word, name, entry):
            raise ValueError(
                f'reward "{word.text}" should be NAME, NAME=WEIGHT such as jpeg=0.5, or'
                " NAME.SETTING=VALUE such as jpeg.quality=80"
            )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """FILE:LABEL.SETTING=VALUE, taken apart; "" where a part is absent."""

    text: str  # the whole word
    file: str  # path of a Python file
    label: str  # label of the reward
    setting: str  # setting of the reward
    value: str | None  # text after "="; None: there is no "="

    @property
    def left(self) -> str:
        return self.text.partition("=")[0]

    def gives(self) -> set[tuple[str, str]]:
        """The settings that the word gives, as (label, setting): NAME=0.5 gives NAME.weight too."""
        own = {(self.label, self.setting)}
        weight = self.value is not None and not self.setting
        return own | {(self.label, "weight")} if weight else own


def _parse(text: str) -> Word:
    left, equals, value = text.partition("=")
    file, _, rest = left.rpartition(":") if ".py:" in left else ("", "", left)
    label, _, setting = rest.partition(".")
    return Word(text=text, file=file, label=label, setting=setting, value=value if equals else None)


def _check_new(word: Word, given: set[tuple[str, str]]) -> None:
    """Raise ValueError where an earlier word gives the same setting, or a part of it."""
    if given & word.gives():
        raise ValueError(
            f'reward "{word.text}": "{word.left}" is given twice; give each reward one weight, and'
            " each setting one value"
        )
    for label, setting in given:
        same = label == word.label and setting and word.setting
        if same and _within(setting, word.setting):
            raise ValueError(
                f'reward "{word.text}": "{label}.{setting}" is given too, and one holds the other;'
                " give one of the two"
            )


def _entered(word: Word, name: str, entry: dict[str, Any]) -> bool:
    """Put the value of a word into the entry of reward `name`; False: the word has no known
    form."""
    path = word.setting.split(".")
    if word.value == "":  # a shell variable in the word was not set
        return False
    try:
        if word.setting and word.value is not None:
            _put(entry, path, value_of(word.value, setting_kinds(name, path)))
        elif word.value is not None:
            entry["weight"] = float(word.value)
    except ValueError:
        return False
    return word.value is not None or not word.setting


def _within(a: str, b: str) -> bool:
    """Whether one of two settings is a part of the other, as top.left is of top."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set tree[k1][k2]... to value; a key that does not hold a mapping -> ValueError."""
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{key} is one value")
    tree[keys[-1]] = value
