"""What is wrong with a model's folder is said with the file's name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import cases

import flowrl
from flowrl import shapes
from flowrl.config.compose import section_of
from flowrl.policy.folder import first_sentence

WHOLE = Path(shapes.__file__).parent / "weights"
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "model"
    cases()["sd15"].make().save_pretrained(folder)
    return folder


@pytest.fixture
def model(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


def refused(model, match):
    with pytest.raises(ValueError, match=match):
        flowrl.load_policy(str(model))


def test_a_whole_folder_is_loaded(model):
    assert flowrl.load_policy(str(model)).pipe.unet is not None


def test_a_part_that_is_not_there(model):
    shutil.rmtree(model / "vae")
    refused(model, f"its vae is missing: model_index.json names it, and there is no {model}/vae")


def test_a_tokenizer_without_its_config(model):
    (model / "tokenizer/tokenizer_config.json").unlink()
    refused(model, "its tokenizer has no tokenizer_config.json, without which texts get other")


def test_a_tokenizer_without_its_words(tmp_path):
    """Transformers makes some classes without them, and others it refuses."""
    model = shutil.copytree(WHOLE, tmp_path / "model")
    (model / "tokenizer/tokenizer.json").unlink()
    refused(model, "the tokenizer of this StableDiffusion3Pipeline knows no words|cannot be loaded")


def test_a_live_pipeline_without_a_tokenizer():
    pipe = cases()["sd15"].make()
    pipe.tokenizer = None
    with pytest.raises(ValueError, match="has a text_encoder and no tokenizer; give it the"):
        flowrl.load_policy(pipe)


def test_a_network_without_its_config_or_its_weights(model):
    (model / WEIGHTS).unlink()
    refused(model, f"cannot be loaded: .*{model}/unet")
    (model / "vae/config.json").write_text("{")
    (model / "unet/config.json").unlink()
    refused(model, f"cannot be loaded: .*{model}/(unet|vae)")


def test_weights_that_were_cut_off(model):
    file = model / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    refused(model, f"cannot be loaded: {file} was cut off or changed .*; fetch it again")


def test_weights_that_git_lfs_did_not_fetch(model):
    file = model / WEIGHTS
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(model, f"{file} is a pointer of git-lfs; run git lfs pull")


def test_a_shard_that_is_missing(model):
    listed = model / f"{WEIGHTS}.index.json"
    listed.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "gone.safetensors"}}))
    (model / WEIGHTS).unlink()
    refused(model, "cannot be loaded: .*gone.safetensors")


def test_weights_that_the_files_lack(model):
    file = model / WEIGHTS
    held = load_file(file)
    lost = [name for name in held if "conv_in" in name]
    save_file({k: v for k, v in held.items() if k not in lost}, file, {"format": "pt"})
    refused(model, f"the files of its unet lack {len(lost)} weights, conv_in")


@pytest.mark.parametrize("index", ["{", "[]", '{"vae": ["diffusers", "AutoencoderKL"]}'])
def test_an_index_that_names_no_pipeline(model, index):
    (model / "model_index.json").write_text(index)
    refused(model, "model_index.json|cannot be loaded")


def test_parts_that_no_package_has(model):
    file = model / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"unet": ["diffusers", "UNet9"], "vae": ["nobody", "V"]}))
    refused(model, r"is made of diffusers.UNet9 \(unet\), nobody.V \(vae\), which diffusers 0")


def test_sources_that_are_no_models_folder(model, tmp_path):
    refused(model / "unet", f'without model_index.json.*; it is a part of "{model}"')
    refused(tmp_path, "is a folder without model_index.json, which save_pretrained of a pipeline")
    single = tmp_path / "sd.safetensors"
    single.write_bytes(b"")
    refused(single, "is a single file, and a diffusers folder is needed; write one with diffusers")
    refused("./nowhere", 'model "./nowhere" does not exist; give a folder, a hub id or a name')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text("")  # a run
    refused(tmp_path / "other", f'other" does not exist; {tmp_path} has mine; give a folder')
    refused("nobody/nothing", "cannot be fetched: HF_HUB_OFFLINE is set, and the cache does not")
    refused("nobody/nothing@a/branch", "cannot be fetched: HF_HUB_OFFLINE is set, and the cache")


def test_a_folder_of_the_present_place_is_a_source(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert section_of("model", "model") == {"source": "model"}
    assert section_of("model", "modle") == {}


def test_what_a_library_says_is_cut_at_its_first_sentence():
    assert first_sentence(OSError("It is\ngone. Try again.")) == "It is gone"
    assert first_sentence(KeyError()) == "KeyError"
    assert len(first_sentence("x" * 999)) == 300


def test_out_of_memory_stays_out_of_memory(model, monkeypatch):
    def load(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", load)
    with pytest.raises(torch.OutOfMemoryError):
        flowrl.load_policy(str(model))


def test_a_folder_of_a_variant_alone_is_read_like_one_without(tmp_path):
    pipe = cases()["sd15"].make()
    pipe.save_pretrained(tmp_path / "plain")
    pipe.save_pretrained(tmp_path / "fp16", variant="fp16")
    for name in ("plain", "fp16"):
        read = flowrl.load_policy(tmp_path / name, height=16, width=16).pipe
        for a, b in zip(read.unet.parameters(), pipe.unet.parameters(), strict=True):
            assert torch.equal(a, b)
