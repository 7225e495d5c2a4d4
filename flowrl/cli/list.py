"""`flowrl list`: the names that a config can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from flowrl.cli.common import Json, as_json, echo, one_sentence_errors


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
    from flowrl.config.compose import GROUPS, installed, options
    from flowrl.runtime.registry import choices, did_you_mean
    from flowrl.samplers import sde

    def names(group: str) -> list[str]:
        return sorted({*options(group), *installed(group)})

    # name of a list -> function that makes it; "data" and "memory" have no plural
    kinds: dict[str, Callable[[], list[str]]] = {
        (group if group in ("data", "memory") else f"{group}s"): partial(names, group)
        for group in GROUPS
    }
    kinds["rewards"] = partial(choices, "flowrl.rewards")
    kinds["samplers"] = sde.choices
    kinds["suites"] = partial(options, "suite")
    with one_sentence_errors():
        if what is not None and what not in kinds:
            raise ValueError(f'unknown list "{what}"{did_you_mean(what, kinds)}')
        listed = {name: kinds[name]() for name in ([what] if what else kinds)}
        if as_json(listed, json):
            return
    for name, choices_of in listed.items():
        echo(f"{name}: {', '.join(choices_of)}")
