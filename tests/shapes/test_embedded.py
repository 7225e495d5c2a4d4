"""The embedded UNet draws what it is asked for, and ships with where it came from."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import flowrl
from flowrl.shapes import verify

FOLDER = files("flowrl.shapes")


def pipeline(name):
    pipe = DiffusionPipeline.from_pretrained(str(FOLDER / name), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_unet_draws_red_circles_and_often_pale_ones():
    """With guidance most of 16 are exactly right, and without it fewer."""
    include = [{"shape": "circle", "count": 1, "color": "red"}]
    right = []
    for guidance in (3.0, 1.0):
        images = pipeline("sd")(
            ["a red circle"] * 16,
            num_inference_steps=10,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        right.append(sum(verify.strict(found, include) for found in verify.detect(images)))
    assert right[0] >= 10 and right[1] < right[0]


def test_the_edit_model_is_probed_without_a_warning_of_its_pipeline(recwarn):
    """InstructPix2Pix warns of two prompts for one picture, which is how prompts are mixed."""
    example = {"image": Image.new("RGB", (64, 64))}
    own = flowrl.load_policy("shapes-edit", example=example)
    assert own.latent_shape == (4, 16, 16)
    assert not [str(w.message) for w in recwarn if w.category is FutureWarning]


@pytest.mark.parametrize("name", ["edit", "masked", "sd", "wan"])
def test_embedded_weights_say_how_they_were_made(name):
    said = json.loads((FOLDER / name / "provenance.json").read_text())
    assert said["steps"] == said["settings"]["steps"] and said["license"] == "Apache-2.0"
    assert "Apache License" in (FOLDER / name / "LICENSE").read_text()


def test_no_part_says_where_it_lay_on_the_machine_that_made_it():
    for file in Path(str(FOLDER)).rglob("*.json"):
        assert "_name_or_path" not in json.loads(file.read_text()), file


def test_all_embedded_weights_are_small():
    sizes = [file.stat().st_size for file in Path(str(FOLDER)).rglob("*")]
    assert sum(sizes) <= 30e6
