"""Files of configs/model against diffusers' classes: arguments of the pipeline's call, targets of
LoRA, and the number of weights, all on the meta device."""

import inspect
import json
import re

import diffusers
import long
import pytest
import torch
import yaml
from pages import ROOT
from thin import fewer

from flowrl.cli.list import _said as said
from flowrl.config.compose import config_folder, is_embedded, options
from flowrl.config.load import composed
from flowrl.config.run_rules import DISTILLED
from flowrl.policy.load import call_options
from flowrl.runtime import hub
from flowrl.runtime.log import quiet

NAMES = [name for name in options("model") if not is_embedded(name)]
# models without a file in configs/architecture, whose calls a budget does not know: the pipeline,
# and the denoiser's class, with numbers that are not its defaults
OTHERS = {
    "hunyuanvideo-1.5": ("HunyuanVideo15Pipeline", "HunyuanVideo15Transformer3DModel", {}),
    "ltx-2": ("LTX2Pipeline", "LTX2VideoTransformer3DModel", {}),
}
# billions of weights of the denoiser, as their authors say them
KNOWN = {
    "sd1.5": 0.86,  # Stable Diffusion's model card
    "sdxl": 2.6,  # arXiv:2307.01952, table 1
    "sdxl-turbo": 2.6,
    "sd3.5-medium": 2.5,  # Stability's announcement
    "sd3.5-large": 8.1,  # Stability's announcement
    "sd3.5-large-turbo": 8.1,
    "flux.1-dev": 12,  # model card
    "flux.1-kontext-dev": 12,
    "flux.2-klein-4b": 4,  # model card, as all of its family
    "flux.2-klein-base-4b": 4,
    "z-image": 6.15,  # arXiv:2511.22699
    "z-image-turbo": 6.15,
    "qwen-image": 20,  # arXiv:2508.02324
    "qwen-image-edit-2511": 20,
    "sana-1.6b": 1.604,  # arXiv:2410.10629, table 1
    "wan2.1-1.3b": 1.3,  # arXiv:2503.20314
    "wan2.1-14b": 14,
    "wan2.2-ti2v-5b": 5,  # model card
    "hunyuanvideo-1.5": 8.3,  # arXiv:2511.18870
    "cosmos-predict2.5-2b": 2,  # model card
    "ltx-2": 19,  # arXiv:2601.03233: 14 of the video and 5 of the sound
}
# whose weights are counted in each run of the tests
QUICK = {"sana-1.6b", "z-image", "flux.2-klein-4b", "sd3.5-large", "wan2.2-ti2v-5b", "sdxl-turbo"}


def parts(name):
    """The pipeline's class, the denoiser's class and its numbers."""
    file = config_folder() / "architecture" / f"{name}.yaml"
    if name in OTHERS:
        assert not file.is_file()
        return OTHERS[name]
    tree = yaml.safe_load(file.read_text())
    source = composed(None, [f"model={name}"])[0]["model"]["source"]
    assert tree["source"] == hub.split(source)[0]
    numbers = tree.get("unet") or tree["transformer"]
    return tree["pipeline"], numbers["_class_name"], numbers


def network(name, less):
    """The denoiser on the meta device; with less, in few layers."""
    _, cls, numbers = parts(name)
    plain = {key: value for key, value in numbers.items() if not key.startswith("_")}
    made = getattr(diffusers, cls)
    defaults = {k: p.default for k, p in inspect.signature(made.__init__).parameters.items()}
    counted = {key: defaults[key] for key in ("num_layers",) if key in defaults}
    small = fewer({**counted, **plain}) if less else {}
    with quiet(), torch.device("meta"):
        return made.from_config({**plain, **small})


def model_of(name):
    return composed(None, [f"model={name}"])[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_arguments_and_layers_of_its_classes(name):
    tree = model_of(name)
    call = inspect.signature(getattr(diffusers, parts(name)[0]).__call__).parameters
    given = call_options(tree["model"]["pipeline"])
    assert {*given} <= {*call}
    if "max_area" in call:  # the class takes the ratio alone from height and width
        assert given["max_area"] == given["height"] * given["width"]
    linear = [
        key for key, m in network(name, less=True).named_modules() if hasattr(m, "in_features")
    ]
    for target in tree["train"]["lora"]["targets"]:
        assert any(key.endswith(f".{target}") for key in linear), target


@pytest.mark.parametrize("name", long.but(NAMES, {*NAMES} - QUICK))
def test_the_number_of_weights_is_the_known_one(name):
    numel = sum(w.numel() for w in network(name, less=False).state_dict().values()) / 1e9
    listed = float(re.match(r"(\d+\.\d) billion weights", said("models", name))[1])
    assert listed == round(numel, 1)
    # authors round whole billions, and Wan's 1.4 are called 1.3
    exact = KNOWN[name] % 1 and name != "wan2.1-1.3b"
    assert numel == pytest.approx(KNOWN[name], rel=0.02 if exact else 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_distilled_model_takes_few_steps_without_guidance(name):
    tree = model_of(name)
    found = any(word in tree["model"]["source"].lower() for word in DISTILLED)
    assert found == ("distilled to" in said("models", name))
    if found:
        steps = tree["sampler"]["steps"]
        assert steps == tree["eval"]["steps"] <= 8 and f"to {steps} steps" in said("models", name)
        assert tree["model"]["pipeline"]["guidance_scale"] <= 1
        assert tree["eval"].get("baseline_guidance") is None


def test_the_table_of_named_models_is_that_of_the_files():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.search(r"## Named models\n.*?\n\|---.*?\n(.*?)\n\n", page, re.S)[1].splitlines()
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in found] == NAMES
    lines = (ROOT / "docs/results/pipelines.jsonl").read_text(encoding="utf-8").splitlines()
    passing = {r["name"]: r["pipeline"] for r in map(json.loads, lines) if r["failed"] is None}
    for name, source, weights, distilled, case, budget, recipe, revision in found:
        first = said("models", name)
        assert source == f"`{model_of(name)['model']['source'].partition('@')[0]}`"
        assert first.startswith(f"{weights} billion weights")
        steps = re.search(r"distilled to (\d steps)", first)
        kind = steps[1] if steps else "guidance" if "guidance-distilled" in first else ""
        assert distilled == kind
        assert passing[case] == parts(name)[0]
        assert budget == ("no" if name in OTHERS else "yes")
        assert recipe == ("yes" if name in options("experiment") else "no")
        pinned = hub.split(model_of(name)["model"]["source"])[1]
        commit = pinned and hub.COMMIT.fullmatch(pinned)
        assert revision == (f"`{pinned[:7] if commit else pinned}`" if pinned else "newest")
