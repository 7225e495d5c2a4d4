"""A model card: what was trained, how well it did on held-out prompts, and how it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flowrl import __version__
from flowrl.config.compose import is_embedded
from flowrl.export.words import Order
from flowrl.policy.load import resolve_source
from flowrl.report import numbers
from flowrl.runtime.store.run_folder import read_evaluation, read_metrics

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WHAT = {  # whether the pipeline is whole, train.mode -> what the files hold
    (False, "lora"): "LoRA weights for",
    (True, "lora"): "A pipeline with a LoRA merged into the weights of",
    (True, "full"): "A pipeline with all trained weights of",
}


def render(order: Order, kinds: Mapping[str, str], files: Sequence[str]) -> str:
    """Write the card of an export. kinds: part of the pipeline -> class; files: names of files."""
    cfg, source = order.cfg, resolve_source(order.cfg.model.source)[0]
    metrics = read_metrics(order.run)
    named = "/" in source and not Path(source).exists() and ":" not in source
    base = source.partition("@")[0] if named else None
    embedded = "flowrl's embedded model, shapes-sd3" if is_embedded(source) else ""
    last = order.iteration or (metrics[-1]["iteration"] if metrics else cfg.iterations)
    # no autoescape: the card is Markdown
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = (resources.files(__package__) / "card.md").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        absent=[name for name, kind in kinds.items() if kind == "NoneType"],
        base=base,
        call={
            k: json.dumps(v) for k, v in cfg.model.pipeline.items() if isinstance(v, int | float)
        },
        dtype=DTYPES[order.dtype or cfg.model.dtype],
        facts=_facts(order, kinds, metrics, last, base),
        files=files,
        form=order.form,
        iteration=last,
        method=cfg.algorithm["label"],
        model=base or embedded or f"the model {_name(source)}",
        planned=cfg.iterations,
        prompts=_name(cfg.data.train),
        rewards=_rewards(cfg.reward),
        title=order.push or order.output.stem,
        version=__version__,
        what=WHAT[order.form == "merged", cfg.train.mode],
        **_results(read_evaluation(order.run)),
    )


def _facts(
    order: Order,
    kinds: Mapping[str, str],
    metrics: Sequence[Mapping[str, Any]],
    last: int,
    base: str | None,
) -> dict[str, Any]:
    """Return the lines of the card's first table."""
    cfg = order.cfg
    seen = [row["reward/total"] for row in metrics if row["iteration"] <= last]
    seen = [value for value in seen if value is not None]
    parts = ", ".join(cfg.train.parts)
    facts: dict[str, Any] = {"pipeline": kinds.get("", "")}
    file = order.run / "environment.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if commit := known.get(f"huggingface.co/{base}"):
        facts["commit of the base model"] = commit
    lora = cfg.train.lora
    targets = f" on {', '.join(lora.targets)}" if lora.targets else ""
    how = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}{targets}"
    facts["trained"] = f"{how if cfg.train.mode == 'lora' else 'all weights'} of {parts}"
    facts["samples an iteration"] = f"{cfg.batch.prompts} prompts x {cfg.batch.group}"
    facts["sampling"] = f"{cfg.sampler.steps} steps, guidance {cfg.sampler.guidance}"
    facts["optimizer"] = f"{cfg.optimizer.name}, lr {cfg.optimizer.lr:g}"
    if seen:
        facts["reward of training samples"] = f"{seen[0]:.4g} at first, {seen[-1]:.4g} at last"
    facts["seed"] = cfg.seed
    return facts


def _rewards(entries: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} (weight {entry['weight']:g})" for name, entry in entries.items())


def _name(source: Any) -> str:
    """Name a source of prompts or a model without the folder of this machine that it is in."""
    text = str(source or "")
    outside = Path(text).exists() or text.startswith(("/", ".", "~")) or ".py:" in text
    return Path(text).name if outside else text


def _head(row: dict[str, Any]) -> list[str]:
    name, *rest = numbers.row_head(row)
    return [f"{name}, iteration {row['iteration']}" if row.get("iteration") else name, *rest]


def _results(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of held-out results, as reports show it."""
    names = numbers.distinct_metrics(dict(evaluation))
    rows = [
        _head(row) + [numbers.interval_text(row["metrics"].get(n)) for n in names]
        for row in numbers.evaluation_rows(dict(evaluation))
        if row.get("metrics")
    ]
    paired = evaluation.get("paired", {})
    said = [numbers.paired_sentence(name, paired[name]) for name in names if name in paired]
    return {"heads": ["row", *numbers.HEADS, *names], "rows": rows, "paired": said}
