"""`flowrl show`: a config, resolved."""

from __future__ import annotations

import sys

import typer

from flowrl.cli.common import Overrides, one_sentence_errors, parse_config


def show(overrides: Overrides = None) -> None:
    """Print the resolved config."""
    from flowrl.config.load import dump

    with one_sentence_errors():
        typer.echo(dump(parse_config(overrides), sys.stdout.encoding or "utf-8"), nl=False)
