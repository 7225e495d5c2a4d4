"""Shipped configs as shipped: what scripts/bench/shipped.py runs, replaces, counts and prints."""

import json
import math

import long
import pytest
import rounding
import shipped
import small_models
import torch
from methods_by_kind import on_flows
from small import NAMED

import flowrl
from flowrl.config.compose import options
from flowrl.config.load import flatten, load_config
from flowrl.training.budget.architecture import class_of


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


# --- what is run


def test_every_method_meets_every_model_precision_and_preset():
    cells = shipped.cells()
    assert len(set(cells)) == len(cells) == 96 <= 120
    met = {
        pair
        for cell in cells
        for method in shipped.methods_of(cell)
        for pair in (("", method, one) for one in (cell.model, cell.precision, cell.memory))
    }
    values = {*small_models.names(), *shipped.PRECISIONS, "none", *options("memory")}
    assert {(method, one) for _, method, one in met} == {
        (method, one) for method in on_flows() for one in values
    }
    assert all({*shipped.FULL} < {*shipped.methods_of(cell)} for cell in cells)
    first = cells[: len(small_models.names())]
    assert {c.precision for c in first} == set(shipped.PRECISIONS) and {
        c.memory for c in first
    } == {"none", *options("memory")}


def test_only_the_settings_that_are_printed_are_replaced(tmp_path):
    """Precision, types, guidance, LoRA and memory settings are those of the files, for each model,
    each preset, and each method that has words of its own."""
    found = set()
    for cell, method in zip(shipped.cells(), [*shipped.COUNTS, "flow_grpo"], strict=False):
        words = shipped.words(cell, method, tmp_path, tmp_path / "prompts.txt")
        ours = flatten(load_config(None, words).model_dump(mode="json"))
        kept = [w for w in words if w.partition("=")[0] in ("model", "algorithm", "memory")]
        own = [*kept, *shipped.PRECISIONS[cell.precision]]
        usual = ["data=shapes", "reward=shapes"]  # a named model has none of its own
        files = flatten(load_config(None, [*own, *usual]).model_dump(mode="json"))
        changed = {key for key in ours.keys() | files.keys() if ours.get(key) != files.get(key)}
        found |= {"reward" if key.startswith("reward.") else key for key in changed}
    assert found == set(shipped.REPLACED)


def test_small_models_have_the_published_classes_and_all_but_sizes():
    for name in small_models.names():
        if name == "shapes-sd3":
            continue
        for part, published in small_models.published_of(name).parts.items():
            if part.startswith("text_encoder") or part == "safety_checker":
                continue
            mine = small_models.config_of(name, part)
            named = small_models.sizes_of(name, part)
            assert class_of(mine["_class_name"])
            assert {k: v for k, v in mine.items() if k not in named} == {
                k: v for k, v in published.items() if k not in named
            }
    assert {*small_models.SCHEDULERS, "shapes-sd3"} <= {*options("model")}


# --- runs

CELLS = [  # each precision, preset and kind of guidance; other pairs are left to the script
    pytest.param("flux.1-dev", "bf16", "none", "flow_grpo", marks=long.mark),
    ("qwen-image", "fp32", "24gb", "nft"),
    ("sd3.5-medium", "fp16", "40gb", "nft"),
    pytest.param("wan2.1-1.3b", "bf16", "80gb", "flow_grpo", marks=long.mark),
]


@pytest.mark.parametrize(("model", "precision", "memory", "method"), CELLS)
def test_a_shipped_config_checks_itself_and_trains(
    model, precision, memory, method, models, tmp_path
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(shipped.PROMPTS))
    cell = shipped.Cell(model, precision, memory)
    words = shipped.words(cell, method, small_models.save(model, models), prompts)
    quick = ["data.eval=null", "sampler.steps=3", "guard.check_rewards=false", "trackers=[]"]
    cfg = load_config(None, [*words, *quick, f"output={tmp_path / 'run'}", "iterations=1"])
    assert cfg.model.self_check
    trainer = flowrl.Trainer(cfg)
    metrics = next(iter(trainer)).metrics
    assert metrics["policy/rows"] and not metrics["policy/skipped"]
    assert 0 < metrics["policy/grad_norm"] < math.inf
    trainer.save()
    counted = shipped.touched(trainer.parts.source.policy, tmp_path / "run")
    assert ("quantised" in counted) == (memory in ("24gb", "40gb"))
    assert ("eight_bit" in counted) == (memory == "24gb")
    frames = 2 if "num_frames" in small_models.call_of(model) else 1
    assert (counted["tiles"] > frames) == (memory == "24gb")


