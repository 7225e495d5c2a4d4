"""What loading a pipeline and its self-check cost, against a run of four steps of two prompts.

    python scripts/bench/loading.py [NAME ...]
    python scripts/bench/loading.py --encoders [NAME ...]

NAME: a case of tests/helpers/zoo; default: all that are not refused, with --encoders all of them.
For each network, the rows that it computes in loading and in the self-check, as a multiple of those
of the run, and the multiple that is allowed: 3, with the exceptions of `allowed`. --encoders: the
seconds of loading, the calls of each network of transformers in it beside the distinct prompts (and
pictures) that it was asked, and the bytes kept of its answers beside those of them that the
denoisers are given something of. Calls may be as many as prompts (with AGAIN, more), and bytes 5%
more. Exit code 1 beyond.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

import flowrl
from flowrl.cli.common import show
from flowrl.policy.replay.arguments import tensors_in
from flowrl.policy.replay.unread import leaves, mapped

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from zoo import cases  # noqa: E402

MOST, SURPLUS = 3.0, 1.05
FORMS = 0.25  # denoisers: a form of a call for two rows costs a call, and up to four fail
# denoisers of a loop's own body: loading compares it with the pipeline, too, and it is entered for
# each noise level
BODY = 6.0
# networks beside such a denoiser (ControlNet): they compute in the probing runs, too, once a run
# where nobody looks at what they make
BESIDE = 42.0
# other networks of diffusers: texts and pictures are not read row by row, so each set of rows is
# computed; the VAE of Helios decodes in each probing run
SETS = 16.0
# calls beyond: a prompt is asked for padded beside an overlong one, and without padding alone
AGAIN = {"modular_qwenimage": 1}
IN_VAIN = {"bria_fibo"}  # it reads all layers, and gives its denoiser some of them


@contextlib.contextmanager
def counted(parts: dict[str, nn.Module]) -> Iterator[Counter[str]]:
    """Rows by part, while inside: of the first layer in it that sees several vectors a row. Times
    are no measure, since some pipelines give one for all rows."""
    rows: Counter[str] = Counter()
    watched: dict[str, nn.Module] = {}
    hooks = []
    for name, part in parts.items():
        for layer in part.modules():
            if not isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
                continue

            def count(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                wide = args and isinstance(args[0], Tensor) and args[0].ndim > 2
                if wide and watched.setdefault(name, layer) is layer:
                    rows[name] += len(args[0])

            hooks.append(layer.register_forward_pre_hook(count))
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def allowed(policy: Any, network: str) -> float:
    """Return the multiple of a run's rows that loading and self-check may compute of a network."""
    if network in policy.networks:
        more = 0.0 if policy.prober.runner.form == "batch" else FORMS
        return MOST + more if policy.replay.regimes else BODY
    if isinstance(policy.pipe.components[network], PreTrainedModel):
        return MOST
    return SETS if policy.replay.regimes else BESIDE


def costs(name: str) -> dict[str, tuple[float, float, float]]:
    """(rows of load, rows of check) of each network over those of a run, and their limit."""
    case = cases()[name]
    pipe = case.make()
    parts = {k: part for k, part in pipe.components.items() if isinstance(part, nn.Module)}
    example = case.conditions[0] if case.conditions else None
    with counted(parts) as rows:
        policy: Any = flowrl.load_policy(pipe, example=example, **case.call)
        loaded = rows.copy()
        policy.self_check()
        checked = rows - loaded
        runner = policy.prober.runner
        runner.answers.kept.clear()
        rows.clear()
        for items in policy.prober.apart(policy.prober.record):
            runner.run(items, 4)
    return {k: (loaded[k] / n, checked[k] / n, allowed(policy, k)) for k, n in rows.items()}


# ---------------------------------------------------------------------------
# what encoders are asked


@dataclass
class Asked:
    """Calls of a network, and which prompts or pictures they were about."""

    calls: int = 0  # those that returned
    inside: bool = False  # whether a call is running, which may call again
    distinct: set[Any] = field(default_factory=set)  # what `questions` makes of their arguments


def questions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Any]:
    """A question for each row of tokens: those that are not masked, and the pictures beside."""
    found = [t for t in tensors_in((args, kwargs)) if isinstance(t, Tensor)]
    pictures = tuple(hash(t.cpu().numpy().tobytes()) for t in found if t.is_floating_point())
    tokens = [t for t in found if t.ndim == 2 and not t.is_floating_point()]
    if not tokens:
        return {pictures}
    mask = kwargs.get("attention_mask")
    if mask is None or mask.shape != tokens[0].shape:
        mask = torch.ones_like(tokens[0])
    rows = zip(tokens[0], mask, strict=True)
    return {(tuple(row[own.bool()].tolist()), pictures) for row, own in rows}


