"""`flowrl init`: four questions, and a config file that answers them."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import common
from flowrl.runtime.excerpt import part

QUESTIONS = {  # option -> what is asked, and its default: for shapes-sd3, and for other models
    "model": ("Model: a name of `flowrl list models`, a folder or a hub id", "shapes-sd3", ""),
    "reward": ("Reward: a name of `flowrl list rewards`, or FILE.py:NAME", "shapes", "pickscore"),
    "prompts": ("Prompts: a file of them, or a name of `flowrl list data`", "shapes", "everyday"),
    "memory": (
        "Card: 24gb, 40gb, 80gb or its name (weights stay whole where the model's recipe has them"
        " so), or none: as the model has it",
        "none",
        "none",
    ),
}
TEMPLATE = Path(__file__).with_name("init.yaml")
File = Annotated[Path, typer.Argument(help="The YAML file to write; it must not exist yet.")]
Yes = Annotated[bool, typer.Option("--yes", help="Ask nothing: take the defaults of the rest.")]


def option(name: str) -> Any:
    return typer.Option(help=f"{QUESTIONS[name][0]}.")


def init(
    file: File = Path("run.yaml"),
    model: Annotated[str | None, option("model")] = None,
    reward: Annotated[str | None, option("reward")] = None,
    prompts: Annotated[str | None, option("prompts")] = None,
    memory: Annotated[str | None, option("memory")] = None,
    yes: Yes = False,
) -> None:
    """Ask four questions, and write a config with comments."""
    from flowrl.runtime.store.files import write

    given = {"model": model, "reward": reward, "prompts": prompts, "memory": memory}
    answers = {name: usual for name, (_, usual, _) in QUESTIONS.items()}
    with common.one_sentence_errors():
        if file.suffix not in (".yaml", ".yml"):
            raise ValueError(f'"{file}" should end in .yaml, as {file.with_suffix(".yaml")} does')
        if file.exists():
            raise ValueError(f"{file} exists; give another name, or remove it")
        for name, text in given.items():
            if text is None and not yes and not sys.stdin.isatty():
                raise ValueError(f"questions are asked on a terminal; give --{name}, or --yes")
            answers = _answered(answers, name, text, ask=not yes)
        write(file, text := _filled(file, answers))
    if "\n  eval: null" in text:
        typer.echo("No held-out prompts: no evaluation; data.eval=FILE names some.", err=True)
    common.next_steps(f"flowrl train {file} --dry-run", f"flowrl train {file}")


def _answered(
    answers: dict[str, str], name: str, given: str | None, *, ask: bool
) -> dict[str, str]:
    """Put in the answer that was given, or ask until there is one that flowrl takes."""
    question, *usual = QUESTIONS[name]
    default = usual[answers["model"] != QUESTIONS["model"][1]]
    while True:
        text = given or (typer.prompt(question, default, err=True) if ask else default)
        try:
            common.parse_config(_words({**answers, name: text}))
            return {**answers, name: text}
        except ValueError as error:
            if given or not ask:
                raise
            common.complain(error)


def _words(answers: dict[str, str]) -> list[str]:
    """The answers as words of a command line."""
    from flowrl.config.compose import options

    prompts, memory = answers["prompts"], _preset(answers["model"], answers["memory"])
    words = [f"model={answers['model']}", f"reward={answers['reward']}"]
    common.check_model(answers["model"])
    words += [f"memory={memory}"] * (memory != "none")
    if prompts in options("data"):
        return [*words, f"data={prompts}"]
    part("flowrl.data.prompts", "check_source")(prompts)
    return [*words, "data=file", f"data.train={prompts}"]


def _preset(model: str, card: str) -> str:
    """The file of configs/memory for a card, which may be given by its name."""
    from flowrl.config.compose import options

    with suppress(ValueError):
        free = part("flowrl.training.budget.roofline", "known_gpu")(card).memory + 1  # the driver's
        card = max((p for p in options("memory") if int(p[:-2]) <= free), default=card)
    if card in options("memory") and model == QUESTIONS["model"][1]:
        return "none"  # it fits any card
    recipe = (
        common.parse_config([model]) if model in options("experiment") and card != "none" else None
    )
    return "80gb" if recipe and recipe.model.quantize == "none" else card


def _filled(file: Path, answers: dict[str, str]) -> str:
    """init.yaml with the answers, on top of a recipe of configs/experiment if one suits them."""
    from jinja2 import Environment

    from flowrl.config.compose import options
    from flowrl.runtime.registry import label_of

    memory = _preset(answers["model"], answers["memory"])
    cfg = common.parse_config(_words(answers))
    data, label, model = cfg.data, label_of(answers["reward"]), answers["model"]
    recipe = "quickstart" if model == QUESTIONS["model"][1] else model
    # a recipe's own reward would stay beside another one
    suits = recipe in options("experiment") and [*common.parse_config([recipe]).reward] == [label]
    if suits:
        cfg = common.parse_config([recipe, *[f"memory={memory}"] * (memory != "none")])
        memory = "none" if cfg == common.parse_config([recipe]) else memory
    return (
        Environment(keep_trailing_newline=True)
        .from_string(TEMPLATE.read_text("utf-8"))
        .render(
            **(answers | {"memory": memory}),
            cfg=cfg,
            file=file,
            recipe=recipe if suits else None,
            named=model in options("model"),
            label=label,
            data=data,
        )
    )
