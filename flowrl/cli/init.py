"""`flowrl init`: four questions, and a config file that answers them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli.common import next_steps, one_sentence_errors, parse_config

QUESTIONS = {  # option -> (question, its default for shapes-sd3, its default for other models)
    "model": ("Model: a name of `flowrl list models`, a folder or a hub id", "shapes-sd3", ""),
    "reward": ("Reward: a name of `flowrl list rewards`, or FILE.py:NAME", "shapes", "pickscore"),
    "prompts": ("Prompts: a file of them, or a name of `flowrl list data`", "shapes", "everyday"),
    "memory": (
        "Memory of the card: 24gb, 40gb, 80gb, or none: as the model has it",
        "none",
        "24gb",
    ),
}
EMBEDDED = QUESTIONS["model"][1]
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

    with one_sentence_errors():
        if file.suffix not in (".yaml", ".yml"):
            raise ValueError(f'"{file}" should end in .yaml, as {file.with_suffix(".yaml")} does')
        if file.exists():
            raise ValueError(f"{file} exists; give another name, or remove it")
        given = {"model": model, "reward": reward, "prompts": prompts, "memory": memory}
        answers: dict[str, str] = {}
        for name, text in given.items():
            answers[name] = _answer(name, text, answers, ask=not yes)
        write(file, _filled(file, answers))
    next_steps(f"flowrl train {file} --dry-run", f"flowrl train {file}")


def _answer(name: str, given: str | None, before: dict[str, str], *, ask: bool) -> str:
    """Take the answer that was given, or ask until there is one that flowrl takes."""
    question, *defaults = QUESTIONS[name]
    default = defaults[before.get("model", EMBEDDED) != EMBEDDED]

    def checked(text: str) -> str:
        usual = {name: question[1] for name, question in QUESTIONS.items()}
        try:
            parse_config(_words({**usual, **before, name: text}))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error  # typer asks the question again
        return text

    if given is None and ask:
        if not sys.stdin.isatty():
            raise ValueError(f"questions are asked on a terminal only; give --{name}, or --yes")
        return str(typer.prompt(question, default, value_proc=checked, err=True))
    try:
        return checked(given or default)
    except typer.BadParameter as error:
        raise ValueError(error.message) from error


def _words(answers: dict[str, str]) -> list[str]:
    """The answers as words of a command line."""
    from flowrl.config.compose import options
    from flowrl.runtime.paths import located, nearby

    prompts, memory = answers["prompts"], answers["memory"]
    words = [f"model={answers['model']}", f"reward={answers['reward']}"]
    words += [f"memory={memory}"] * (memory != "none")
    if prompts in options("data"):
        return [*words, f"data={prompts}"]
    if ":" not in prompts and not located(prompts).is_file():
        raise ValueError(
            f"there is no file {prompts}{nearby(prompts)}; name one, of a prompt a line"
        )
    return [*words, "data=file", f"data.train={prompts}"]


def _filled(file: Path, answers: dict[str, str]) -> str:
    """init.yaml with the answers, on top of a recipe of configs/experiment if one suits them."""
    from jinja2 import Environment

    from flowrl.config.compose import options
    from flowrl.runtime.registry import label_of

    cfg, label = parse_config(_words(answers)), label_of(answers["reward"])
    usual = (
        "quickstart" if answers["model"] == EMBEDDED else f"{answers['model']}-{answers['memory']}"
    )
    recipe = usual in options("experiment") and [*parse_config([usual]).reward] == [label]
    template = Path(__file__).with_name("init.yaml").read_text(encoding="utf-8")
    return (
        Environment(keep_trailing_newline=True)
        .from_string(template)
        .render(
            **answers,
            file=file,
            recipe=usual if recipe else None,
            named=answers["model"] in options("model"),
            label=label,
            train=cfg.data.train,
            held_out=cfg.data.eval,
        )
    )
