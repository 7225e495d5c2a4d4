"""`flowrl list`: the names that a config can use."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from flowrl.cli.common import Json, as_json, echo, one_sentence_errors

WIDTH = 100  # most columns of a line


def list_choices(
    what: Annotated[
        str | None,
        typer.Argument(
            help="models, memory, algorithms, rewards, samplers, data, experiments, suites."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """List what a config can name."""
    from flowrl.config.compose import GROUPS, names
    from flowrl.runtime.excerpt import part
    from flowrl.runtime.registry import did_you_mean

    # name of a list -> function that makes it; "data" and "memory" have no plural
    kinds: dict[str, Callable[[], list[str]]] = {
        (group if group in ("data", "memory") else f"{group}s"): partial(names, group)
        for group in GROUPS
    }
    kinds["samplers"] = part("flowrl.samplers.sde", "choices")
    kinds["suites"] = partial(names, "suite")
    with one_sentence_errors():
        if what is not None and what not in kinds:
            raise ValueError(f'unknown list "{what}"{did_you_mean(what, kinds)}')
        listed = {name: kinds[name]() for name in ([what] if what else kinds)}
        if as_json(listed, json):
            return
    if what:
        width = max(map(len, listed[what]), default=0) + 2
        for name in listed[what]:
            said = textwrap.shorten(_said(what, name), WIDTH - width, placeholder="...")
            echo(f"{name:{width}}{said}".rstrip())
        return
    for kind, choices_of in listed.items():
        line = f"{kind}: {', '.join(choices_of)}"
        echo(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _said(kind: str, name: str) -> str:
    """Say what a name of a list stands for: the scale of a reward, or the first sentence of a file
    of configs/; "" of what others bring."""
    from flowrl.config.compose import config_folder
    from flowrl.runtime.registry import declared, shipped

    if kind == "rewards" and name in shipped("flowrl.rewards"):
        return str(declared("flowrl.rewards", name, "REWARD", "scale", what="reward"))
    group = kind if kind in ("data", "memory") else kind.removesuffix("s")
    path = config_folder() / group / f"{name}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    told = (line.removeprefix("# ") for line in lines if line.startswith("# "))
    return " ".join(line for line in told if not line.startswith("@package"))
