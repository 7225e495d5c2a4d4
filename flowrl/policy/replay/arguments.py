"""Arguments of a denoiser call by what they follow: the latents, the time, the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.coords import radius
from flowrl.types import expand

Path = tuple[Any, ...]  # keys and positions that lead to an argument


@dataclass
class Affine:
    """out viewed as (blocks, rows, D): copies of the batch, in which each row has `repeats` entries
    of shape `shape` that follow one another."""

    blocks: int
    repeats: int
    shape: tuple[int, ...]  # of one entry of out
    index: Tensor | None  # (D,) into the flattened input row; None: the input row as it is
    scale: Tensor  # (D,) fp64, 0 where out does not depend on the input; () where it is one number
    const: Tensor | None  # (blocks, rows, D) of the recorded run; None: zero

    def __call__(
        self, x: Tensor, const: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """One block: x (n, *L) -> (n * repeats, *shape). const (n, D) replaces the recorded one;
        factor (n, 1) or () multiplies the scale."""
        y = x.reshape(x.shape[0], -1)
        if self.index is not None:
            y = y.index_select(1, self.index.to(x.device))
        if self.scale.ndim or self.scale.item() != 1.0:
            y = y * self.scale.to(x)
        if factor is not None:
            y = y * factor
        if const is not None:
            y = y + const
        return y.reshape(x.shape[0] * self.repeats, *self.shape)

    def inverse(self, y: Tensor, shape: tuple[int, ...], const: Tensor | None = None) -> Tensor:
        """Solve for the input row, (n, *shape); needs a bijection (`invertible`)."""
        z = y.reshape(y.shape[0], -1)
        if const is not None:
            z = z - const
        z = z / self.scale.to(z)
        if self.index is not None:
            z = z.index_select(1, self.index.argsort().to(y.device))
        return z.reshape(-1, *shape)

    def invertible(self, numel: int) -> bool:
        """Whether each of the `numel` entries of an input row is in the output, once."""
        index = torch.arange(numel) if self.index is None else self.index.cpu()
        if index.numel() != numel or not bool((self.scale != 0).all()):
            return False
        return bool((index.sort().values == torch.arange(numel)).all())


@dataclass
class CallPlan:
    """One denoiser call: component name, latents, times, per-prompt and shared arguments; `out`
    maps one output row to one row of latents."""

    module: str
    blocks: int
    slots: list[Slot]
    times: list[Time]
    rows: list[Rows]
    shared: dict[Path, Any]
    out: Affine

    def arguments(
        self, fixed: dict[Path, Any], x: Tensor, sigma: Tensor, time: Tensor, blocks: int
    ) -> dict[str, Any]:
        """Arguments of one call for `blocks` blocks of the batch, nested as the network takes them.

        fixed: what `Cond.gather` gives. sigma, time: (n,) or () fp64.
        """
        flat = dict(fixed)
        for slot in self.slots:
            constants = flat.get(slot.path) or [None]  # None: one block serves all
            parts = [slot(x, sigma, constant) for constant in constants]
            flat[slot.path] = torch.cat(parts * (blocks // len(parts)))
        for follower in self.times:
            value = follower(time, sigma, x)
            value = value.repeat_interleave(self.slots[0].map.repeats, 0)
            flat[follower.path] = torch.cat([value] * blocks)
        return nest(flat)

    def pieces(self, output: Tensor, count: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Split one output into `count` blocks of predictions, each of `shape` (n, *L), fp32."""
        blocks = output.float().reshape(count, shape[0], -1)
        if self.out.index is not None:
            blocks = blocks.index_select(2, self.out.index.to(output.device))
        return list(blocks.reshape(count, *shape))


@dataclass
class Slot:
    """An argument that holds latents: affine(x') * factor(sigma), factor "1" or "1/r" (a network
    that reads variance-preserving input)."""

    path: Path
    map: Affine
    rule: str
    dtype: torch.dtype

    def __call__(self, x: Tensor, sigma: Tensor, constant: Tensor | None) -> Tensor:
        """x (n, *L), constant (n, D) -> one block of the argument, (n * repeats, ...)."""
        factor = expand((1 / radius(sigma)).to(x), x.flatten(1)) if self.rule == "1/r" else None
        return self.map(x, constant, factor).to(self.dtype)


@dataclass
class Time:
    """An argument that follows the model time t or sigma: a named rule, or elementwise a * t + c
    with a, c shaped as one row of it."""

    path: Path
    rule: str
    dtype: torch.dtype
    a: Tensor | None = None
    c: Tensor | None = None

    def __call__(self, t: Tensor, sigma: Tensor, like: Tensor) -> Tensor:
        """t, sigma (n,) or () fp64 -> (n, ...) for like (n, *L)."""
        n, device = like.shape[0], like.device
        if self.a is not None and self.c is not None:
            u = (sigma if "sigma" in self.rule else t).expand(n)
            value = expand(u, self.a[None]) * self.a.to(u.device) + self.c.to(u.device)
            return value.to(device, self.dtype)
        rule = RULES[self.rule]
        return rule(t.to(device, self.dtype), sigma.to(device, self.dtype)).expand(n)


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
        """The argument for `rows` of the prompts, in each of `blocks`."""
        if kept is None:
            return None
        if self.is_list:
            alike = all(entry is kept[0] or _equal(entry, kept[0]) for entry in kept[1:])
            # equal entries spare a synchronisation with the device
            picked = [kept[0]] * len(rows) if alike else [kept[i] for i in rows.tolist()]
            return picked * len(blocks)
        chosen = blocks if self.blocks > 1 else [0]
        value = torch.cat([kept[block].index_select(0, rows) for block in chosen])
        return value.flatten(0, 1).movedim(0, self.axis)


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


@dataclass(eq=False)
class Cond:
    """P prompts, encoded once. kept[regime][call] holds the per-prompt arguments; rows of any
    number are gathered from it."""

    prompts: tuple[str, ...]
    kept: list[list[dict[Path, Any]]]
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def gather(
        self, at: tuple[int, int], plan: CallPlan, rows: Tensor, blocks: list[int]
    ) -> dict[Path, Any]:
        """Arguments of call `plan`, the one at (regime, call), that follow neither x nor time.

        Remembered while the same tensor of rows is asked for: a sampling loop gathers once.
        """
        version = None if rows.is_inference() else rows._version  # None: it cannot be told
        seen = self.cache
        if version is None or seen.get("rows") is not rows or seen["version"] != version:
            seen.clear()
            seen.update(rows=rows, version=version)
        key = (*at, *blocks)
        if key not in seen:
            kept = self.kept[at[0]][at[1]]
            seen[key] = plan.shared | {
                r.path: r.gather(kept[r.path], rows, blocks) for r in plan.rows
            }
            for slot in plan.slots:
                if slot.path in kept:  # constants that are added to the latents
                    each = [kept[slot.path][block].index_select(0, rows) for block in blocks]
                    seen[key][slot.path] = each
        return seen[key]


def get(args: Any, path: Path) -> Any:
    """The argument that a path leads to."""
    for key in path:
        args = args[key]
    return args


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
    nested = {path[0] for path in flat if len(path) > 1}
    return {k: _lists(v) if k in nested else v for k, v in out.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(k, int) for k in value):
        return [_lists(value[k]) for k in sorted(value)]
    return {k: _lists(v) for k, v in value.items()}
