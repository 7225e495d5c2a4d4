"""Parts that the commands share: options, how their words are read, one sentence for each
mistake."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from flowrl.runtime.paths import expanded
from flowrl.runtime.text import error_text, one_line, visible


def complete_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a word of a config: an experiment, GROUP=OPTION or KEY=."""
    from flowrl.config.compose import GROUPS, names
    from flowrl.config.load import keys
    from flowrl.config.schema import Config

    words = [f"{group}={name}" for group in GROUPS for name in names(group)]
    words += [*names("experiment"), *(f"{key}=" for key in keys(Config, sections=False))]
    # bash passes "=" as a word of its own, and completes the text after it
    given = "".join([*(ctx.params.get("overrides") or ())][-2:])
    begun = given if given.endswith("=") else ""
    return [word.removeprefix(begun) for word in words if word.startswith(begun + incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE|EXPERIMENT|KEY=VALUE",
        help="A YAML file or the name of an experiment first, then settings: model=sd3.5-medium"
        " chooses a file of configs/, batch.group=16 sets a value.",
        autocompletion=complete_words,
    ),
]
Call = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An argument of the pipeline's call, as height=512; with --lora RUN, its own.",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COLUMN",
        help="Of a list of prompts: prompt=Caption, for example; once for each.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the numbers to this file; -: print them as JSON."
    ),
]
Hints = Annotated[
    str | None,
    typer.Option(help="For a pipeline of your own: path/to/file.py:NAME of hints.register's."),
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"], typer.Option(help="Type of the networks, as model.dtype.")
]

HELP = Path(__file__).with_name("help.yaml")
REWARD = "NAME[=WEIGHT|.SETTING=VALUE]"
LARGEST_SEED = 2**63 - 1
MAY_BE_EMPTY = ("prompts", "--prompt")  # parameters whose text may be empty: they take prompts
VALUES = {"--resume": "runs/mine", "--json": "-"}  # option -> a value that it takes
MOST = 20  # most lines of a kind that are printed, as of wrong settings


class Command(TyperCommand):
    """A command that refuses an option or an argument without a text, as of an unset variable, and
    writes out ~ and variables in its paths, which a shell leaves in --output=~/x. help.yaml says
    under which headings its options stand, and has examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # read as text: a Path would turn "" into "."
        with usage_errors(self):
            words = self.make_parser(ctx).parse_args([*args])[0]
        for param in self.params:
            given, name = words.get(param.name or ""), max(param.opts, key=len)
            empty = "" in (given if isinstance(given, list | tuple) else (given,))
            if empty and name not in MAY_BE_EMPTY:
                complain(f"{name} is empty; was a shell variable unset? give it, or leave it out")
                raise typer.Exit(2)
        with usage_errors(self):
            rest = super().parse_args(ctx, args)
        with one_sentence_errors():
            ctx.params = {name: _written_out(value) for name, value in ctx.params.items()}
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        import yaml

        said = yaml.safe_load(HELP.read_text(encoding="utf-8"))[self.name]
        heading = {name: panel for panel, names in said.items() for name in names}
        rows = []
        for param in self.get_params(ctx):
            name, text = param.get_help_record(ctx)
            name = name.replace(" <list[str]>", "")  # removed because metavars say it better
            usual = f"{param.param_type_name.title()}s"
            rows.append((heading.get(param.name, usual), (name, text)))
        write_sections(formatter, rows)
        with formatter.section("Examples"):
            formatter.write("".join(f"  flowrl {words}\n" for words in said["Examples"]))


def write_sections(formatter: Any, rows: Sequence[tuple[str, tuple[str, str]]]) -> None:
    """Write the rows (heading, (name, sentence)) of a help, those of a heading together."""
    for heading in dict.fromkeys(heading for heading, _ in rows):
        with formatter.section(heading):
            formatter.write_dl([row for under, row in rows if under == heading])


@contextmanager
def usage_errors(command: Any) -> Iterator[None]:
    """Print a mistake in the form of a command line as one sentence, too."""
    try:
        yield
    except typer.BadParameter.__mro__[1] as error:  # click's UsageError, which typer hides
        option = getattr(error, "option_name", None)
        own = [name for param in command.params for name in param.opts] if option else []
        unknown = option and option not in own  # else it lacks its value
        plain = error.format_message().rstrip(".").replace("Value error, ", "")  # pydantic's words
        said = _unknown_option(option, own) if unknown else plain
        whole = " ".join(dict.fromkeys(("flowrl", command.name)))
        if option and not unknown:
            said = f"{option} needs a value: {whole} {option} {VALUES.get(option, 'VALUE')}"
        complain(f"{said} (`{whole} -h` shows how it is written)")
        raise typer.Exit(2) from None


def _unknown_option(option: str, own: list[str]) -> str:
    """Say of an option that is not there how it is called here. own: those of the command."""
    from flowrl.config.compose import GROUPS
    from flowrl.config.load import keys, synonym
    from flowrl.config.overrides import as_loop
    from flowrl.config.schema import Config
    from flowrl.runtime.registry import did_you_mean

    key, what = option.lstrip("-"), f"there is no option {option}"
    last = key.rpartition(".")[2]
    takes_settings = "--resume" in own or "--gpus" in own
    if takes_settings and last in ("m", "multirun"):
        return f"{what}, and a command makes one run{as_loop('seed', (0, 1))}"
    known = synonym(last, "settings" if takes_settings else "options")
    if known and known.startswith("--") and not {*re.findall(r"--[\w-]+", known)} & {*own}:
        known = None  # it is an option of another command
    settings = (*GROUPS, *keys(Config, sections=False)) if takes_settings else ()
    same = sorted((k for k in settings if f".{k}".endswith(f".{last}")), key=len)
    if same and (not known or key in same):
        return f"{what}: a setting is written without dashes, {same[0]}=VALUE"
    return what + (f"; here it is {known}" if known else did_you_mean(option, own))


def _written_out(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_written_out(entry) for entry in value]
    return Path(expanded(str(value))) if isinstance(value, Path) else value


@contextmanager
def one_sentence_errors(*, disk: int = 2) -> Iterator[None]:
    """Print errors of the user's as one sentence and leave with exit code 2: a ValueError inside
    means that their input was wrong, a RewardBug that their reward is.

    disk: exit code of an OSError, 1 where something was done before it. A file that cannot be
    written always gives 1.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        from flowrl.rewards.core.failures import RewardBug, RewardUnavailable
        from flowrl.runtime.memory import ran_out
        from flowrl.runtime.store.files import WriteError

        # not imported: there are no other processes
        lost = sys.modules.get("flowrl.runtime.processes.world")
        if lost is not None and isinstance(error, lost.Lost):
            stop(error, 1)
        if isinstance(error, RewardUnavailable | WriteError) or ran_out(error):
            stop(error, 1)
        if isinstance(error, RuntimeError) and not isinstance(error, RewardBug):
            raise
        stop(error, disk if isinstance(error, OSError) else 2)


