"""Pretraining of the masked generator of shapes, a few steps of it: interrupted and not, what a
batch hides, and what export writes."""

import json
import math

import diffusers
import pytest
import stages
import torch
import train_shapes_masked as train
import train_stickers

SIZES = ["--device=cpu", "--threads=1", "--save=1", "--scenes=6", "--steps=2", "--vq-steps=2"]
STAGES = ("vq", "masked")


def run(stage, work):
    words = ["--batch=2", "--vq-batch=2", f"--work={work}", f"--out={work / 'exported'}"]
    train.main([stage, *SIZES, *words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of both stages, uninterrupted; `first` has what each saved after its first step."""
    folder = tmp_path_factory.mktemp("whole")
    with stages.first_saved(folder, train_stickers, train):
        for stage in STAGES:
            run(stage, folder)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_goes_on_where_it_was_killed(whole, tmp_path, stage):
    parts = ("model", "ema") if stage == "masked" else ("model",)
    stages.assert_goes_on(whole, tmp_path, stage, run, parts)


def test_it_is_exported_as_it_ended(whole):
    run("export", whole)
    pipe = diffusers.DiffusionPipeline.from_pretrained(whole / "exported")
    ended = torch.load(whole / "masked.pt")["ema"]["transformer.project_to_hidden.weight"]
    assert type(pipe).__name__ == "AmusedPipeline"
    assert torch.equal(pipe.transformer.project_to_hidden.weight.half(), ended.half())
    assert pipe.scheduler.config.mask_token_id == train.CODES == 256


def test_a_batch_hides_tokens_by_the_cosine_schedule_and_asks_for_these_alone(whole):
    made = train.arguments().parse_args(["masked", *SIZES, "--batch=400", f"--work={whole}"])
    data = train.tokens(made)
    tok = train.CLIPTokenizer.from_pretrained(train.WEIGHTS / "tokenizer")
    batches = train.TokenBatches(made, tok, train.reading(), data["z"], data["text"])
    x, u, target, text, labels = batches(0)
    hidden = x == train.CODES
    assert torch.equal(hidden, target != train.UNSEEN) and bool(hidden.flatten(1).any(1).all())
    share = hidden.flatten(1).float().mean(1)
    torch.testing.assert_close(share, torch.cos(u * math.pi / 2), atol=1 / 64, rtol=0)
    whole_grids = torch.where(hidden, target, x).flatten(1)
    known = data["z"].long().flatten(1)
    assert all((grid == known).all(1).any() for grid in whole_grids)
    empty = (text == batches.empty).all(1)
    assert torch.equal(empty, (labels == train.UNSEEN).all(1)) and 15 < int(empty.sum()) < 70


def test_the_autoencoder_starts_with_the_layers_of_the_vae():
    """Their input and output are the same pixels, in [0, 1] here and in [-1, 1] there."""
    known, own = train.vae(), train.like_the_vae(train.vq())
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = known.encoder.conv_in(2 * x - 1), own.encoder.conv_in(x)
        inner = (..., slice(1, -1), slice(1, -1))  # at the border zeros are other pixels
        torch.testing.assert_close(one[inner], other[inner], atol=1e-5, rtol=0)
        h = torch.rand(1, 32, 16, 16, generator=torch.Generator().manual_seed(1))
        for level in range(3):
            there, here = known.decoder.up_blocks[level](h), own.decoder.up_blocks[level + 1](h)
            torch.testing.assert_close(there, here)
            h = there
        one, other = known.decoder.conv_out(h), own.decoder.conv_out(h)
        torch.testing.assert_close((one + 1) / 2, other, atol=1e-5, rtol=0)


def test_a_code_without_use_moves_to_what_is_described_worst():
    torch.manual_seed(0)
    model = train.Quantised()
    model.idle[:] = train.IDLE - 1
    before = model.vq.quantize.embedding.weight.detach().clone()
    model(torch.rand(2, 3, 64, 64), torch.Generator().manual_seed(0))
    used = (before == model.vq.quantize.embedding.weight).all(1)
    assert 0 < int(used.sum()) < train.CODES and not bool(model.idle.any())


def test_lost_checkpoints_are_made_from_what_was_exported(whole, tmp_path):
    """The weights, their steps and what is known of them; optimizers start anew."""
    run("export", whole)
    words = [*SIZES, "--batch=2", f"--work={tmp_path}", f"--out={whole / 'exported'}"]
    train.main(["restore", *words])
    for stage, part in (("vq", "model"), ("masked", "ema")):
        one, other = (torch.load(folder / f"{stage}.pt") for folder in (whole, tmp_path))
        assert one["step"] == other["step"] == 2 and "optimizer" not in other
        known, made = one[part], other[part]
        assert known.keys() == made.keys()
        same = [name for name in known if name != "idle"]  # how long codes have had no use
        assert all(torch.equal(known[name].half(), made[name].half()) for name in same)
    train.main(["masked", *words, "--steps=3"])
    assert torch.load(tmp_path / "masked.pt")["step"] == 3
    train.main(["export", *words, "--steps=3"])
    said = json.loads((whole / "exported" / "provenance.json").read_text())
    assert said["steps"] == 3 and said["history"][0].startswith("Until step 2 the settings were")
