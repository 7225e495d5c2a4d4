"""How files of a run are damaged: as a disk does it, or as somebody does who edits them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (None, True, -1, 10**400, 1e308, "x", "", [], {}, [[]], {"a": 1}, 0.5)

Way = Callable[[Path, random.Random], str]  # damages a file -> what was done to it


def candidates(run: Path) -> list[Path]:
    """Files that a run reads back, and a few that it only writes."""
    return sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and path.name not in ("run.lock", "report.html")
    )


def damage(path: Path, rng: random.Random, values: Sequence[Any] = VALUES) -> str:
    """Damage a file -> what was done to it. values: what an edit writes in place of others."""
    ways: list[Callable[[Path, random.Random], str]] = [
        cut,
        flip,
        empty,
        noise,
        other,
        folder,
        gone,
    ]
    if path.suffix in (".json", ".jsonl"):
        ways += [partial(edit_json, values=values)] * 12
    if path.suffix == ".yaml":
        ways += [edit_yaml] * 6
    return rng.choice(ways)(path, rng)


def cut(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])
    return "cut off"


def flip(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes() or b"x")
    for _ in range(rng.choice([1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "bits flipped"


def empty(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def noise(path: Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(rng.choice([1, 100, 5000])))
    return "filled with noise"


def other(path: Path, rng: random.Random) -> str:
    text = rng.choice(["[]", "null", "3", '"x"', "{}", "[" * 5000, "\n", "NaN", "\ufeff{}"])
    path.write_text(text, encoding="utf-8")
    return f"holds {text[:10]!r}"


def folder(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder in its place"


def gone(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "deleted"


def edit_json(path: Path, rng: random.Random, values: Sequence[Any]) -> str:
    """One value of one line has another type or size, or is gone."""
    lines = path.read_text(encoding="utf-8").splitlines() or ["{}"]
    which = rng.randrange(len(lines))
    tree = json.loads(lines[which]) if path.suffix == ".jsonl" else json.loads("\n".join(lines))
    done = edit(tree, rng, values)
    if path.suffix == ".jsonl":
        lines[which] = json.dumps(tree)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(tree), encoding="utf-8")
    return done


def edit_yaml(path: Path, rng: random.Random) -> str:
    """A line is gone, or its value is another one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    which = rng.randrange(len(lines))
    value = rng.choice(["", "[]", "x", "-1", "1e999", "{a: 1}", ".nan", "*x", "'", "!!python/x 1"])
    before = lines[which]
    lines[which] = f"{before.partition(':')[0]}: {value}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{before.strip()!r} became {lines[which].strip()!r}"


def edit(tree: Any, rng: random.Random, values: Sequence[Any]) -> str:
    """Change or remove a value, found by going down by chance."""
    if not tree:
        return "nothing"
    holder, key = tree, _key(tree, rng)
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.7:
        holder, key = holder[key], _key(holder[key], rng)
    if rng.random() < 0.25:
        del holder[key]
        return f"{key!r} is gone"
    holder[key] = rng.choice(values)
    return f"{key!r} is {str(holder[key])[:12]!r}"


def _key(tree: Any, rng: random.Random) -> Any:
    return rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))


def restore(path: Path, whole: Path) -> None:
    """Put back what was there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(whole, path)
