"""The arguments of a denoiser call, by what they follow: the latents, the time or the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from flowrl.policy.replay.items import PromptItem
from flowrl.types import expand

Path = tuple[Any, ...]  # keys and positions that lead to an argument
SCALE = object()  # mark before a path: the value holds which latents the argument there reads


@dataclass
class Affine:
    """An affine map of each row: out[row] = const[row] + scale * in[row].flatten()[index].

    out is viewed as (blocks, rows, D): copies of the batch, in which each row has `repeats` entries
    of shape `shape` that follow one another.
    """

    blocks: int  # number of copies of the batch, one for each branch of guidance
    repeats: int  # number of entries in which each row lies, one after the other
    shape: tuple[int, ...]  # shape of one entry of out
    index: Tensor | None  # (D,) places in the flattened input row; None: the input row itself
    scale: Tensor  # (D,) fp64, 0 where out does not depend on the input; () if it is one number
    const: Tensor | None  # (blocks, rows, D) constants of the recorded run; None: zero

    def __call__(
        self,
        x: Tensor,
        const: Tensor | None = None,
        factor: Tensor | None = None,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Compute one block: x (n, *L) fp32 -> (n * repeats, *shape). const and scale (n, D)
        replace the recorded ones; factor (n, 1) or () multiplies the scale. dtype: type to which x
        and the result of each operation are rounded, as in a loop of low precision."""
        y = x.reshape(x.shape[0], -1).to(dtype).to(x.dtype)
        if self.index is not None:
            y = y.index_select(1, self.index.to(x.device))
        if scale is not None:
            y = y * scale.to(x, non_blocking=True)
        elif self.scale.ndim or self.scale.item() != 1.0:
            y = y * self.scale.to(x, non_blocking=True)
        if factor is not None:
            y = y * factor
        if const is not None:
            y = y.to(dtype).to(x.dtype) + const
        return y.to(dtype).reshape(x.shape[0] * self.repeats, *self.shape)

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
    """The plan of one denoiser call: what each of its arguments follows, and its output."""

    module: str  # name of the component that is called
    blocks: int  # number of copies of the batch in this call
    slots: list[Slot]  # arguments that hold latents
    times: list[Time]  # arguments that follow the time
    rows: list[Rows]  # arguments that belong to a prompt
    shared: dict[Path, Any]  # arguments that are the same for all rows and times
    # map from a row of output to one of latents; None: only the pipeline can tell
    out: Affine | None
    streams: int = 1  # number of the network's outputs that are predictions
    # entries of an output row from whose end `out` counts its places; 0: they count from the start
    ending: int = 0

    def arguments(
        self, fixed: dict[Path, Any], x: Tensor, sigma: Tensor, time: Tensor, blocks: int
    ) -> dict[Path, Any]:
        """Make the arguments of one call for `blocks` blocks of the batch, by path.

        fixed: the result of `Cond.gather`. sigma, time: (n,) or () fp64.
        """
        flat = dict(fixed)
        for slot in self.slots:
            # without constants, all blocks are equal, and one serves all
            constants = flat.get(slot.path) or [None]
            scales = flat.pop((SCALE, *slot.path), None) or [None] * len(constants)
            parts = [slot(x, sigma, c, k) for c, k in zip(constants, scales, strict=True)]
            value = torch.cat(parts * (blocks // len(parts)))
            flat[slot.path] = list(value) if slot.is_list else value
        for follower in self.times:
            value = follower(time, sigma, x)
            value = value.repeat_interleave(self.slots[0].map.repeats, 0)
            flat[follower.path] = torch.cat([value] * blocks)
        return flat

    def pieces(self, output: Tensor, count: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Split one output into `count` blocks of predictions, each of `shape` (n, *L)."""
        assert self.out is not None
        blocks = output.reshape(count, shape[0], -1)
        if self.out.index is not None:
            index = self.out.index.to(output.device)
            if self.ending and (longer := blocks.shape[2] - self.ending):
                index = index + longer  # a text of another length comes before the latents
            blocks = blocks.index_select(2, index)
        return list(blocks.reshape(count, *shape))

    def raw(self, output: Tensor, count: int, rows: int) -> list[Tensor]:
        """Split it in the network's own layout: each block (rows, repeats, ...), fp32."""
        return list(output.float().reshape(count, rows, -1, *output.shape[1:]))


@dataclass
class Slot:
    """An argument that holds latents: map(x') * factor(sigma), where factor is 1 or 1 / r."""

    path: Path  # place of the argument in the call
    map: Affine  # map from a row of latents to this argument
    rule: str  # "1", or "1/r" if the network reads input of constant variance
    dtype: torch.dtype  # type of the argument
    # the constant added to the latents is c0 + c1 sigma (a picture, noised along)
    moving: bool = False
    own: bool = False  # the prompt decides which latents are read (by its mask)
    is_list: bool = False  # the argument is a Python list of tensors, one for each row
    data: float = 1.0  # standard deviation of the network's data, used in the rule 1/r

    def factor(self, sigma: Tensor) -> Tensor:
        if self.rule == "1":
            return torch.ones_like(sigma)
        return 1 / torch.sqrt((self.data * (1 - sigma)) ** 2 + sigma**2)

    def __call__(
        self, x: Tensor, sigma: Tensor, constant: Tensor | None, scale: Tensor | None = None
    ) -> Tensor:
        """Compute one block of the argument, (n * repeats, ...), from x (n, *L). constant: (n, D),
        or (n, 2, D) if it is moving; scale: (n, D) if it belongs to the prompt."""
        flat = x.flatten(1)
        factor = (
            expand(self.factor(sigma).to(x, non_blocking=True), flat)
            if self.rule == "1/r"
            else None
        )
        if self.moving and constant is not None:
            level = expand(sigma.to(x, non_blocking=True), flat)
            constant = constant[:, 0] + level * constant[:, 1]
            constant = constant if factor is None else factor * constant
        return self.map(x, constant, factor, scale).to(self.dtype)


@dataclass
class Time:
    """An argument that follows the model time t or sigma: by a named rule, or elementwise as
    a * t + c or a * sigma + c."""

    path: Path  # place of the argument in the call
    rule: str  # key of RULES, or a text that names t or sigma, for a and c
    dtype: torch.dtype  # type of the argument
    a: Tensor | None = None  # factor, shaped like one row of the argument; None: a named rule
    c: Tensor | None = None  # constant of the same shape; None: a named rule

    def __call__(self, t: Tensor, sigma: Tensor, like: Tensor) -> Tensor:
        """Compute the argument, (n, ...) for n rows of like (n, *L), from t and sigma (n,) or ()
        fp64."""
        n, device = like.shape[0], like.device
        if self.a is not None and self.c is not None:
            u = (sigma if "sigma" in self.rule else t).expand(n)
            value = expand(u, self.a[None]) * self.a.to(u.device) + self.c.to(u.device)
            return value.to(device, self.dtype, non_blocking=True)
        rule = RULES[self.rule]
        there = (value.to(device, self.dtype, non_blocking=True) for value in (t, sigma))
        return rule(*there).expand(n)


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda t, s: t,
    "t / 1000": lambda t, s: t / 1000,
    "1 - t / 1000": lambda t, s: 1 - t / 1000,
    "(1000 - t) / 1000": lambda t, s: (1000 - t) / 1000,
    "1000 - t": lambda t, s: 1000 - t,
    "-t": lambda t, s: -t,
    "sigma": lambda t, s: s,
    "log(sigma / (1 - sigma)) / 4": lambda t, s: (s / (1 - s)).log() / 4,
    "1 - sigma": lambda t, s: 1 - s,
}


@dataclass
class Rows:
    """An argument with entries for each prompt, ordered blocks x rows x repeats; kept as (blocks,
    P, repeats, ...)."""

    path: Path  # place of the argument in the call
    axis: int  # axis along which its entries lie
    blocks: int  # 1, or the number of blocks of the call
    repeats: int  # number of entries of one prompt
    is_list: bool = False  # the argument is a Python list

    def keep(self, value: Any, rows: int, drop: int) -> Any:
        """Bring a recorded value into the kept form, without the last `drop` rows: (blocks, P,
        repeats, ...); for a list, the entries of each row in each block."""
        if value is None:
            return None
        if self.is_list:
            r = self.repeats
            each = [list(value[k * r : (k + 1) * r]) for k in range(self.blocks * rows)]
            blocks = [each[b * rows : (b + 1) * rows] for b in range(self.blocks)]
            return [block[: rows - drop] for block in blocks]
        v = value.movedim(self.axis, 0)
        return v.reshape(self.blocks, rows, self.repeats, *v.shape[1:])[:, : rows - drop]

    def gather(self, kept: Any, rows: Tensor, blocks: list[int]) -> Any:
        """Make the argument for `rows` (n,) of the prompts, in each of `blocks`."""
        if kept is None:
            return None
        chosen = blocks if self.blocks > 1 else [0]
        if self.is_list:
            return [entry for block in chosen for entry in _picked(kept[block], rows)]
        value = torch.cat([kept[block].index_select(0, rows) for block in chosen])
        return value.flatten(0, 1).movedim(0, self.axis)


def _picked(kept: list[list[Any]], rows: Tensor) -> list[Any]:
    """Return the entries of these rows. If all prompts have equal ones, rows are not read: reading
    them would make the host wait for the device."""
    if all(_equal(row, kept[0]) for row in kept[1:]):
        return kept[0] * len(rows)
    return [entry for i in rows.tolist() for entry in kept[i]]


def _equal(a: list[Any], b: list[Any]) -> bool:
    return all(
        u is v or (not isinstance(u, Tensor) and not isinstance(v, Tensor) and u == v)
        for u, v in zip(a, b, strict=True)
    )


@dataclass(eq=False)
class Group:
    """Prompts that can be rows of one call: their arguments have the same shapes, and they share
    all other arguments."""

    # [regime][call]: arguments of each prompt, from which any rows are gathered
    kept: list[list[dict[Path, Any]]]
    shared: list[list[dict[Path, Any]]]  # [regime][call]: the other arguments
    # the newest result of `gather`, which remembers it
    cache: dict[Any, Any] = field(default_factory=dict)

    def gather(
        self, at: tuple[int, int], plan: CallPlan, rows: Tensor, blocks: list[int]
    ) -> dict[Path, Any]:
        """Gather arguments of call `plan`, the one at (regime, call), that follow neither x nor
        time.

        They are remembered while `rows` stays the same tensor: a sampling loop gathers once.
        """
        # None: inference tensors do not tell whether they changed
        version = None if rows.is_inference() else rows._version
        seen = self.cache
        if version is None or seen.get("rows") is not rows or seen["version"] != version:
            seen.clear()
            seen.update(rows=rows, version=version)
        key = (*at, *blocks)
        if key not in seen:
            kept = self.kept[at[0]][at[1]]
            seen[key] = self.shared[at[0]][at[1]] | {
                r.path: r.gather(kept[r.path], rows, blocks) for r in plan.rows
            }
            for slot in plan.slots:
                if slot.path in kept:  # these slots add constants to the latents
                    each = [kept[slot.path][block].index_select(0, rows) for block in blocks]
                    seen[key][slot.path] = each
                if slot.own:
                    scales = kept[(SCALE, *slot.path)]
                    seen[key][(SCALE, *slot.path)] = [
                        scales[block].index_select(0, rows) for block in blocks
                    ]
        return seen[key]


@dataclass(eq=False)
class Cond:
    """P prompts, encoded once: the arguments that they give to the networks."""

    items: tuple[PromptItem, ...]  # the P prompts
    groups: list[Group]  # prompts that can share a call
    places: list[tuple[int, int]]  # (group, row in it) of each prompt
    starts: Tensor | None = None  # (P, *L) x0 of the pictures from which late loops start
    # (P, 2, D): constants added to latents before decoding, and scales with which latents are taken
    tails: Tensor | None = None
    # state of the trained text encoders that made this (policy/text.py)
    weights: tuple[Any, ...] | None = None
    # state of the text encoders -> the same prompts, encoded in that state
    others: dict[tuple[Any, ...], Cond] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def prompts(self) -> tuple[str | None, ...]:
        return tuple(item.prompt for item in self.items)

    @classmethod
    def of(cls, prompts: Sequence[str], values: dict[Path, Any]) -> Cond:
        """Make P prompts for a single call, with these arguments of theirs, each (1, P, ...)."""
        items = tuple(PromptItem(prompt) for prompt in prompts)
        group = Group([[values]], [[{}]])
        return cls(items, [group], [(0, k) for k in range(len(items))])

    def split(self, rows: Tensor) -> list[tuple[Group, Tensor | None, Tensor]]:
        """Sort rows (n,) by group: (the group; places of its rows, None: all; their rows in the
        group)."""
        if len(self.groups) == 1:
            return [(self.groups[0], None, rows)]
        places = torch.tensor([self.places[row] for row in rows.tolist()], device=rows.device)
        out = []
        for which in places[:, 0].unique().tolist():
            at = (places[:, 0] == which).nonzero().flatten()
            every = len(at) == len(rows)
            out.append((self.groups[which], None if every else at, places[at, 1]))
        return out


def get(args: Any, path: Path) -> Any:
    """Return the argument to which a path leads."""
    for key in path:
        args = args[key]
    return args


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply fn to the tensors in nested dicts, lists, tuples and records."""
    return tree_map_only(Tensor, fn, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists, tuples and records."""
    return (entry for entry in tree_leaves(value) if isinstance(entry, Tensor))


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Nest values by their paths: {("a", "b"): 1} -> {"a": {"b": 1}}; integer keys make lists."""
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
