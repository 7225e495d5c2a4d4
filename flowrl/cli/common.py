"""What the commands share: options, and one sentence for each mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Align image and video generators with reinforcement learning.",
)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="A YAML file or experiment name first, then group=option or key.sub=value."
    ),
]


Call = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE of the pipeline's call, as height=512; with --lora RUN, its own."
    ),
]


Model = Annotated[
    str, typer.Argument(help="A name of configs/model, a folder in diffusers layout, or a hub id.")
]


MOST = 2**63 - 1  # of a seed


@contextmanager
def one_sentence_errors(*, disk: int = 2) -> Iterator[None]:
    """ValueError inside means that the user's input was wrong, a RewardBug that their reward is:
    one sentence, exit code 2.

    disk: the exit code of an OSError; 1 where something was done before it.
    """
    try:
        yield
    except BrokenPipeError:  # of `| head`
        raise typer.Exit(0) from None
    except (ValueError, OSError) as error:
        stop(error, disk if isinstance(error, OSError) else 2)
    except RuntimeError as error:
        from flowrl.rewards import RewardBug, RewardUnavailable

        if isinstance(error, RewardUnavailable):
            stop(error, 1)
        if not isinstance(error, RewardBug):
            raise
        stop(error, 2)


def stop(error: BaseException, code: int) -> None:
    typer.secho(f"flowrl: {error}", fg="red", err=True)
    raise typer.Exit(code) from None


def parse_config(overrides: list[str] | None) -> Any:
    from flowrl.config.compose import options
    from flowrl.config.load import load_config

    words = list(overrides or [])
    named = words and ("=" not in words[0]) and not words[0].startswith(("+", "~"))
    if named and not words[0].endswith((".yaml", ".yml")) and words[0] not in options("experiment"):
        from flowrl.runtime.registry import did_you_mean

        raise ValueError(
            f'"{words[0]}" is no YAML file, experiment or'
            f" key=value{did_you_mean(words[0], options('experiment'))}"
        )
    return load_config(words.pop(0) if named else None, words)


def parse_number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'{option}={text} should be a number, "none" or "pipeline"') from None


def parse_guidance(text: str) -> float | str:
    return text if text in ("none", "pipeline") else parse_number("--guidance", text)


def call_arguments(words: list[str] | None) -> dict[str, Any]:
    """--pipeline NAME=VALUE ..., the values as YAML reads them."""
    import yaml

    out: dict[str, Any] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--pipeline {word} should be NAME=VALUE, such as height=512")
        try:
            out[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            out[name] = value
    return out


def console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout)