@long.mark
@pytest.mark.parametrize("number", range(8))
def test_a_cell_of_the_first_pass_runs_to_its_end(number, models, tmp_path):
    cell = shipped.cells()[number]
    source = small_models.save(cell.model, models)
    result = shipped.attempt(cell, shipped.FULL[number % 2], source, tmp_path)
    assert result["result"] == "passed", result


# --- what is counted and printed

PASSED = {"cell": "sdxl/bf16/none", "method": "flow_grpo", "result": "passed", "seconds": 1.0}


def result(**changes):
    return PASSED | {"touched": {"whole": 64, "tiles": 1}} | changes


def test_failures_are_what_failed_what_is_missing_and_presets_without_effect():
    cell = shipped.Cell("sdxl", "bf16", "none")
    tried = [result(method=method) for method in shipped.methods_of(cell)]
    assert shipped.failures(tried, [cell]) == []
    assert shipped.failures(tried[1:], [cell]) == ["sdxl/bf16/none flow_grpo is missing"]
    broken = [tried[0] | {"result": "failed", "said": "no"}, *tried[1:]]
    assert shipped.failures(broken, [cell]) == ["sdxl/bf16/none flow_grpo"]
    plain = result(cell="sdxl/bf16/24gb")
    assert shipped.failures([*tried, plain], [cell]) == [
        "sdxl: memory=24gb left quantised at 0",
        "sdxl: memory=24gb left eight_bit at 0",
        "sdxl: memory=24gb decoded no tiles",
    ]
    acts = result(cell="sdxl/bf16/24gb", touched={"quantised": 8, "eight_bit": 4096, "tiles": 9})
    assert shipped.failures([*tried, acts], [cell]) == []


def test_the_table_has_a_line_a_model_and_the_sentence_of_each_refusal():
    known = next(iter(shipped.REFUSED))
    refused = {"result": "refused", "stage": "train", "said": f"{known} x", "method": "texforce"}
    eight = {"whole": 8, "quantised": 56, "eight_bit": 4096, "tiles": 9}
    page = shipped.page([result(), result(**refused), result(cell="sdxl/bf16/24gb", touched=eight)])
    assert "| sdxl | 2 | 1 | 56 of 64, - | 4,096 | 1, with tiles 9 |" in page
    assert page.count("\n| ") == len(small_models.names())
    assert f'* 1 times: "{known} x" ({shipped.REFUSED[known]})' in page


def test_a_refusal_counts_only_with_a_known_sentence_and_a_failure_stops_nothing(tmp_path):
    output, cell = tmp_path / "out.jsonl", shipped.Cell("shapes-sd3", "bf16", "24gb")
    none = tmp_path / "models"
    (none / "shapes-sd3").mkdir(parents=True)
    (none / "shapes-sd3" / "model_index.json").write_text("{}")  # no model: whatever loads it fails
    shipped.in_cell(cell, ["texforce", "draft", "nft"], none, output)
    found = {r["method"]: r for r in shipped.read(output)}
    assert [found[m]["result"] for m in ("texforce", "draft", "nft")] == [
        "refused",
        "refused",
        "failed",
    ]
    assert found["nft"]["stage"] == "train" and "shapes-sd3" in found["nft"]["said"]
    with output.open("a") as lines:  # a later line of the same method replaces an earlier one
        lines.write(json.dumps(found["nft"] | {"result": "passed"}) + "\n")
    assert {r["method"]: r["result"] for r in shipped.read(output)}["nft"] == "passed"


# --- rounding


def test_coefficients_of_another_shape_or_value_are_far():
    distance = rounding.distance
    one = torch.tensor([1.0, 4.0])
    assert distance(one, one) == 0.0
    assert distance(one + torch.tensor([0.0, 4e-6]), one) == pytest.approx(1e-6, rel=0.2)
    assert distance(one[:1], one) == distance(None, one) == math.inf


@long.mark
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["shapes-sd3", "sdxl"])
def test_guidance_and_schedule_are_found_the_same_in_every_type(name, kind, models):
    measured = rounding.measure(name, models, kind)
    shipped = load_config(None, [f"model={name}", *NAMED]).model.pipeline["guidance_scale"]
    weights = measured.coefficients["guidance 0"]
    assert (weights - torch.tensor([1 - shipped, shipped])).abs().max() < 1e-6
    ours, own = measured.velocity
    assert ours <= own + rounding.UNITS
