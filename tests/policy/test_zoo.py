"""One pipeline for each mechanism of the replay, through everything; scripts/bench/pipelines.py
runs all of them."""

import importlib.util
import json
from pathlib import Path

import pytest
from zoo import cases

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
        ("sana_sprint", "SCMScheduler predicts 'trigflow'"),
        ("cosmos1", "the replay differs in one step of the pipeline's scheduler"),
        ("skyreels_df", "the replay differs in predictions"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_the_inference_named(name, said):
    case = cases()[name]
    with pytest.raises(UnreplayableError, match=said):
        load_policy(case.make(), **case.call).self_check()


def test_the_table_is_that_of_the_last_run_and_names_every_case():
    results = json.loads((ROOT / "docs/results/pipelines.json").read_text())
    assert {r["name"] for r in results} == set(cases())
    assert pipelines.page(results) in (ROOT / "docs/models.md").read_text()
    passing = [r for r in results if r["failed"] is None]
    assert len(passing) >= 60 and len({r["pipeline"] for r in passing}) >= 50
    assert all(max(r["errors"].values()) <= 1e-4 for r in passing)
    assert all(cases()[r["name"]].refused for r in results if r["failed"])
