"""Pretraining of the UNets of shapes, a few steps of it: interrupted and not, and what export
writes."""

import diffusers
import pytest
import stages
import torch
import train_shapes_sd as train
import train_stickers

SIZES = ["--device=cpu", "--threads=1", "--save=1", "--scenes=6", "--pairs=6", "--steps=2"]


def run(stage, work):
    train.main([stage, *SIZES, "--batch=2", f"--work={work}", f"--out={work / stage}"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of both stages, uninterrupted; `first` has what each saved after its first step."""
    folder = tmp_path_factory.mktemp("whole")
    with stages.first_saved(folder, train_stickers):
        for stage in ("sd", "edit"):
            run(stage, folder)
    return folder


@pytest.mark.parametrize("stage", ["sd", "edit"])
def test_a_stage_goes_on_where_it_was_killed(whole, tmp_path, stage):
    stages.assert_goes_on(whole, tmp_path, stage, run, ("model", "ema"))


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("sd", "StableDiffusionPipeline"), ("edit", "StableDiffusionInstructPix2PixPipeline")],
)
def test_a_stage_is_exported_as_it_ended(whole, stage, kind):
    run(f"export-{stage}", whole)
    assert "_name_or_path" not in (whole / f"export-{stage}/vae/config.json").read_text()
    pipe = diffusers.DiffusionPipeline.from_pretrained(whole / f"export-{stage}")
    ended = torch.load(whole / f"{stage}.pt")["ema"]["unet.conv_in.weight"].half()
    assert type(pipe).__name__ == kind and torch.equal(pipe.unet.conv_in.weight.half(), ended)


def test_the_text_encoder_reads_the_worlds_prompts_as_that_of_shapes_sd3():
    """Its new tokenizer has one token a word, and known words keep their rows."""
    tok = train.tokenizer()
    old = train.CLIPTokenizer.from_pretrained(train.WEIGHTS / "tokenizer")
    before = train.CLIPTextModel.from_pretrained(train.WEIGHTS / "text_encoder")
    pad = {"padding": "max_length", "max_length": 12, "return_tensors": "pt"}
    text = ["a red circle left of a blue square", "a circle"]
    assert len(tok("replace the red circle with a blue square").input_ids) == 8 + 2
    one = before.float()(old(text, **pad).input_ids).last_hidden_state
    other = train.text_encoder(tok)(tok(text, **pad).input_ids).last_hidden_state
    assert torch.equal(one, other)
