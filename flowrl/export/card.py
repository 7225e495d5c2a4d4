"""A model card: what was trained, how well it did on held-out prompts, and how it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowrl import __version__
from flowrl.config.build import DTYPES
from flowrl.config.compose import is_embedded
from flowrl.export.words import Order
from flowrl.policy.load import resolve_source
from flowrl.report import charts, numbers
from flowrl.report.watch_page import points
from flowrl.runtime.store import side_files
from flowrl.runtime.store.run_folder import read_evaluation, read_metrics, trained_iterations


def render(order: Order, kinds: Mapping[str, str], files: Sequence[str]) -> str:
    """Write the card of an export. kinds: part of the pipeline -> class; files: names of files."""
    cfg, source = order.cfg, resolve_source(order.cfg.model.source)[0]
    own = is_embedded(source) or ":" in source or Path(source).exists() or "/" not in source
    base = None if own else source.partition("@")[0]
    commits = order.run / "environment.json"
    known = side_files.read(commits, again="export again") if commits.is_file() else {}
    metrics = read_metrics(order.run)
    last = order.iteration or max(trained_iterations(metrics), default=cfg.iterations)
    seen = [point for point in points(metrics, "reward/total") if point[0] <= last]
    # no autoescape: the card is Markdown
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = (resources.files(__package__) / "card.md").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        base=base,
        cfg=cfg,
        commit=known.get(f"huggingface.co/{base}"),
        dtype=DTYPES[order.dtype or cfg.model.dtype],
        files=files,
        iteration=last,
        kinds=kinds,
        model="flowrl's embedded model" if is_embedded(source) else base or _name(source),
        order=order,
        prompts=", ".join(map(_name, cfg.data.sources)),
        rewards_seen=_curve(seen),
        title=order.push or order.output.stem,
        version=__version__,
        **_results(read_evaluation(order.run)),
    )


def _curve(seen: charts.Points) -> list[tuple[str, str, str]]:
    """Average a curve over tenths of the run -> (middle iteration, mean, bar). Bars lie between the
    lowest mean and the highest."""
    means = charts.thin(seen, 10)
    place = charts.Scale(min(y for _, y in means), max(y for _, y in means)) if means else None
    return [(f"{x:g}", f"{y:.4g}", "█" * round(1 + 19 * place(y))) for x, y in means if place]


def _name(source: Any) -> str:
    """Name a source of prompts or a model without the folder of this machine that it is in."""
    text = str(source or "")
    outside = Path(text).exists() or text.startswith(("/", ".", "~")) or ".py:" in text
    return Path(text).name if outside else text


def _results(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the table of held-out results, as reports show it, with the iteration of each row."""
    titles = numbers.distinct_metrics(evaluation)
    rows = []
    for row in numbers.evaluation_rows(evaluation):
        name, *rest = numbers.row_head(row)
        label = f"{name}, iteration {row['iteration']}" if row.get("iteration") else name
        found = row.get("metrics", {})
        rows.append([label, *rest, *(numbers.interval_text(found.get(n)) for n in titles)])
    paired = evaluation.get("paired", {})
    said = [
        numbers.paired_sentence(evaluation, name, title)
        for name, title in titles.items()
        if name in paired
    ]
    return {"heads": ["row", *numbers.HEADS, *titles.values()], "rows": rows, "paired": said}