def stop(error: BaseException, code: int, *, hint: str = "") -> NoReturn:
    """Print the error as one sentence, wrong settings as a line each, and leave with an exit code.

    hint: a sentence more, in a line of its own.
    """
    from flowrl.config.compose import ConfigError
    from flowrl.runtime.memory import advice, ran_out

    if ran_out(error):
        complain(advice(error))
    elif isinstance(error, ConfigError):
        problems = str(error).splitlines()
        more = [f"... and {len(problems) - MOST} more"] * (len(problems) > MOST)
        complain(*problems[:MOST], *more)
    else:
        complain(error_text(error))
    if hint:
        complain(hint)
    raise typer.Exit(code) from None


def complain(*problems: object) -> None:
    """Print problems, a line each."""
    text = visible("\n".join(map(one_line, problems)), sys.stderr.encoding or "utf-8")
    typer.secho(f"flowrl: {text}", fg="red", err=True)


def parse_config(overrides: list[str] | None) -> Any:
    """Load the Config of a command line: a file or an experiment, changed by the words after it."""
    from flowrl.config.compose import GROUPS, options
    from flowrl.config.load import load_config
    from flowrl.runtime.registry import did_you_mean

    words, experiments = list(overrides or []), options("experiment")
    if not words or "=" in words[0] or words[0].startswith(("+", "~")):
        return load_config(None, words)
    name = words.pop(0)
    if not name.endswith((".yaml", ".yml")) and name not in experiments:
        near = [f"; write {g}={name}" for g in GROUPS if name in options(g)]
        near = near or [did_you_mean(name, experiments)]
        raise ValueError(f'"{name}" is not a YAML file, experiment or key=value{near[0]}')
    return load_config(name, words)


def parse_run(overrides: list[str] | None, resume: Path | None = None, accept: bool = False) -> Any:
    """Load the Config of a run that starts, or goes on; ValueError where its words alone say that
    it would not."""
    from flowrl.config.facts import of_config
    from flowrl.runtime.excerpt import part
    from flowrl.runtime.install import check_trackers
    from flowrl.runtime.processes.launcher import is_main, launched
    from flowrl.runtime.store.lock import Lock

    if resume is None:
        cfg = parse_config(overrides)
        for source in (*cfg.data.sources, cfg.data.eval) if not cfg.data.offline else ():
            if source:
                part("flowrl.data.prompts", "check_source")(source)
    else:
        cfg = part("flowrl.training.resume", "config_of")(resume, overrides)
        if is_main():
            part("flowrl.training.resume", "check_resume")(cfg, resume, accept=accept)
            Lock(resume, "flowrl train").withdraw()  # raises Busy
    of_config(cfg, processes=launched())
    check_trackers(cfg.trackers)
    return cfg


