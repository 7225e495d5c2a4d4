"""Join the parts of everyday.yaml to the 1,000 prompts of data=everyday.

    python scripts/embedded/everyday.py             # writes flowrl/data/everyday.jsonl
    python scripts/embedded/everyday.py --show 20   # prints some, and writes nothing

Six tasks, a fifth of each held out. A held-out prompt has looks, doings, numbers and texts that no
training prompt has of the same subject; no two prompts have the same words in another order. Every
choice is a hash of what it is for, so that the file is the same everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PARTS = Path(__file__).with_suffix(".yaml")
TARGET = Path(__file__).resolve().parents[2] / "flowrl" / "data" / "everyday.jsonl"
COUNTS = {"photo": 220, "style": 220, "count": 130, "relation": 180, "text": 110, "scene": 140}
HELD_OUT = 5  # one prompt in so many
NUMBERS = ("two", "three", "four", "five", "six")
COLORS = re.compile(
    r"red|orange|yellow|green|blue|purple|pink|golden|colorful|brown|turquoise|copper"
)

Made = tuple[str, list[tuple[str, str]]]  # a text, and the pairs (subject, what is said of it)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A line of the parts."""

    name: str  # in the singular
    plural: str  # the same of several
    looks: tuple[list[str], list[str]]  # for training, held out
    does: tuple[list[str], list[str]]  # for training, held out
    several: str  # what several of it do
    where: str  # section of everyday.yaml, which decides the light


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What everyday.yaml holds."""

    subjects: dict[str, Subject]  # by "SECTION NAME"
    frames: dict[str, list[str]]  # "shots", "styles", "colorless" styles
    light: dict[str, list[str]]  # section -> light or time of day
    relations: dict[str, list[str]]  # what can be beside what, and the words for it
    texts: tuple[list[str], list[str]]  # for training, held out

    def of(self, *sections: str) -> list[Subject]:
        return [s for s in self.subjects.values() if s.where in sections]


def read() -> Parts:
    tree: dict[str, Any] = yaml.safe_load(PARTS.read_text(encoding="utf-8"))
    subjects = {}
    for where in ("indoors", "outdoors", "scenes", "signs"):
        for group, lines in tree[where].items():
            for line in lines.splitlines() if group not in ("texts", "held out") else ():
                section = group if where == "scenes" else where
                subject = subject_of(line, section)
                subjects[f"{section} {subject.name}"] = subject
    signs, relations = tree["signs"], tree["relations"]
    return Parts(
        subjects=subjects,
        frames={name: tree[name] for name in ("shots", "styles", "colorless")},
        light=tree["light"] | {"closed": []},
        relations={name: words.split(", ") for name, words in relations.items()},
        texts=(signs["texts"].strip().split(", "), signs["held out"].strip().split(", ")),
    )


def subject_of(line: str, where: str) -> Subject:
    name, *rest = line.split(" | ")
    name, _, plural = name.partition("/")
    looks, more, does, held = (text.split(", ") for text in rest[:4])
    several = rest[4] if len(rest) > 4 else ""
    return Subject(
        name=name,
        plural=plural or f"{name}s",
        looks=(looks, more),
        does=(does, held),
        several=several,
        where=where,
    )


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def chosen(values: Sequence[Any], *key: object) -> Any:
    """One of the values, by a hash of a key."""
    text = ":".join(map(str, key))
    return values[int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(values)]


def ordered(values: Sequence[Any], *key: object) -> list[Any]:
    def digest(value: Any) -> str:
        return hashlib.sha256(f"{key} {value}".encode()).hexdigest()

    return sorted(values, key=digest)


class Writer:
    """Writes the prompts of one part, training (held=0) or held out (held=1). key: what a choice
    depends on."""

    def __init__(self, parts: Parts, held: int) -> None:
        self.parts, self.held = parts, held

    def look(self, subject: Subject, *key: object) -> str:
        return chosen(subject.looks[self.held], subject.name, *key)

    def described(self, subject: Subject, *key: object) -> Made:
        """Say what a subject looks like and does, as "a wet otter cracking open a shell"."""
        look = self.look(subject, "look", *key)
        doing = chosen(subject.does[self.held], subject.name, "does", *key)
        pairs = [(subject.name, look), (subject.name, doing)]
        return f"{with_article(f'{look} {subject.name}')} {doing}", pairs

    def photo(self, subject: Subject, *key: object) -> Made:
        text, pairs = self.described(subject, *key)
        light = chosen(self.parts.light[subject.where], "light", *key)
        shot = chosen(self.parts.frames["shots"], "shot", *key)
        return f"{shot.format(text)}, {light}", pairs

    def style(self, subject: Subject, *key: object) -> Made:
        text, pairs = self.described(subject, *key)
        return self.styled(text, key), pairs

    def count(self, subject: Subject, *key: object) -> Made:
        held = chosen(NUMBERS, subject.name, "held-out number")
        number = held if self.held else chosen([n for n in NUMBERS if n != held], "number", *key)
        look = self.look(subject, "look", *key)
        text = f"{number} {look} {subject.plural} {subject.several}"
        return self.framed(text, key), [(subject.name, number), (subject.name, look)]

    def relation(self, subject: Subject, *key: object) -> Made:
        relations, where = self.parts.relations, subject.where
        others = [name for name in relations[where] if name != subject.name]
        other = self.parts.subjects[f"{where} {chosen(others, 'other', *key)}"]
        on_top = (
            ["on top of"] * 2 if where == "indoors" and other.name in relations["bases"] else []
        )
        word = chosen([*relations["words"], *on_top], "relation", *key)
        first, second = self.look(subject, "first", *key), self.look(other, "second", *key)
        text = f"{with_article(f'{first} {subject.name}')} {word}"
        text += f" {with_article(f'{second} {other.name}')}"
        return self.framed(text, key), [(subject.name, first), (other.name, second)]

    def text(self, subject: Subject, *key: object) -> Made:
        look = self.look(subject, "look", *key)
        doing = chosen(subject.does[self.held], subject.name, "does", *key)
        written = chosen(self.parts.texts[self.held], "written", *key)
        text = f'{with_article(f"{look} {subject.name}")} that says "{written}" {doing}'
        return self.framed(text, key), [(subject.name, look), (subject.name, doing)]

    def scene(self, subject: Subject, *key: object) -> Made:
        text, pairs = self.described(subject, *key)
        if light := self.parts.light[subject.where]:
            text = f"{text}, {chosen(light, 'light', *key)}"
        return self.framed(text, key), pairs

    def framed(self, text: str, key: tuple[object, ...]) -> str:
        """The text by itself, as a photo, or in a style."""
        frames = ["{}", self.parts.frames["shots"][0]]
        how = chosen([*frames, "style"], "frame", *key)
        return how.format(text) if how in frames else self.styled(text, key)

    def styled(self, text: str, key: tuple[object, ...]) -> str:
        """The text in a style, in one with colours where it names some."""
        colored = COLORS.search(text)
        frames = self.parts.frames["styles"] + ([] if colored else self.parts.frames["colorless"])
        return chosen(frames, "style", *key).format(text)

    def subjects(self, task: str) -> list[Subject]:
        """Those that a task is about, mixed."""
        parts = self.parts
        found = {
            "relation": [
                parts.subjects[f"{where} {name}"]
                for where in ("indoors", "outdoors")
                for name in parts.relations[where]
            ],
            "text": parts.of("signs"),
            "scene": parts.of("open", "closed"),
        }.get(task, parts.of("indoors", "outdoors"))
        return ordered(found, task)

    def write(self, task: str, count: int, known: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
        """So many prompts of a task, over its subjects in turn. known: the words, sorted, of all
        prompts so far."""
        make: Callable[..., Made] = getattr(self, task)
        subjects = self.subjects(task)
        for number in range(count):
            subject = subjects[number % len(subjects)]
            for attempt in range(1000):
                text, pairs = make(subject, task, self.held, number, attempt)
                words = sorted_words(text)
                if words not in known:
                    break
            known.add(words)
            row = {"prompt": text[0].upper() + text[1:], "task": task, "pairs": pairs}
            written = re.search(r'"(.+)"', text)
            yield row | ({"text": written[1]} if written else {})


def sorted_words(text: str) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"[\w'-]+", text.lower())))


def prompts() -> list[dict[str, Any]]:
    """All prompts, tasks mixed; "split" says whether one is for "train" or "eval"."""
    parts, known, out = read(), set[tuple[str, ...]](), []
    for held, split in enumerate(("train", "eval")):
        for task, count in COUNTS.items():
            own = count // HELD_OUT if held else count - count // HELD_OUT
            rows = Writer(parts, held).write(task, own, known)
            out += [row | {"split": split} for row in rows]
    return ordered(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", type=int, help="print so many, and write nothing")
    given = parser.parse_args()
    made = prompts()
    if given.show:
        print(
            *(f"{row['split']:5} {row['task']:8} {row['prompt']}" for row in made[: given.show]),
            sep="\n",
        )
        return
    TARGET.write_text("".join(f"{json.dumps(row)}\n" for row in made), encoding="utf-8")


if __name__ == "__main__":
    main()
