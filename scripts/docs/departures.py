"""Write the table of every method's page in docs/algorithms: each setting that the method reads, in
the paper, in the authors' code and here.

    python scripts/docs/departures.py      # a test checks that the pages are up to date

What papers and codes have is in docs/algorithms/departures.yaml, ours is read from the configs. A
setting without a row, a row without a setting, and a default that has changed are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.load import flatten, load_config
from flowrl.config.schema import algorithm_schema
from flowrl.runtime.rule import as_yaml, conditions

PAGES = Path(__file__).resolve().parents[2] / "docs" / "algorithms"
BEGIN = "<!-- settings: written by scripts/docs/departures.py from departures.yaml -->"
END = "<!-- end of settings -->"
RUN = (  # settings of other sections that a method's authors choose
    "sampler.steps",
    "sampler.init_noise",
    "sampler.guidance",
    "batch.group",
    "batch.updates",
    "train.mode",
    "train.parts",
    "optimizer.lr",
    "optimizer.warmup",
    "optimizer.schedule",
    "optimizer.betas",
    "optimizer.weight_decay",
    "optimizer.eps",
    "optimizer.max_grad_norm",
    "ema.decay",
)
UNSAID = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting elsewhere and here; values as texts, None where nothing is said."""

    paper: str | None = None  # the paper's value
    code: str | None = None  # the value of the authors' code
    ours: str | None = None  # where it is neither the code's nor, without code, the paper's
    own: str | None = None  # of an option that the method does not have
    why: str | None = None  # why ours is another value

    @property
    def here(self) -> str | None:
        """What our config should say."""
        said = (self.own, self.ours, self.code, self.paper)
        return next((value for value in said if value is not None), None)

    @property
    def place(self) -> int:
        """Departures first, then what is equal, then options of ours."""
        return 2 if self.own is not None else 1 if self.why is None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    code: str | None  # repository, commit and files; None: written from the paper
    model: str  # whose file of configs/model ours is read with
    rows: dict[str, Row]  # by setting


def methods(text: str) -> dict[str, Method]:
    """The methods of departures.yaml; ValueError where it is not written as its head says."""
    said = yaml.safe_load(text)
    blocks = said["blocks"] | {
        name: {"like": entry["like"], **entry["settings"]}
        for name, entry in said["methods"].items()
    }
    return {
        name: Method(
            code=entry.get("code"),
            model=entry["model"],
            rows={key: row(f"{name}: {key}", value) for key, value in rows(blocks, name).items()},
        )
        for name, entry in said["methods"].items()
    }


def rows(blocks: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Rows of a block, over those of the blocks that it is like."""
    own = dict(blocks[name])
    out: dict[str, Any] = {}
    for other in own.pop("like", []):
        out |= rows(blocks, other)
    return out | own


def row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        return Row(code=text_of(value))
    allowed = [field.name for field in fields(Row)]
    if unknown := set(value) - set(allowed):
        raise ValueError(f"{where}: a row has no {sorted(unknown)[0]}, but {', '.join(allowed)}")
    return Row(**{k: v if k == "why" else text_of(v) for k, v in value.items()})


def text_of(value: Any) -> str:
    """A value as the tables show it; 1e-4, which YAML reads as a text, and 0.0001 are one."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    try:
        return as_yaml(value) if value is None or isinstance(value, bool) else f"{float(value):g}"
    except (ValueError, TypeError):  # a text, or a mapping
        return str(value)


def defaults(name: str, model: str) -> dict[str, str]:
    """Every setting that algorithm=NAME reads, with its value on a model."""
    words = [f"model={model}", f"algorithm={name}", "reward=jpeg", "data=file"]
    cfg = load_config(None, [*words, "data.train=prompts.txt"])
    now = flatten(cfg.model_dump(mode="json"))
    if now["sampler.guidance"] == "pipeline":
        now["sampler.guidance"] = cfg.model.pipeline["guidance_scale"]
    schema = algorithm_schema(cfg.algorithm["name"])
    declared = conditions(schema, "algorithm.")
    read = [key for key, all_of in declared if all(one.holds(now) for one in all_of)]
    read += RUN
    read += ["sampler.eta"] * ("sde" in schema.model_fields)
    read += ["ema.every"] * (cfg.ema.decay > 0)
    return {key: text_of(now[key]) for key in read}


def problems(name: str, method: Method, now: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a method's rows; now: defaults()."""
    for key in now.keys() - method.rows.keys():
        yield f"{name}: {key}={now[key]} has no row in departures.yaml"
    for key, said in method.rows.items():
        if key not in now:
            continue  # of a block: another method reads it
        if said.here != now[key]:
            yield f"{name}: the row of {key} says {said.here}, and the default is {now[key]}"
        other = said.code if said.code is not None else said.paper
        departs = said.own is None and said.here != other
        if departs and said.why is None:
            yield f"{name}: {key} is {said.here} here and {other} there; the row should say why"


def unread(text: str, read: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Rows that no method which has them reads: settings that do not exist, or are at rest."""
    said = yaml.safe_load(text)
    for name, entry in said["methods"].items():
        for key in entry["settings"].keys() - read[name].keys():
            yield f"{name}: {key} is not a setting that the method reads; drop its row"
    known = {key for now in read.values() for key in now}
    for name, block in said["blocks"].items():
        for key in block.keys() - known:
            yield f"{name}: {key} is not a setting that any method reads; drop its row"


def table(method: Method, now: Mapping[str, str]) -> str:
    """The part of a method's page between its marks."""
    order = sorted(now, key=lambda key: method.rows[key].place)  # stable: in the schema's order
    head = ["| setting | paper | authors' code | ours | why |", "|-|-|-|-|-|"]
    lines = [line(key, method.rows[key], bool(method.code), now[key]) for key in order]
    source = f"The code is {method.code}." if method.code else "No code of the authors was found."
    return "\n".join(
        [
            f"Every setting that the method reads, with `model={method.model}`. Those that differ"
            " from the paper or the code, or that neither states, come first.",
            f"{source} Names without a section are of `algorithm`; {UNSAID} is what is not stated,"
            " or was not looked up.\n",
            *head,
            *lines,
        ]
    )


def line(key: str, said: Row, coded: bool, now: str) -> str:
    paper, code = said.paper, said.code
    if not coded and paper is None:  # a bare value is the paper's
        paper, code = code, None
    why = "an option of ours, at rest" if said.own is not None else said.why or ""
    shown = [f"`{v}`" if v is not None else UNSAID for v in (paper, code)]
    cells = [f"`{key.removeprefix('algorithm.')}`", *shown, f"`{now}`", why]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def filled(page: str, text: str) -> str:
    """A page with a text between the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"a page has no lines {BEGIN!r} and {END!r} around its settings")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def main() -> int:
    text = (PAGES / "departures.yaml").read_text(encoding="utf-8")
    said = methods(text)
    now = {name: defaults(name, method.model) for name, method in said.items()}
    wrong = [p for name, method in said.items() for p in problems(name, method, now[name])]
    if wrong := [*wrong, *unread(text, now)]:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    for name, method in said.items():
        path = PAGES / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        path.write_text(filled(page, table(method, now[name])), encoding="utf-8")
    print(f"wrote the settings of {len(said)} pages in {PAGES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