def parse_rewards(words: list[str]) -> dict[str, dict[str, Any]]:
    """Read NAME, NAME=WEIGHT and NAME.SETTING=VALUE of rewards, whose settings are judged before
    torch is imported and anything is loaded."""
    from flowrl.rewards.core.find import check_settings
    from flowrl.rewards.core.rules import parse_rules
    from flowrl.rewards.core.words import parse_words

    entries = parse_words(words)
    parse_rules(entries)
    for label, entry in entries.items():
        name = entry.get("name", label)
        check_settings(label, entry, what=f'reward "{name}"', prefix=f"{label}.")
    return entries


def check_model(name: str) -> None:
    """ValueError for a name that no model has."""
    from flowrl.config.rules import unknown_model

    if problem := unknown_model(name):
        raise ValueError(problem)


def parse_guidance(text: str) -> float | str:
    if text in ("none", "pipeline"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--guidance={text} should be a number, "none" or "pipeline"') from None


def parse_columns(words: list[str] | None) -> dict[str, str]:
    """Read --columns NAME=COLUMN ..., as data.columns of a config."""
    found = named_values("--columns", words, "prompt=Caption", lambda name: frozenset({str}))
    if empty := [name for name, column in found.items() if not column]:
        raise ValueError(f"--columns {empty[0]}= names no column; give it, as in prompt=Caption")
    return found


def call_arguments(words: list[str] | None) -> dict[str, Any]:
    """Read --pipeline NAME=VALUE ...; a value stays a text where its argument is a text."""
    from flowrl.data import conditions
    from flowrl.policy.load import call_options
    from flowrl.runtime.typed_text import kinds_of_argument

    given = named_values("--pipeline", words, "height=512", kinds_of_argument)
    return conditions.loaded(call_options(given))


def named_values(
    option: str, words: list[str] | None, example: str, kinds_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Read NAME=VALUE ... of an option. kinds_of: a name -> the types that it takes."""
    from flowrl.runtime.typed_text import value_of

    out: dict[str, Any] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{option} {word} should be NAME=VALUE, such as {example}")
        try:
            out[name] = value_of(value, kinds_of(name))
        except ValueError as error:
            raise ValueError(f"{option} {word} {error}") from error
    return out


def to_try(cfg: Any) -> str:
    """Return what a command draws with a run: a prompt of one short line, the first that is held
    out or, without such, that is trained on; or all of them if they bring pictures, without which
    its model draws nothing."""
    from flowrl.data import conditions, prompts
    from flowrl.runtime import registry

    plain, listed = '"a red circle"', (cfg.data.eval, *cfg.data.sources)
    source = next((one for one in listed if one and not registry.is_live(one)), None)
    if source is None:
        return plain
    try:
        rows = prompts.load_prompts(source, cfg.data.columns)
        if conditions.of(rows[:1]):
            return quote(source)
    except (ValueError, OSError):  # a file that the run read and that has gone since
        return plain
    texts = (row["prompt"] for row in rows)
    return next((quote(t) for t in texts if len(t) <= 60 and t.isprintable()), plain)


def next_steps(*steps: str) -> None:
    """Say how to go on, on stderr, so that programs that read stdout see only the command's
    output."""
    typer.echo(visible("\n  ".join(["Next:", *steps])), err=True)


def as_json(record: Any, target: str | None) -> bool:
    """Write the data of a table to the file that --json names, or print them -> whether they were
    printed and take the place of the table."""
    from flowrl.runtime.store.files import write

    if target is None:
        return False
    # NaN, of a sample without a score, is no JSON
    plain = json.loads(json.dumps(record), parse_constant=lambda _: None)
    text = json.dumps(plain, indent=2)
    if target != "-":
        write(Path(target), text + "\n")
        return False
    typer.echo(text)
    return True


def show(printed: object, *, wrap: bool = False) -> None:
    """Print a table or a text, as it is; a file or a pipe gets tables whole. wrap: long lines stay
    whole, so that a path can be copied."""
    from flowrl.runtime.terminal import Terminal

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000
    Terminal(file=sys.stdout, width=width).print(printed, soft_wrap=wrap)


def echo(text: object) -> None:
    """Print lines of text without colours, control characters visible."""
    typer.echo(visible(text, sys.stdout.encoding or "utf-8"))
