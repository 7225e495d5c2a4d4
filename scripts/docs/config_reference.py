"""Write docs/configuration/ from the schemas, a page for each section: every key with its default,
what it accepts, its meaning, and under which other settings it is read.

python scripts/docs/config_reference.py    # a test checks that the pages are up to date
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import TypeIs

from flowrl.algorithms.common.base import Anchor, Credit
from flowrl.algorithms.common.forward import ForwardConfig
from flowrl.algorithms.common.transition_config import TransitionConfig
from flowrl.config.rules import RULES
from flowrl.config.schema import Config, algorithm_schema
from flowrl.rewards import reward_class
from flowrl.runtime.registry import choices
from flowrl.runtime.rule import as_yaml, conditions

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "configuration"
WRITTEN = "<!-- Written by scripts/docs/config_reference.py; descriptions stand in the schemas. -->"
HEAD = """A run is described by one tree of keys. It is put together in this order, later wins:

```text
defaults of the sections <- model <- memory <- data <- reward
    <- algorithm <- experiment <- a YAML file <- command line
```

`model=`, `memory=` (what fits a card of 24, 40 or 80 GB), `data=`, `reward=`, `algorithm=` and
`experiment=` choose a file of `configs/`, which states only what differs from the schema; any other
`key.sub=value` sets one value. `flowrl list` shows what can be chosen and `flowrl show` prints the
result without running it:

```bash
flowrl show experiment=quickstart optimizer.lr=5e-4
flowrl show model=sd3.5-medium algorithm=flow_grpo reward=clip data=file data.train=prompts.txt
flowrl show model=sd3.5-medium algorithm=flow_grpo reward=clip data=ocr --diff
flowrl train model=sd3.5-medium algorithm=flow_grpo reward=clip data=ocr --dry-run
```

`--diff` prints only what differs from the defaults, as `KEY=VALUE  # the default`. With a second
file, experiment or run it prints what differs from that: `flowrl show mine.yaml runs/old --diff`.
`--dry-run` does all that a start does before its first evaluation: it loads model, rewards and
prompts, checks them, and tries the rewards on a few samples. It then says what would run, and
leaves no run folder.

`flowrl init` asks four questions (model, reward, prompts, memory of the card) and writes
`run.yaml`, a config with comments: `flowrl train run.yaml` runs it. Answers can be options, and
`--yes` takes defaults for the rest: `flowrl init mine.yaml --model sdxl --yes`.

## Sections

Each section has a page with its keys. The defaults there are those of the schema; the files of
`configs/model` and `configs/algorithm` change some of them. "Read with" says under which other
settings a key has an effect; a run that sets it under others says so when it starts.

SECTIONS

