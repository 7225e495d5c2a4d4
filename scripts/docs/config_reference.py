"""Write docs/configuration.md from the schemas: every key with its default, what it accepts, and
its meaning.

python scripts/docs/config_reference.py          # writes docs/configuration.md; a test checks that it is
up to date
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowrl.algorithms.common.base import Anchor, Credit
from flowrl.algorithms.common.forward import ForwardConfig
from flowrl.algorithms.common.transitions import TransitionConfig
from flowrl.config.schema import Config, algorithm_schema
from flowrl.rewards import reward_class
from flowrl.runtime.registry import choices

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by scripts/docs/config_reference.py from the schemas. Edit the descriptions there, not here. -->

A run is described by one tree of keys. It is put together in this order, later wins:

```text
schema (the defaults below) <- model <- data <- reward <- algorithm <- experiment <- a YAML file <- command line
```

`model=`, `data=`, `reward=`, `algorithm=` and `experiment=` choose a file of `configs/`, which states only what differs from the schema;
any other `key.sub=value` sets one value. `flowrl list` shows what can be chosen and `flowrl show` prints the result without running it:

```bash
flowrl show experiment=quickstart optimizer.lr=5e-4
flowrl show model=sd3.5-medium algorithm=flow_grpo reward=clip data=file data.train=prompts.txt
```

An unknown key, option or value stops with a sentence that names the nearest valid ones (exit code 2), and nothing is written. The defaults
below are those of the schema; the files of `configs/model` and `configs/algorithm` change some of them.

Two rules tie numbers together: `batch.prompts` divides by processes x `batch.updates`, and `batch.group` is a multiple of the leaves of one
copy of the sampling plan (1, unless [its trajectories fork](algorithms/index.md#cost)).
"""
SHARED: dict[str, tuple[type[BaseModel], ...]] = {
    "of every method": (Credit, Anchor),
    "of methods that train denoising steps": (TransitionConfig,),
    "of methods that train finished samples": (ForwardConfig,),
}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def accepts(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """A type with its bounds in words: Literal["a", "b"] -> "a, b"; PositiveInt -> "int > 0"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if origin is Annotated:
        return accepts(
            args[0], [m for a in args[1:] for m in getattr(a, "metadata", [a])] + [*metadata]
        )
    if origin is Literal:
        return ", ".join(str(value) for value in args)
    if origin in (Union, types.UnionType):
        parts = [accepts(a, metadata if a in (int, float) else ()) for a in args]
        return (
            ", ".join(parts) if any(get_origin(a) is Literal for a in args) else " or ".join(parts)
        )
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"list of {accepts(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(accepts(a) for a in args) + "]"
    if origin is dict:
        return "mapping"
    limits = [
        f"{sign} {getattr(m, name)}"
        for m in metadata
        for name, sign in BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return " ".join([annotation.__name__, " and ".join(limits)]).strip()


def rows(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every leaf of a schema, in its order."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from rows(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value) or '""'


def table(fields: list[tuple[str, FieldInfo]]) -> str:
    """A Markdown table; a bar inside a cell would end it, so there is none."""
    lines = ["| key | default | accepts | meaning |", "|---|---|---|---|"]
    for key, field in fields:
        cells = (
            f"`{key}`",
            f"`{default(field)}`",
            accepts(field.annotation, field.metadata),
            field.description or "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def beyond(
    schema: type[BaseModel], known: tuple[type[BaseModel], ...]
) -> list[tuple[str, FieldInfo]]:
    """Rows of an algorithm's schema that none of the known ones has, or has with another default,
    range or meaning."""

    def said(key: str, field: FieldInfo) -> tuple[str, ...]:
        return (
            key,
            default(field),
            accepts(field.annotation, field.metadata),
            field.description or "",
        )

    old = {said(*row) for other in known for row in rows(other, "algorithm.")}
    return [row for row in rows(schema, "algorithm.") if said(*row) not in old]


def algorithms() -> Iterator[str]:
    """The options that methods share, then those of each that are new or have another default."""
    yield (
        "## algorithm\n\n`algorithm=NAME` chooses a file of `configs/algorithm`; its `name` says"
        " which set of options holds.\n"
    )
    known: tuple[type[BaseModel], ...] = ()
    for title, schemas in SHARED.items():
        yield (
            "### Options"
            f" {title}\n\n{table([row for schema in schemas for row in beyond(schema, known)])}\n"
        )
        known = known or schemas
    for name in choices("flowrl.algorithms"):
        schema = algorithm_schema(name)
        held = {title: schemas for title, schemas in SHARED.items() if issubclass(schema, schemas)}
        own = beyond(schema, tuple(other for schemas in held.values() for other in schemas))
        links = " and ".join(f"[{title}](#options-{title.replace(' ', '-')})" for title in held)
        rest = f"Those {links}" + (
            f"; beside them, or with another default:\n\n{table(own)}\n" if own else ".\n"
        )
        yield f"### algorithm.name = {name}\n\n{rest}"


def page() -> str:
    """The whole page."""
    parts, plain = [HEAD], []
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts.append(
                f"## {name}\n\n{field.description}\n\n{table(list(rows(field.annotation, f'{name}.')))}\n"
            )
        elif name not in ("algorithm", "reward"):
            plain.append((name, field))
    parts.append(f"## The run\n\n{table(plain)}\n")
    parts.extend(algorithms())
    parts.append(
        "## reward\n\n`reward.NAME=WEIGHT` gives a weight (0: measured and logged only),"
        " `reward.NAME.KEY=VALUE` a setting, `reward.LABEL.name=NAME` another label. They add to"
        " what `reward=` chose, `shapes` by default; `~reward` starts from none.\n"
    )
    for name in choices("flowrl.rewards"):
        reward = reward_class(name)
        parts.append(
            f"### reward.{name}\n\n{reward.scale}.\n\n{table(list(rows(reward.Settings, f'reward.{name}.')))}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
