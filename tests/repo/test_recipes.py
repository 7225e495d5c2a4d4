"""The table of recipes: its commands are those of configs/experiment, they could start, and its
numbers are within an evening and a card."""

import re

import long
import presets
import pytest
import torch
from pages import ROOT
from test_commands import check_run
from typer.testing import CliRunner

from flowrl.cli.main import app
from flowrl.config.compose import options
from flowrl.config.load import load_config
from flowrl.training.budget.fit import CARDS

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in presets.TABLE.search(PAGE)[0].splitlines()[2:]
]
CELLS = [(model, card) for model in presets.MODELS for card in presets.DEVICES]


def test_the_table_has_every_named_model_and_card_and_every_recipe():
    assert [(row[0], row[1]) for row in ROWS] == [(m, f"{card} GB") for m, card in CELLS]
    others = {"quickstart", "quickstart-edit", "quickstart-unet", "quickstart-video"}
    assert {*options("experiment")} == {*presets.MODELS} | others and len(ROWS) == 51


@pytest.mark.parametrize(("row", "cell"), zip(ROWS, CELLS, strict=True), ids=map(str, CELLS))
def test_a_row_says_what_its_config_has(row, cell):
    words = presets.words(*cell)
    cfg = load_config(None, words)
    _, _, command, gb, took, samples, basis = row
    assert float(gb) <= CARDS[cell[1]]
    minutes = [60 * int(h) + int(m) for h, m in re.findall(r"(\d+):(\d\d)", took)]
    assert re.findall(r"[a-z][\w-]+", took) == [*presets.DEVICES[cell[1]]]
    assert command == f"`flowrl train {' '.join(words)}`" and min(minutes) <= 12 * 60
    assert samples == f"{cfg.batch.prompts * cfg.batch.group * cfg.iterations:,}"
    assert basis == presets.basis(*cell, cfg)
    assert cfg.data.train == "everyday:train" and cfg.data.eval == "everyday:eval"
    assert [*cfg.reward] == ["pickscore"] and cfg.eval.guidance == "pipeline"
    check_run("docs/recipes.md", ["train", *words])


@pytest.mark.parametrize("model", presets.MODELS)
def test_a_recipe_is_shown(model):
    done = CliRunner().invoke(app, ["show", f"experiment={model}", "memory=24gb"])
    assert done.exit_code == 0 and "everyday:train" in done.output


@pytest.mark.parametrize("model", presets.MODELS)
@pytest.mark.parametrize("memory", options("memory"))
def test_a_preset_of_memory_does_not_change_how_many_samples_are_trained(model, memory):
    chosen = ["data=everyday", "reward=clip", f"model={model}"]
    plain, light = (load_config(None, [*chosen, *more]) for more in ([], [f"memory={memory}"]))
    for name in ("prompts", "group", "updates", "overlap"):
        assert getattr(light.batch, name) == getattr(plain.batch, name)
    assert light.iterations == plain.iterations and light.sampler == plain.sampler
    assert light.algorithm == plain.algorithm and light.eval == plain.eval


@pytest.mark.hub
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_recipe_trains_one_iteration_of_real_weights(tmp_path):
    small = ["iterations=1", "batch.prompts=2", "batch.group=2", "eval.images=2", "eval.steps=2"]
    words = ["train", "experiment=sd3.5-medium", *small, f"output={tmp_path / 'run'}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "pickscore" in done.output


@long.mark
def test_the_numbers_of_a_row_are_those_of_the_budget():
    made = next(presets.rows("sd1.5"))
    assert [cell.strip() for cell in made.strip("|").split("|")] == ROWS[CELLS.index(("sd1.5", 24))]
