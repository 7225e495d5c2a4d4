"""Whether `memory=24gb|40gb|80gb` fit their cards, and how many hours the recipes of
configs/experiment take, by the budget's model of GPUs.

    python scripts/bench/presets.py [--model flux.1-dev] [--algorithm flow_grpo] [SETTING ...]
    python scripts/bench/presets.py --recipes docs/recipes.md [--model flux.1-dev] [--jobs 2]

The first prints a table of every model with every preset on an H100; the reward is PickScore, whose
weights are counted, unless a setting names others. The second writes the table of recipes into the
page, and says there where a card does not hold one or takes more than twelve hours. The first fails
where a run needs more than its card has.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from methods_by_kind import on_flows
from real_cases import MODELS as RUN_AT_REAL_SIZE

from flowrl.config.compose import options
from flowrl.config.load import load_config
from flowrl.config.schema import Config
from flowrl.training.budget import roofline
from flowrl.training.budget.fit import CARDS
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.whole_run import hours

# those with a recipe
MODELS = [name for name in options("experiment") if not name.startswith("quickstart")]
HEAD = "| model | preset | stays | peak | card needs | seconds an image |"
# GB of a card -> devices whose hours the table of recipes has, the slower one first
DEVICES = {24: ("rtx3090", "rtx4090"), 40: ("l40s", "a100-40gb"), 80: ("a100", "h100")}
EVENING = 12 * 3600  # seconds
TABLE = re.compile(r"(?<=<!-- recipes -->\n).*(?=<!-- /recipes -->)", re.S)
COLUMNS = "| model | card | command | GB | h:min of the run | samples | basis |"
# what ran on a GPU: model, GB of the card -> what the table says of it
H100 = "in part run on one H100 at c97b275"
RAN = {("sd3.5-medium", 80): H100, ("flux.1-dev", 80): H100, ("flux.1-dev", 24): H100}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--algorithm", default="flow_grpo", choices=on_flows())
    parser.add_argument("--recipes", type=Path, metavar="PAGE")
    parser.add_argument("--jobs", type=int, default=2, help="processes, for --recipes")
    parser.add_argument("settings", nargs="*", help="settings of a config, as batch.group=8")
    given = parser.parse_args()
    models = given.model or MODELS
    if given.recipes:
        write_recipes(given.recipes, models, given.jobs)
    elif large := presets(models, given.algorithm, given.settings):
        raise SystemExit(f"too large for the card: {', '.join(large)}")


def presets(models: list[str], algorithm: str, settings: list[str]) -> list[str]:
    """Print the table of presets -> those that need more than their card has."""
    device, large = roofline.device("h100"), []
    print(HEAD, "|---|---|---|---|---|---|", sep="\n")
    for model in models:
        shared = [f"model={model}", f"algorithm={algorithm}", "reward=pickscore", "data=everyday"]
        cfgs = {
            preset: load_config(None, [*shared, f"memory={preset}", *settings])
            for preset in options("memory")
        }
        planner = Planner(next(iter(cfgs.values())), device)
        for preset, cfg in cfgs.items():
            b = planner.budget(cfg)
            if b.needed > CARDS[int(preset.removesuffix("gb"))]:
                large.append(f"{model} with memory={preset}")
            print(
                f"| {model} | {preset} | {b.resident:.1f} GB | {b.peak:.1f} GB, {b.highest} |"
                f" {b.needed:.1f} GB | {b.seconds / b.samples:.2f} |",
                flush=True,
            )
    return large


# ---------------------------------------------------------------------- recipes


def words(model: str, card: int) -> list[str]:
    """Return the words of `flowrl train` for a model on a card of so many GB: those of the recipe,
    and the card's preset where it keeps more of the weights whole than the recipe's own."""
    whole = load_config(model).model.quantize == "none"
    return [f"experiment={model}", *([] if whole or card == 24 else [f"memory={card}gb"])]


def basis(model: str, card: int, cfg: Config) -> str:
    """Return what the row rests on beside the budget. `make real` quantises no weights, and has
    seven of the models."""
    tested = "modelled"
    if cfg.model.quantize == "none" and model in RUN_AT_REAL_SIZE:
        said = RUN_AT_REAL_SIZE[model].said
        tested = "identity-tested" + (f" (blocks: {said})" if said != "all" else "")
    return "; ".join([tested, *([RAN[model, card]] if (model, card) in RAN else [])])


def rows(model: str) -> Iterator[str]:
    """Make the rows of a model."""
    planner = Planner(load_config(model), roofline.device("h100"))
    for card, devices in DEVICES.items():
        command = words(model, card)
        cfg = load_config(None, command)
        found = [planner.on(roofline.device(name)).budget(cfg) for name in devices]
        how = f"`flowrl train {' '.join(command)}`"
        if min(b.run["total"] for b in found) > EVENING:
            how = "These cards take more than 12 hours."
        if found[0].needed > CARDS[card]:
            how = "These cards do not hold it."
        took = ", ".join(f"{b.device.name} {hours(b.run['total'])}" for b in found)
        samples = f"{found[0].samples * cfg.iterations:,}"
        cells = [model, f"{card} GB", how, f"{found[0].needed:.1f}", took, samples]
        yield f"| {' | '.join([*cells, basis(model, card, cfg)])} |"


def timed(model: str) -> tuple[list[str], float]:
    """Make the rows of a model, and count the processor seconds that they take."""
    began = time.process_time()
    return [*rows(model)], time.process_time() - began


def write_recipes(page: Path, models: list[str], jobs: int) -> None:
    """Write the rows of these models into the table of recipes of a page; other rows stay."""
    began, spent, text = time.perf_counter(), 0.0, page.read_text(encoding="utf-8")
    found = TABLE.search(text)
    lines = found[0].splitlines()[2:] if found else []
    with ProcessPoolExecutor(jobs) as pool:
        for model, (made, seconds) in zip(models, pool.map(timed, models), strict=True):
            lines = [line for line in lines if not line.startswith(f"| {model} |")] + made
            spent += seconds
            print(*made, sep="\n", flush=True)
    lines.sort(key=lambda line: MODELS.index(line.split(" | ")[0].removeprefix("| ")))
    whole = "\n".join([COLUMNS, "|---" * 7 + "|", *lines])
    page.write_text(TABLE.sub(lambda _: f"{whole}\n", text), encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s, {spent:.0f} s of processors")


if __name__ == "__main__":
    main()
