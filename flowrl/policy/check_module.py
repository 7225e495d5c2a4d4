"""The self-check of a module's policy: it tries the conditions of training on random latents."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.check import SelfCheck, relative
from flowrl.policy.replay.arguments import Cond

MEANING = {
    "repeat": "two equal calls",
    "rows": "a row alone, against the same row in a batch",
    "mixed": "rows at different sigmas in one call, against one call a sigma",
    "decode": "media of a row alone, against the same row in a batch",
}
LIKELY = {
    "repeat": "it draws random numbers, or remembers calls; call module.eval() if it has dropout",
    "rows": "a row may depend on nothing but itself, not on statistics of its batch",
    "mixed": "t has one sigma for each row: t (n,), not t[0]",
    "decode": "a sample may depend on nothing but itself",
}
Moduled = Any  # type of a ModulePolicy, whose file imports this one
PROMPTS = ("a", "b")  # prompts that are used if the caller gives none
ROWS, STEPS = 4, 4


@dataclass(frozen=True, kw_only=True)
class ModuleCheck(SelfCheck):
    """The result of the self-check of a module."""

    meaning = MEANING
    tried = "tried at {} sigmas"
    swapped = "should"


def self_check(policy: Moduled, prompts: Sequence[str] | None = None) -> ModuleCheck:
    """Try a module in the same way as training will call it: its shapes, that rows do not depend on
    each other, that each row has its own sigma, that it is finite from the first step to the last,
    and that a gradient reaches its trained weights.

    prompts: two different ones, which `cond` knows. A failure -> ValueError that says what to
    change. Afterwards the module's buffers (statistics of batches) are the same as before.
    """
    name = type(policy.modules["module"]).__name__
    cond = policy.encode(list(prompts or PROMPTS)[:2])
    rows, sigmas = torch.arange(ROWS) % len(cond), torch.linspace(1, 0, STEPS + 1).double()[:-1]
    # a module in training mode updates its statistics in every forward
    kept = copy.deepcopy(dict(policy.modules["module"].named_buffers()))
    try:
        with torch.no_grad():
            x = policy.trial_states(ROWS, cond)
            errors, wrong = _compared(policy, x, sigmas, cond, rows)
        notes = _gradients(policy, name, x, sigmas, cond, rows)
    finally:
        for key, buffer in policy.modules["module"].named_buffers():
            buffer.data.copy_(kept[key])
    if wrong == 0:
        notes.append(
            "swapping the two prompts changes nothing: cond gives them the same, or is unused"
        )
    result = ModuleCheck(
        pipeline=name,
        errors=errors,
        wrong_rows=wrong,
        tolerance=1e-4 if policy.dtype == torch.float32 else 4 * torch.finfo(policy.dtype).eps,
        steps=STEPS,
        notes=notes,
    )
    return _judged(result)


def _compared(
    policy: Moduled, x: Tensor, sigmas: Tensor, cond: Cond, rows: Tensor
) -> tuple[dict[str, float], float]:
    """Return (errors, relative change when prompts are swapped)."""
    whole = policy.velocity(x, sigmas, cond, rows)
    _check_finite(whole, sigmas, "tokens" if policy.unmasks else policy.coords.prediction)
    again = policy.velocity(x, sigmas, cond, rows)
    middle = float(sigmas[1])
    batch = policy.velocity(x, middle, cond, rows)
    alone = _alone(policy, x[:1], middle, cond, rows[:1])
    each = [policy.velocity(x, float(s), cond, rows)[i] for i, s in enumerate(sigmas)]
    errors = {
        "repeat": relative(again, whole),
        "rows": relative(alone, batch[:1]),
        "mixed": relative(whole, torch.stack(each)),
        "decode": relative(_decoded(policy.decode, x[:1]), _decoded(policy.decode, x)[:1]),
    }
    if cond.groups[0].kept[0][0][("cond",)] is None or len(cond) < 2:
        return errors, math.nan
    return errors, relative(policy.velocity(x, middle, cond, rows.flip(0)), batch)


def _alone(policy: Moduled, x: Tensor, sigma: float, cond: Cond, rows: Tensor) -> Tensor:
    """Compute the velocity of a single row, which batch norm in training mode refuses."""
    try:
        return policy.velocity(x, sigma, cond, rows)
    except Exception as error:  # a user's module may raise anything
        name = type(policy.modules["module"]).__name__
        raise ValueError(
            f"{name} takes {ROWS} rows but not one alone ({error}): {LIKELY['rows']}"
        ) from error


def _check_finite(v: Tensor, sigmas: Tensor, kind: str) -> None:
    """ValueError at the first sigma with a velocity that is not finite."""
    for sigma, own in zip(sigmas.tolist(), v, strict=True):
        if not bool(own.isfinite().all()):
            if kind == "tokens":
                raise ValueError(
                    "the logits of a grid of which a third is masked are not finite: give a token"
                    " that may not be drawn -1e4 in place of -inf, whose differences have no value"
                )
            why = "t runs from 1, noise, to 0, data"
            if kind == "epsilon":
                why = "(eps - x) / (1 - sigma) has no value at 1, so predict the flow or x0"
            raise ValueError(f"the velocity at sigma {sigma:g} is not finite: {why}")


def _decoded(decode: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Decode x (n, *L); ValueError if the result cannot be one medium for each row."""
    media = decode(x)
    if not isinstance(media, Tensor) or media.ndim < 2 or len(media) != len(x):
        got = tuple(media.shape) if isinstance(media, Tensor) else type(media).__name__
        raise ValueError(f"decode made {got} of latents {tuple(x.shape)}; one sample a row is due")
    if media.dtype != torch.float32:
        raise ValueError(f"decode made {media.dtype} media; they should be fp32: media.float()")
    return media


def _gradients(
    policy: Moduled, name: str, x: Tensor, sigmas: Tensor, cond: Cond, rows: Tensor
) -> list[str]:
    """Note how many trained weights no gradient reaches; ValueError if it reaches no weight of a
    part."""
    unused: list[str] = []
    with torch.enable_grad():
        loss = policy.velocity(x, sigmas, cond, rows).square().sum()
        for part, weights in policy.parts.items():
            if not loss.requires_grad:
                found: Sequence[Tensor | None] = [None] * len(weights)
            else:
                found = torch.autograd.grad(
                    loss, list(weights.values()), retain_graph=True, allow_unused=True
                )
            without = [key for key, grad in zip(weights, found, strict=True) if grad is None]
            if len(without) == len(weights):
                raise ValueError(
                    f"no gradient reaches the {len(weights)} trained weights of the {part} {name};"
                    " it detaches its output, or they are not used"
                )
            unused += without
    if not unused:
        return []
    return [f"no gradient reaches {len(unused)} trained weights, {unused[0]} first"]


def _judged(result: ModuleCheck) -> ModuleCheck:
    """Return the result; ValueError if a comparison failed."""
    for key, value in result.errors.items():
        if not value <= result.tolerance:  # `not <=`, because NaN must fail, too
            raise ValueError(
                f"{result.pipeline} differs in {MEANING[key]} by {value:.1e} (allowed"
                f" {result.tolerance:.0e}): {LIKELY[key]}"
            )
    return result
