"""Find out whether a denoiser's arguments change with the batch, the latents or the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import RULES, Path, Time
from flowrl.policy.replay.errors import UnreplayableError


@dataclass
class Leaf:
    """One argument of a call, or an entry nested in one."""

    path: Path  # keys and positions that lead to it
    axis: int | None = None  # axis of the batch; None: it has none
    is_list: bool = False  # it is a Python list with entries for each row


def name(path: Path) -> str:
    """Write a path as Python does: a[0]['b']."""
    return str(path[0]) + "".join(f"[{k!r}]" for k in path[1:])


def leaves(a: Any, b: Any, rows_a: int, rows_b: int, path: Path = ()) -> Iterator[Leaf]:
    """Compare the same call recorded with rows_a and rows_b rows; an axis whose length scales with
    the rows is the batch axis."""
    if isinstance(a, dict) and a:
        for key in a:
            yield from leaves(a[key], b[key], rows_a, rows_b, (*path, key))
    elif isinstance(a, list | tuple) and len(a) != len(b):
        if len(a) * rows_b != len(b) * rows_a:
            raise UnreplayableError(
                f"argument {name(path)}: {len(a)} entries for {rows_a} prompts and {len(b)} for"
                f" {rows_b}; no batch axis found"
            )
        yield Leaf(path, 0, True)
    elif isinstance(a, list | tuple) and any(isinstance(v, Tensor) for v in a):
        for k, (u, v) in enumerate(zip(a, b, strict=True)):
            yield from leaves(u, v, rows_a, rows_b, (*path, k))
    elif isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
        axes = [k for k, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(axes) != 1 or a.shape[axes[0]] * rows_b != b.shape[axes[0]] * rows_a:
            raise UnreplayableError(
                f"argument {name(path)}: shape {tuple(a.shape)} for {rows_a} prompts and"
                f" {tuple(b.shape)} for {rows_b}; no batch axis found"
            )
        yield Leaf(path, axes[0])
    else:
        yield Leaf(path)


def differs(a: Any, b: Any) -> bool:
    """Whether two recorded values of one argument are not equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or not torch.equal(a.to(b.dtype), b)
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(differs(u, v) for u, v in zip(a, b, strict=True))
    if isinstance(a, dict):
        return any(differs(a[k], b[k]) for k in a)
    if type(a) is not type(b):
        return True
    return isinstance(a, int | float | str | bool | type(None)) and a != b


def fit_time(path: Path, values: list[Any], t: Tensor, s: Tensor, batched: bool) -> Time:
    """Find the rule by which an argument follows t (J,) or sigma (J,): a named one, else affine in
    either, elementwise. values: the argument at these times."""
    if not all(isinstance(v, Tensor | int | float) and not isinstance(v, bool) for v in values):
        raise UnreplayableError(
            f"argument {name(path)} changes from step to step and is not a number; it cannot be"
            " replayed at other times"
        )
    stack = torch.stack([torch.as_tensor(v).detach().cpu() for v in values])
    # fp32 for integer times: networks embed floats in the same way
    dtype = stack.dtype if stack.is_floating_point() else torch.float32
    row = stack.double()[:, 0] if batched and stack.ndim > 1 else stack.double()
    found = _named_rule(path, stack, t, s, dtype) or _affine_rule(path, row, t, s, dtype)
    if found is None:
        raise UnreplayableError(
            f"argument {name(path)} changes from step to step, but not as a function of t or sigma"
            " that could be fitted"
        )
    return found


def _named_rule(path: Path, stack: Tensor, t: Tensor, s: Tensor, dtype: torch.dtype) -> Time | None:
    """Find one of RULES, for an argument that is one number for all rows at each time."""
    exact = torch.finfo(dtype).eps * 8
    flat = stack.double().reshape(len(stack), -1)
    if stack.ndim > 2 or not bool((flat == flat[:, :1]).all()):
        return None
    off: dict[str, float] = {}
    for rule, fn in RULES.items():
        expected = fn(t.to(dtype), s.to(dtype)).double()
        gap = (flat[:, 0] - expected).abs() / expected.abs().clamp(min=1e-3)
        if bool((gap <= exact).all()):
            off[rule] = gap.max().item()
    # networks turn a time's last digits into angles, so take the most exact of the rules that agree
    return Time(path, min(off, key=off.__getitem__), dtype) if off else None


def _affine_rule(path: Path, row: Tensor, t: Tensor, s: Tensor, dtype: torch.dtype) -> Time | None:
    """Fit a * t + c or a * sigma + c, elementwise; row (J, ...): one row of the argument."""
    exact = torch.finfo(dtype).eps * 8
    found: list[tuple[float, Time]] = []
    for label, u in (("t", t), ("sigma", s)):
        w = u.reshape(-1, *[1] * (row.ndim - 1))
        a = (row[-1] - row[0]) / (u[-1] - u[0])
        c = row[0] - a * u[0]
        off = (a * w + c - row).abs().max()
        if off <= 4 * exact * row.abs().max():
            found.append((off.item(), Time(path, f"a * {label} + c", dtype, a, c)))
    # whole times are rounded noise levels, so take the more exact of the two rules
    return min(found, key=lambda rule: rule[0])[1] if found else None
