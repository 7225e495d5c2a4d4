"""`flowrl show`: a config, resolved, or what differs from another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import Overrides, echo, one_sentence_errors, parse_config
from flowrl.runtime.store.run_folder import is_run

Diff = Annotated[
    bool,
    typer.Option(
        "--diff",
        help="Print only what differs from the defaults or, where a second file, run or experiment"
        " is given, from that one: KEY=VALUE  # its value.",
    ),
]


def show(overrides: Overrides = None, diff: Diff = False) -> None:
    """Print a config as a run would read it; also that of a run folder."""
    from flowrl.config.load import dump

    with one_sentence_errors():
        words = [str(Path(w, "config.yaml")) if is_run(w) else w for w in overrides or ()]
        if not diff:
            typer.echo(dump(parse_config(words), sys.stdout.encoding or "utf-8"), nl=False)
            return
        first, rest = words[:1], words[1:]
        changes = [word for word in rest if "=" in word or word.startswith("~")]
        other = [word for word in rest if word not in changes]
        for line in _differences(parse_config(first + changes), parse_config(other)):
            echo(line)


def _differences(cfg: Any, other: Any) -> list[str]:
    """Write the settings of a config that another one does not have, as words for a command line;
    a setting that only the other one has is named in a comment."""
    from flowrl.config.load import diff, flatten

    here, there = (flatten(c.model_dump(mode="json")) for c in (cfg, other))
    lines = []
    for key in diff(other, cfg):
        theirs = f"  # {_text(there[key])}" if key in there else ""
        lines.append(f"{key}={_text(here[key])}{theirs}" if key in here else f"# no {key}{theirs}")
    return lines


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
