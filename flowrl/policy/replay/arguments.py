"""Arguments of a denoiser call by what they follow: the latents, the time, the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import Affine
from flowrl.policy.replay.coords import radius
from flowrl.types import expand

Path = tuple[Any, ...]  # keys and positions that lead to an argument


@dataclass
class Slot:
    """An argument that holds latents: affine(x') * factor(sigma), factor "1" or "1/r" (a network
    that reads variance-preserving input)."""

    path: Path
    map: Affine
    rule: str
    dtype: torch.dtype

    def __call__(self, x: Tensor, s: Tensor, const: Tensor | None) -> Tensor:
        factor = expand((1 / radius(s)).to(x), x.flatten(1)) if self.rule == "1/r" else None
        return self.map(x, const, factor).to(self.dtype)


@dataclass
class Time:
    """An argument that follows the model time t or sigma: a named rule, or elementwise a * t + c
    with a, c shaped as one row of it."""

    path: Path
    rule: str
    dtype: torch.dtype
    a: Tensor | None = None
    c: Tensor | None = None

    def __call__(self, t: Tensor, s: Tensor, like: Tensor) -> Tensor:
        """t, s (n,) or () fp64 -> (n, ...) for like (n, *L)."""
        if self.a is not None and self.c is not None:
            u = (s if "sigma" in self.rule else t).expand(like.shape[0])
            return (expand(u, self.a[None]) * self.a.to(u.device) + self.c.to(u.device)).to(
                like.device, self.dtype
            )
        return RULES[self.rule](
            t.to(like.device, self.dtype), s.to(like.device, self.dtype)
        ).expand(like.shape[0])


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda t, s: t,
    "t / 1000": lambda t, s: t / 1000,
    "1 - t / 1000": lambda t, s: 1 - t / 1000,
    "(1000 - t) / 1000": lambda t, s: (1000 - t) / 1000,
    "1000 - t": lambda t, s: 1000 - t,
    "-t": lambda t, s: -t,
    "sigma": lambda t, s: s,
    "1 - sigma": lambda t, s: 1 - s,
}


@dataclass
class Rows:
    """An argument with one entry a prompt along `axis`, ordered blocks x rows x repeats; kept as
    (blocks, P, repeats, ...). is_list: a Python list."""

    path: Path
    axis: int
    blocks: int
    repeats: int
    is_list: bool = False

    def keep(self, value: Any, rows: int, drop: int) -> Any:
        """Bring a recorded value into the kept form, without the last `drop` rows."""
        if value is None:
            return None
        if self.is_list:
            return list(value)[: rows - drop]
        v = value.detach().movedim(self.axis, 0)
        return v.reshape(self.blocks, rows, self.repeats, *v.shape[1:])[:, : rows - drop]

    def gather(self, kept: Any, rows: Tensor, blocks: list[int]) -> Any:
        if kept is None:
            return None
        if self.is_list:
            one = kept[0] if all(k is kept[0] or _equal(k, kept[0]) for k in kept[1:]) else None
            return (
                [one] * len(rows) if one is not None else [kept[i] for i in rows.tolist()]
            ) * len(blocks)
        picked = blocks if self.blocks > 1 else [0]
        v = (
            torch.cat([kept[b].index_select(0, rows) for b in picked])
            if len(picked) > 1
            else kept[picked[0]].index_select(0, rows)
        )
        return v.flatten(0, 1).movedim(0, self.axis)


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """value with fn applied to the tensors in its nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) is dict:
        return {k: map_tensors(fn, v) for k, v in value.items()}
    return type(value)(map_tensors(fn, v) for v in value) if type(value) in (list, tuple) else value


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """{("a", "b"): 1} -> {"a": {"b": 1}}; integer keys make lists."""
    out: dict[str, Any] = {}
    for path, value in flat.items():
        here = out
        for key in path[:-1]:
            here = here.setdefault(key, {})
        here[path[-1]] = value
    return {
        k: _lists(v) if any(len(p) > 1 and p[0] == k for p in flat) else v for k, v in out.items()
    }


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(k, int) for k in value):
        return [_lists(value[k]) for k in sorted(value)]
    return {k: _lists(v) for k, v in value.items()}


def assign(args: dict[str, Any], path: Path, value: Any) -> None:
    """Set a nested argument, copying the containers on the way (constants are shared between
    calls)."""
    here: Any = args
    for key in path[:-1]:
        here[key] = here[key].copy()
        here = here[key]
    here[path[-1]] = value