@contextlib.contextmanager
def asked(pipe: Any) -> Iterator[dict[str, Asked]]:
    """Calls of the pipeline's networks of transformers by component, while inside; a text that is
    generated is one call."""
    parts = {k: m for k, m in pipe.components.items() if isinstance(m, PreTrainedModel)}
    seen = {name: Asked() for name in parts}

    def counting(own: Asked, real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if own.inside:
                return real(*args, **kwargs)
            own.inside = True
            try:
                answer = real(*args, **kwargs)
            finally:
                own.inside = False
            own.calls += 1  # not those that fail, as a form of call may that is tried
            own.distinct |= questions(args, kwargs)
            return answer

        return call

    methods = [(k, m, name) for k, m in parts.items() for name in ("forward", "generate")]
    methods = [(k, m, name) for k, m, name in methods if hasattr(m, name)]
    for key, module, name in methods:
        setattr(module, name, counting(seen[key], getattr(module, name)))
    try:
        yield seen
    finally:
        for _, module, name in methods:
            module.__dict__.pop(name, None)


def kept_and_given(policy: Any, component: str) -> tuple[int, int]:
    """(bytes kept of a network's answers, those of them that matter: what the denoisers are given
    changes with them)."""
    prober, answers = policy.prober, policy.prober.runner.answers
    held: dict[tuple[Any, ...], int] = {}
    for key, answer in answers.kept.items():
        if key[0].rpartition(".")[0] == component:
            for path, t in leaves(answer).items():
                if not t.is_meta:
                    place = (key[0], path)
                    held[place] = held.get(place, 0) + t.numel() * t.element_size()

    def given() -> list[Tensor]:
        """What the first calls of runs on the record are given."""
        out: list[Tensor] = []
        for items in prober.apart(prober.record):
            for it in prober.run(items, policy.steps, stop=lambda j, it: j > 0)[:2]:
                out += [t.clone() for call in it.calls for t in tensors_in(call.args)]
        return out

    # each leaf of the kept answers is altered by itself: what changes no call was kept for nothing
    usual, matter = given(), 0
    for (name, at), size in held.items():
        before = dict(answers.kept)
        for key, answer in before.items():
            if key[0] == name:
                answers.kept[key] = altered(answer, at)
        changed = given()
        answers.kept.update(before)
        same = [
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(usual, changed, strict=True)
        ]
        matter += 0 if all(same) else size
    return sum(held.values()), matter


def altered(answer: Any, at: tuple[Any, ...]) -> Any:
    """The answer with other values of the same kind at a place."""

    def other(path: tuple[Any, ...], t: Tensor) -> Tensor:
        if path != at or t.is_meta:
            return t
        return t * 1.5 + 0.5 if t.is_floating_point() else t.flip(-1)

    return mapped(other, answer)


def encoders(name: str) -> tuple[float, dict[str, tuple[int, int, int, int]]]:
    """Seconds of loading; by network: calls, distinct prompts, bytes kept, those that matter."""
    case = cases()[name]
    pipe = case.make()
    example = case.conditions[0] if case.conditions else None
    with asked(pipe) as seen:
        began = time.perf_counter()
        policy = flowrl.load_policy(pipe, example=example, **case.call)
        took = time.perf_counter() - began
    found = {k: own for k, own in seen.items() if own.calls}
    return took, {
        k: (own.calls, len(own.distinct), *kept_and_given(policy, k)) for k, own in found.items()
    }


def show_encoders(names: list[str]) -> int:
    out = Table("case", "seconds", "network", "calls", "prompts", "kept", "given", box=None)
    beyond, whole = False, 0.0
    for name in names:
        try:
            took, found = encoders(name)
        except ValueError as error:
            if not cases()[name].refused:
                raise
            out.add_row(name, "", f"refused: {str(error)[:60]}")
            continue
        print(f"{name}  {took:.1f} s  {found}", flush=True)
        whole += took
        for network, numbers in found.items():
            out.add_row(name, f"{took:.1f}", network, *(f"{n:,}" for n in numbers))
            calls, prompts, kept, given = numbers
            beyond |= calls > prompts + AGAIN.get(name, 0) or (
                kept > SURPLUS * given and name not in IN_VAIN
            )
    out.add_row("all", f"{whole:.0f}")
    show(out)
    return int(beyond)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--encoders", action="store_true")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.encoders:
        return show_encoders(args.names or list(cases()))
    out = Table("case", "network", "load", "self-check", "both", "allowed", box=None)
    beyond = False
    for name in args.names or [name for name, case in cases().items() if not case.refused]:
        for network, (load, check, most) in costs(name).items():
            numbers = (load, check, load + check, most)
            out.add_row(name, network, *(f"{number:.2f}" for number in numbers))
            print(name, network, *(f"{number:.2f}" for number in numbers), flush=True)
            beyond |= load + check > most
    show(out)
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