Two rules tie numbers together: `batch.prompts` divides by processes x `batch.updates`, and
`batch.group` is a multiple of the samples that one copy of the sampling plan ends in (1, unless
[its trajectories fork](../algorithms/index.md#cost)).

## On the command line

| word | what it does |
|---|---|
| `quickstart`, `mine.yaml` | as the first word: build on an experiment or a YAML file |
| `algorithm=nft` | choose a file of `configs/algorithm`; so do the other five |
| `batch.group=16` | set a value, wherever the word stands |
| `reward.clip=0.5` | add a reward with its weight |
| `~reward.shapes` | leave out a reward or another key that was chosen; `~reward`: all rewards |
| `+model.pipeline.width=512` | add a key, and be refused if it is there; `++` sets it in any case |
| `'train.parts=[denoiser,text_encoder]'` | a list; the shell wants quotes around brackets |

The words have the grammar of Hydra. A setting that is a text takes what is written, without quotes:
`output=1980`, `model.pipeline.negative_prompt=no, blurry`, `reward.x.question=# of dogs?`. Other
values are a number, `true`, `false`, `null`, a text, `[a, b]` or `{a: b}`. `null` means "none",
also for a text that may be none.

Prompts and rewards have defaults, `data=shapes reward=shapes`, with the embedded models alone. With
any other model `train`, `show` and `budget` ask for both: nobody means to train it on toy prompts,
and the memory of the rewards is part of the budget. Prompts and rewards that a script hands to
`flowrl.train` count.

A run takes the name of its file of `configs/algorithm`, or of what `algorithm.label=NAME` says.

## In a YAML file

The list `defaults` chooses files of `configs/`, and the sections below it win:

```yaml
defaults: [{override /model: sd3.5-medium}, {override /algorithm: nft}, {override /reward: null}]
reward: {clip: 1.0}
batch: {group: 16}
```

YAML decides what a value is: put texts that look like something else in quotes. A file holds at
most 1 MB, 50 levels, each key once, and 10,000 values with its aliases written out (from OmegaConf
2.4 on).

In paths, `~` and variables of the environment (`$DATA/prompts.txt`) are written out everywhere: in
settings, options of commands, lists and settings of rewards. `${key}` is another key's value, and a
file that a list names lies relative to the list.

## Several seeds or values

A run takes one value of each setting. Several seeds, or values to compare, are several runs, each
with a folder of its own. [Comparing runs](../comparing.md) puts them side by side.

```bash
flowrl train experiment=quickstart output=runs/quickstart --seeds 0,1,2
for v in 1e-4 3e-4; do flowrl train experiment=quickstart optimizer.lr=$v output=runs/lr-$v; done
```

## What is refused

An unknown key, option or value stops with exit code 2 before torch is imported, and nothing is
written. The sentence names the nearest valid ones, or what a name of TRL, kohya's scripts,
SimpleTuner or diffusers is called here.

An empty value is refused, as that of `output=$RUN` where the variable is unset. So are empty
options (`--resume ""`), and an empty text in a file or a script where a setting may be none;
`output=null` says none. [What does not go together](together.md) lists the settings that exclude
each other.

No command loses its work to printing. A character that the console does not have is printed as an
escape (`\\u5706`). If nobody reads the output any more (`| head`, a closed terminal), the command
goes on without it. Files are UTF-8 whatever the console is.
"""
# Section -> the pages that explain what its settings do.
MORE = {
    "model": "[Models](../models.md), [Policies](../policies.md)",
    "data": "[Prompts](../prompts.md), [Conditions](../conditions.md)",
    "sampler": "[Concepts](../concepts.md)",
    "batch": "[Cost](../algorithms/index.md#cost), [Out of memory](../out_of_memory.md)",
    "draw": "[Which prompts are seen](../algorithms/index.md#which-prompts-are-seen)",
    "diversity": "[Diversity](../diversity.md)",
    "train": "[Budget](../budget.md), [Many GPUs](../many_gpus.md), [Speed](../performance.md)",
    "optimizer": "[Updates](../concepts.md#updates-and-micro-batches)",
    "gradient": "[Combine rewards](../rewards/combine.md#rewards-climbed-by-their-gradient)",
    "anchor": "[Data beside rollouts](../concepts.md#data-beside-rollouts)",
    "replay": "[Old samples again](../algorithms/index.md#old-samples-again)",
    "ema": "[Checkpoints](../checkpoints.md)",
    "eval": "[Compare runs](../comparing.md), [Suites](../rewards/suites.md)",
    "checkpoint": "[Checkpoints](../checkpoints.md)",
    "stop": "[When a run stops](../guards.md)",
    "watch": "[Reward hacking](../hacking.md)",
    "guard": "[When a run stops](../guards.md)",
    "tracking": "[Trackers](../tracking.md)",
    "run": "[Follow a run](../run_folder.md)",
    "algorithm": "[Methods](../algorithms/index.md)",
    "reward": "[Choose a reward](../choose_reward.md), [Rewards](../rewards.md)",
    "together": "[Troubleshooting](../troubleshooting.md)",
}
SHARED: dict[str, type[BaseModel]] = {
    "of every method": Anchor,
    "of methods that compare samples": Credit,
    "of methods that train denoising steps": TransitionConfig,
    "of methods that train finished samples": ForwardConfig,
}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting as the page shows it; two rows are equal when the page would say the same."""

    key: str  # dotted, as on the command line
    default: str  # as YAML
    accepts: str  # its type and bounds in words
    meaning: str  # the schema's description, and under which settings it is read

    def __str__(self) -> str:
        cells = (f"`{self.key}`", f"`{self.default}`", self.accepts, self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def pages() -> dict[str, str]:
    """File of docs/configuration -> its text: an index, and a page for each section."""
    parts = dict(sections())
    lines = [f"* [{title(name)}]({name}.md): {about}" for name, (about, _) in parts.items()]
    index = f"# Configuration\n\n{WRITTEN}\n\n" + HEAD.replace("SECTIONS", "\n".join(lines))
    return {"index.md": index} | {
        f"{name}.md": f"# Configuration: {title(name)}\n\n{WRITTEN}\n\n{about} More about it:"
        f" {MORE[name]}; [all sections](index.md#sections).\n\n{body}"
        for name, (about, body) in parts.items()
    }


def title(section: str) -> str:
    """Title of a section's page: its key, or words where it is none."""
    return {"run": "the run", "together": "what does not go together"}.get(section, section)


def sections() -> Iterator[tuple[str, tuple[str, str]]]:
    """(file without .md, (what the section is in a sentence, the rest of its page))."""
    plain = [row for row in rows(Config) if row.key in Config.model_fields]
    run = table(row for row in plain if row.key not in ("algorithm", "reward"))
    yield "run", ("Length, seed, folder and trackers of a run.", f"{run}\n")
    for name, field in Config.model_fields.items():
        if is_section(field.annotation):
            body = table(rows(field.annotation, f"{name}."))
            yield name, (field.description or "", f"{body}\n")
    yield "algorithm", ("The method, and its options.", "\n".join(algorithms()))
    yield "reward", ("Rewards, their weights and their settings.", "\n".join(rewards()))
    about = "Settings that a start refuses in one run."
    yield "together", (about, "\n".join(refused_together()))


def algorithms() -> Iterator[str]:
    """The options that methods share, then those of each that are new or have another default."""
    yield (
        "`algorithm=NAME` chooses a file of `configs/algorithm`; its `name` says which set of"
        " options holds.\n"
    )
    for title_, schema in SHARED.items():
        above = [other for other in SHARED.values() if other in schema.__mro__[1:]]
        known = [row for other in above for row in rows(other, "algorithm.")]
        shown = (row for row in rows(schema, "algorithm.") if row not in known)
        yield f"## Options {title_}\n\n{table(shown)}\n"
    for name in choices("flowrl.algorithms"):
        yield f"## algorithm.name = {name}\n\n{own_options(algorithm_schema(name))}"


def own_options(schema: type[BaseModel]) -> str:
    """Links to the shared options that an algorithm has, and a table of its other ones."""
    held = {title: other for title, other in SHARED.items() if issubclass(schema, other)}
    shared = [row for other in held.values() for row in rows(other, "algorithm.")]
    own = [row for row in rows(schema, "algorithm.") if row not in shared]
    *first, last = [f"[{title}](#options-{title.replace(' ', '-')})" for title in held]
    links = ", ".join(first) + " and " * bool(first) + last
    if not own:
        return f"Those {links}.\n"
    return f"Those {links}; beside them, or with another default:\n\n{table(own)}\n"


def rewards() -> Iterator[str]:
    yield (
        "`reward.NAME=WEIGHT` gives a weight (0: measured and logged only),"
        " `reward.NAME.KEY=VALUE` a setting, `reward.LABEL.name=NAME` another label. They add to"
        " what `reward=` chose, `shapes` by default; `~reward` starts from none.\n"
    )
    for name in choices("flowrl.rewards"):
        reward = reward_class(name)
        table_ = table(rows(reward.Settings, f"reward.{name}."))
        yield f"## reward.{name}\n\n{reward.scale}.\n\n{table_}\n"


def refused_together() -> Iterator[str]:
    """The rules over words alone, as a start says them."""
    yield (
        "A start refuses these in a sentence, before a model is"
        " loaded, and `flowrl budget` proposes none of them. A name stands for any value but the"
        " setting's default:\n"
    )
    for rule in RULES:
        if rule.kind == "refuse" and isinstance(rule.says, str):
            yield "- " + rule.says.format(*(f"`{key}`" for key in rule.reads)) + "."
    yield ""


def table(shown: Iterable[Row]) -> str:
    head = ["| key | default | accepts | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *map(str, shown)])


def rows(schema: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """Every leaf of a schema, in its order."""
    for (key, field), (_, declared) in zip(
        fields(schema, prefix), conditions(schema, prefix), strict=True
    ):
        when = "; and with ".join(condition.words for condition in declared)
        yield Row(
            key=key,
            default=default(field),
            accepts=accepts(field.annotation, field.metadata),
            meaning=(field.description or "").replace("<", "&lt;")
            + f" Read with {when}." * bool(when),
        )


def fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every leaf of a schema, in its order."""
    for name, field in schema.model_fields.items():
        if is_section(field.annotation):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def is_section(annotation: Any) -> TypeIs[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "to be set"
    value = field.get_default(call_default_factory=True)
    return as_yaml(list(value) if isinstance(value, tuple) else value) or '""'


def accepts(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type with its bounds in words: Literal["a", "b"] -> "a, b"; PositiveInt -> "int > 0"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if origin is Annotated:
        inner = [m for a in args[1:] for m in getattr(a, "metadata", [a])]
        return accepts(args[0], [*inner, *metadata])
    if origin is Literal:
        return ", ".join(str(value) for value in args)
    if origin in (Union, types.UnionType):
        return either(args, metadata)
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"list of {accepts(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(accepts(a) for a in args) + "]"
    if origin is dict:
        return "mapping"
    return " ".join([annotation.__name__, " and ".join(limits(metadata))]).strip()


def either(types_: Sequence[Any], metadata: Sequence[Any]) -> str:
    """A union in words; its bounds are those of its numbers."""
    parts = [accepts(a, metadata if a in (int, float) else ()) for a in types_]
    return (", " if any(get_origin(a) is Literal for a in types_) else " or ").join(parts)


def limits(metadata: Sequence[Any]) -> Iterator[str]:
    """Bounds of a number: "> 0"."""
    for m in metadata:
        for name, sign in BOUNDS.items():
            if getattr(m, name, None) is not None:
                yield f"{sign} {getattr(m, name)}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
    print(f"wrote {FOLDER}")
