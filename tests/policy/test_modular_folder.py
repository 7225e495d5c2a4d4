"""What is wrong with a modular pipeline's folder is said in a sentence; a hub id goes its way."""

import json
import shutil

import diffusers
import pytest
import torch
from huggingface_hub import constants
from zoo import cases

from flowrl import load_policy
from flowrl.policy.modular import as_pipeline

CASE = cases()["modular_sd3"]
INDEX = "modular_model_index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3") / "model"
    as_pipeline(CASE.make()).save_pretrained(folder)
    return folder


@pytest.fixture
def model(written, tmp_path, monkeypatch):
    """A copy of the folder, seen from a place that has a whole model of its own."""
    monkeypatch.chdir(written)
    return shutil.copytree(written, tmp_path / "model")


def refused(model, match):
    with pytest.raises(ValueError, match=match):
        load_policy(model, **CASE.call)


def points_to(model, place, part="transformer"):
    """Write another place of a part into the index."""
    index = json.loads((model / INDEX).read_text())
    index[part][2]["pretrained_model_name_or_path"] = place
    (model / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("part", ["transformer", "tokenizer"])
@pytest.mark.parametrize("place", [".", "/nowhere/model"])
def test_a_part_that_is_not_there(model, part, place):
    """ "." is the index's folder, never the present one."""
    points_to(model, place, part)
    shutil.rmtree(model / part)
    refused(model, f"its {part} is missing: {INDEX} names it, and there is no {model}/{part}; fetc")


def test_a_part_that_lies_elsewhere(model, tmp_path):
    shutil.move(model / "transformer", tmp_path / "other/transformer")
    points_to(model, str(tmp_path / "other"))
    assert load_policy(model, **CASE.call).pipe.transformer is not None
    points_to(model, "nobody/nothing")
    refused(model, "its transformer, nobody/nothing/transformer, should be fetched again: nobody")


@pytest.mark.parametrize(
    "file", [INDEX, "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"]
)
def test_a_file_that_was_cut_off(model, file):
    path = model / file
    path.write_bytes(path.read_bytes()[:-9])
    refused(model, f"cannot be loaded: {path} was cut off or changed .*; fetch it again")


def test_a_part_without_one_of_its_files(model):
    (model / "tokenizer/tokenizer.json").unlink()
    refused(model, f"its tokenizer, {model}/tokenizer, should be fetched again: ")


def test_an_index_that_names_no_pipeline_or_unknown_blocks(model):
    index = json.loads((model / INDEX).read_text())
    (model / INDEX).write_text(json.dumps(index | {"_blocks_class_name": "OwnBlocks"}))
    refused(
        model, "is made of OwnBlocks, which diffusers 0.* does not have, .*; install a newer di"
    )
    (model / INDEX).write_text("[]")
    refused(model, f'its {INDEX} names no pipeline, "_class_name"')


def test_a_guider_is_not_written_so_that_the_folder_has_that_of_the_blocks(tmp_path):
    pipe = CASE.make()
    pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0))
    as_pipeline(pipe).save_pretrained(tmp_path)
    assert "guider" not in (tmp_path / INDEX).read_text()
    assert diffusers.ModularPipeline.from_pretrained(tmp_path).guider.guidance_scale == 7.0


def test_out_of_memory_stays_out_of_memory(model, monkeypatch):
    def load(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("diffusers.SD3Transformer2DModel.from_pretrained", load)
    with pytest.raises(torch.OutOfMemoryError):
        load_policy(model)


def test_a_hub_id_goes_the_way_of_a_folder(model, tmp_path, monkeypatch):
    """Parts beside the index are read in the revision that is asked for, here no newest one."""
    repository = tmp_path / "models--owner--repo"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/branch").write_text(COMMIT)
    shutil.copytree(model, repository / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder, hub = (load_policy(name, **CASE.call) for name in (model, "owner/repo@branch"))
    assert hub.replay.pipeline == folder.replay.pipeline == "StableDiffusion3AutoBlocks"
    for part in ("transformer", "vae", "text_encoder"):
        own = hub.pipe.components[part].state_dict()
        for key, weight in folder.pipe.components[part].state_dict().items():
            assert torch.equal(own[key], weight), f"{part} {key}"
    with pytest.raises(ValueError, match="cannot be fetched: HF_HUB_OFFLINE is set, and the cache"):
        load_policy("owner/repo", **CASE.call)
