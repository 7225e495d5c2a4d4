"""One pipeline for each mechanism of the replay, through everything; scripts/bench/pipelines.py
runs all of them."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import diffusers
import pytest
from zoo import cases
from zoo.exported import VERSION, exported, unnamed, untried
from zoo.second import REFUSED

from flowrl import load_policy
from flowrl.policy.replay.errors import UnreplayableError

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("pipelines", ROOT / "scripts/bench/pipelines.py")
pipelines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pipelines)

MECHANISMS = {
    "an overlong prompt fixes the length of texts": "qwenimage",
    "one prompt at a time, a picture each": "flux_kontext",
    "noise in conditions that follows the row": "flux_fill",
    "a loop that starts late, from a picture": "flux_img2img",
    "latents changed after the step": "sd15_inpaint",
    "latents as lists, one a row": "z_image",
    "rising sigmas, and a network that mixes rows": "omnigen",
    "loop-shaped latents that latents= does not take": "flux2_klein",
    "two latents in a state": "ltx2",
    "learned variance": "pixart_alpha",
    "a scheduler that limits the clean latents": "cogvideox_dynamic",
    "two schedulers' times": "cogview4",
    "several calls an iteration, EDM": "cosmos2_t2i",
    "no prompt, guidance by frame, its own tail": "svd",
    "a tail that edits latents in place": "kandinsky5_i2v",
    "two networks, a first frame": "wan22_i2v",
    "masks and reference pictures": "wan_vace_reference",
    "types of schedulers compared": "bria",
    "a non-linear tail": "hyvideo15",
    "networks beside the denoiser in the loop": "sd15_controlnet",
    "angles for noise levels, clean latents that are decoded": "sana_sprint",
    "masked latents in another order": "flux_inpaint",
    "masked latents beside others": "flux_kontext_inpaint",
    "texts of two lengths before the latents": "qwenimage21",
}


@pytest.mark.parametrize("name", MECHANISMS.values(), ids=MECHANISMS)
def test_a_pipeline_passes_everything(name):
    result = pipelines.attempt(name)
    assert result["failed"] is None, result["why"]
    assert max(result["errors"].values()) <= 1e-4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hyimage_meanflow", "argument timestep_r changes from step to step"),
        ("sd15_pag", "changes the attention of its unet for its loop"),
        ("cosmos1", "the replay differs in one step of the pipeline's scheduler"),
        ("skyreels_df", "the replay differs in predictions"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_the_inference_named(name, said):
    case = cases()[name]
    with pytest.raises(UnreplayableError, match=said):
        load_policy(case.make(), **case.call).self_check()


def test_the_table_is_that_of_the_last_run_and_names_every_case():
    results = pipelines.read(pipelines.KEPT)
    assert {r["name"] for r in results} == set(cases())
    assert pipelines.page(results) in (ROOT / "docs/models.md").read_text()
    passing = [r for r in results if r["failed"] is None]
    assert len(passing) >= 125 and len({r["pipeline"] for r in passing}) >= 95
    assert all(max(r["errors"].values()) <= 1e-4 for r in passing)
    assert all(cases()[r["name"]].refused for r in results if r["failed"])


def test_each_reason_says_what_to_do_and_names_classes_that_pass():
    results = pipelines.read(pipelines.KEPT)
    passing = {r["pipeline"] for r in results if r["failed"] is None}
    reasons = [case.refused for case in cases().values() if case.refused]
    for reason in [*reasons, *untried(), *REFUSED.values()]:
        _, semicolon, advice = reason.partition("; ")
        assert semicolon, reason
        assert {*re.findall(r"\w+(?:Pipeline|Blocks)\b", advice)} <= passing, reason


def test_every_class_that_diffusers_exports_is_in_the_table_or_has_a_reason():
    """A newer diffusers may have more: they are named, which is no failure."""
    results = pipelines.read(pipelines.KEPT)
    tried = {r["pipeline"] for r in results}
    left_out = [name for names in untried().values() for name in names]
    assert len(left_out) == len({*left_out}) and not tried & {*left_out}
    if diffusers.__version__ != VERSION:
        pytest.skip(unnamed(tried) or f"diffusers {diffusers.__version__} has no new class")
    assert unnamed(tried) == "" and {*left_out} <= exported()
    assert pipelines.untried_page(results) in (ROOT / "docs/models.md").read_text()


def test_a_new_class_of_diffusers_is_named_in_a_sentence(monkeypatch):
    tried = exported() - {name for names in untried().values() for name in names}
    assert unnamed(tried) == ""
    monkeypatch.setattr(diffusers, "NewPipeline", object, raising=False)
    monkeypatch.setattr(diffusers, "NewPipelineOutput", object, raising=False)
    assert unnamed(tried).startswith(
        f"diffusers {diffusers.__version__} has NewPipeline, and docs/"
    )


def test_cases_that_pass_do_with_other_arguments_too_but_for_those_named():
    results = pipelines.read(pipelines.KEPT_SECOND)
    assert sorted(r["name"] for r in results) == sorted(pipelines.second())
    assert pipelines.second_page(results) in (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert {r["name"] for r in results if r["failed"]} == REFUSED.keys()


@pytest.mark.parametrize("name", ["cosmos25/wide", "skyreels/still"])
def test_a_pipeline_passes_with_other_arguments(name):
    result = pipelines.attempt(name)
    assert result["failed"] is None, result["why"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sd3", "sd4"], "unknown sd4; there are "),
        (["--page", "LEFT"], " is of other cases, see allegro; run all of them first"),
        (["--page", "none.jsonl"], "none.jsonl is not a file that a run left"),
        (["--resume", "--output", "none.jsonl"], "none.jsonl is not a file that a run left"),
    ],
)
def test_words_that_the_script_cannot_follow_are_refused(
    words, said, tmp_path, monkeypatch, capsys
):
    left = tmp_path / "left.jsonl"
    left.write_text(json.dumps({"name": "sd3"}) + "\n")
    words = [word.replace("LEFT", str(left)) for word in words]
    monkeypatch.setattr(sys, "argv", ["pipelines.py", *words])
    with pytest.raises(SystemExit) as end:
        pipelines.main()
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_run_that_goes_on_tries_the_cases_that_are_left_and_counts_all(tmp_path, monkeypatch):
    left, asked = tmp_path / "left.jsonl", []
    result = {"pipeline": "P", "failed": None, "why": None, "seconds": 1.0}
    left.write_text(json.dumps({**result, "name": "sd3"}) + "\n")

    def run(names, what, workers, output):
        asked.extend(names)
        yield from ({**result, "name": name, "failed": "load", "why": "no"} for name in names)

    monkeypatch.setattr(pipelines, "run", run)
    words = ["sd3", "sd15_pag", "--resume", "--output", str(left)]
    monkeypatch.setattr(sys, "argv", ["pipelines.py", *words])
    assert pipelines.main() == 0 and asked == ["sd15_pag"], "it is known not to pass"
    monkeypatch.setattr(sys, "argv", ["pipelines.py", "flux", *words])
    assert pipelines.main() == 1 and left.read_text().count("sd3") == 1
