"""Answers of networks whose tensors are looked up when something reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.arguments import Path, map_tensors

ABOUT = {  # operators on a tensor that need no values
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point")),
}
# logits of all words for all tokens; encoders are asked for those of the last token only
LOGITS: Path = ("logits",)


class Unread(Tensor):
    """A tensor of an answer without its values. The first operator that reads it calls `look`, and
    gets the result, here and later. Its shape, type and device are known beforehand."""

    look: Callable[[], Tensor]
    where: torch.device
    sized: bool  # whether its shape is known to be the shape of the values
    value: Tensor | None

    def read(self) -> Tensor:
        if self.value is None:
            self.value = self.look()
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls) and first.value is None and first.sized:
            if func == Tensor.device.__get__:
                return first.where
            if func in ABOUT:
                return super().__torch_function__(func, types, args, kwargs)
        return func(*plain(args), **plain(kwargs or {}))


def plain(value: Any) -> Any:
    """Read the tensors in nested dicts, lists and tuples."""
    return map_tensors(lambda t: t.read() if isinstance(t, Unread) else t, value)


def mapped(fn: Callable[[Path, Tensor], Tensor], value: Any, path: Path = ()) -> Any:
    """Replace the tensors of an answer by fn(path, tensor): in records of outputs, lists, tuples,
    and objects that hold some (a distribution of latents)."""
    if isinstance(value, Tensor):
        return fn(path, value)
    if isinstance(value, dict):
        made = {k: mapped(fn, v, (*path, k)) for k, v in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, list | tuple):
        return type(value)(mapped(fn, v, (*path, k)) for k, v in enumerate(value))
    own = getattr(value, "__dict__", {})
    if any(isinstance(entry, Tensor) for entry in own.values()):
        value = copy.copy(value)
        value.__dict__ = mapped(fn, own, path)
    return value


def leaves(answer: Any) -> dict[Path, Tensor]:
    """Map keys, positions and attributes to the tensors of an answer."""
    found: dict[Path, Tensor] = {}
    mapped(lambda path, t: found.setdefault(path, t), answer)
    return found


def unread(answers: list[Any], where: torch.device, look: Callable[[Path], Tensor]) -> Any:
    """Make one answer, of which nothing is read yet, from answers to one row each, or to one
    question. look: path -> value of the tensor there."""
    others = [leaves(answer) for answer in answers[1:]]

    def one(path: Path, t: Tensor) -> Tensor:
        shape, axis = list(t.shape), row_axis(t)
        joins = axis is not None and all(own[path].shape == t.shape for own in others)
        if axis is not None and others:
            shape[axis] = len(answers)
        sized = path != LOGITS and (joins or not others)
        made = torch.empty(shape, dtype=t.dtype, device="meta").as_subclass(Unread)
        made.look, made.where, made.sized, made.value = partial(look, path), where, sized, None
        return made

    return mapped(one, answers[0])


def row_axis(t: Tensor) -> int | None:
    """Find the axis of rows in an answer to a single row; None if it is not unique."""
    ones = [k for k, size in enumerate(t.shape) if size == 1]
    return ones[0] if 0 in ones or len(ones) == 1 else None  # some networks have tokens first
