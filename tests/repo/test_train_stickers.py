"""Pretraining of the models of stickers, a few steps of it: all stages, interrupted and not, and
what export writes."""

import json

import diffusers
import pytest
import torch
import train_stickers as train

SIZES = {"vae-steps": 4, "vae-batch": 2, "scenes": 130, "steps": 4, "batch": 4, "save": 2}


class Killed(Exception):
    pass


def run(stage, work):
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    where = [f"--work={work}", f"--out={work / 'out'}"]
    train.main([stage, *where, "--device=cpu", "--threads=1", *sizes])


def killed_at_the_first_save(stage, work, monkeypatch):
    save = train.save

    def once(*args, **parts):
        save(*args, **parts)
        raise Killed

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(train, "save", once)
        run(stage, work)


def test_every_stage_goes_on_where_it_was_killed_and_is_exported_as_it_ended(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for stage, averaged in (("vae", "model"), ("sd", "ema")):
        run(stage, whole)
        killed_at_the_first_save(stage, parts, monkeypatch)
        assert torch.load(parts / f"{stage}.pt")["step"] == 2
        run(stage, parts)
        one, other = (torch.load(work / f"{stage}.pt") for work in (whole, parts))
        assert one["step"] == other["step"] == 4
        for part in ("model", averaged):
            pairs = zip(one[part].values(), other[part].values(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)

    run("export-sd", whole)
    pipe = diffusers.DiffusionPipeline.from_pretrained(whole / "out", torch_dtype=torch.float32)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    name = "unet.conv_in.weight"
    ended = torch.load(whole / "sd.pt")["ema"][name].half()
    assert torch.equal(pipe.unet.conv_in.weight.half(), ended)
    said = json.loads((whole / "out" / "provenance.json").read_text())
    assert said["vae_steps"] == said["steps"] == 4
    pipe.set_progress_bar_config(disable=True)
    made = pipe("two tacos", num_inference_steps=2, output_type="pt").images
    assert made.shape == (1, 3, 64, 64) and made.isfinite().all()


def test_latents_have_unit_variance_and_a_prompts_own_picture(tmp_path):
    run("vae", tmp_path)
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    args = train.parser().parse_args(["sd", f"--work={tmp_path}", "--device=cpu", *sizes])
    z, text = train.latents(args)
    assert z.shape == (130, 16, 8, 8) and len(text) == 130
    assert abs(z.float().std() - 1) < 1e-2
    model = train.vae().eval()
    train.resume(tmp_path / "vae.pt", model=model)
    x = train.render(train.prompts.scene(text[129], 129))[None] * 2 - 1
    scale = torch.load(tmp_path / "latents-130.pt")["scale"]
    with torch.no_grad():
        own = model.encode(x).latent_dist.mode() * scale
    torch.testing.assert_close(z[129:].float(), own, rtol=2e-3, atol=2e-3)


def test_each_word_of_the_world_is_a_token():
    tok = train.tokenizer()
    sentence = "a unicorn left of an umbrella on a purple background"
    for text in (sentence, "two octopuses move left", "replace the taco with a cat"):
        assert len(tok(text).input_ids) == len(text.split()) + 2
    assert train.tokenizer().get_vocab() == tok.get_vocab()  # no ties are broken anew
    longest = max(map(len, (p["prompt"].split() for p in train.prompts.all_prompts())))
    assert longest + 2 <= train.TEXT_TOKENS


def test_what_a_prompt_says_is_read_part_by_part():
    reading = train.Reading()
    text = ["a cat", "three tacos", "a cat below a taco on a blue background"]
    said = [
        [part[i] for part, i in zip(reading.PARTS, row, strict=True)]
        for row in reading.labels(text).tolist()
    ]
    assert said == [
        ["cat", None, 1, None, None],
        ["taco", None, 3, None, None],
        ["cat", "taco", 1, "below", "blue"],
    ]
    dropped, pooled = torch.full((1, 5), -100), torch.randn(4, train.WIDTH)
    labels = reading.labels(text)
    torch.testing.assert_close(
        reading.loss(pooled, torch.cat([labels, dropped])), reading.loss(pooled[:3], labels)
    )


def test_high_noise_levels_are_more_frequent_and_the_noise_is_that_of_the_schedule(tmp_path):
    batches = object.__new__(train.Batches)
    batches.args = train.parser().parse_args(["sd", "--batch=4000", "--device=cpu"])
    batches.z = torch.zeros(2, 16, 8, 8)
    batches.ids, batches.empty = torch.ones(2, 3).long(), torch.zeros(1, 3).long()
    batches.labels = torch.zeros(2, 5).long()
    batches.alphas = train.scheduler().alphas_cumprod
    x, t, eps, tokens, labels = batches(0)
    assert abs((t >= 500).float().mean() - 0.5 ** (2 / 3)) < 0.03  # P(u < 0.5^(2/3))
    torch.testing.assert_close(x, (1 - batches.alphas[t])[:, None, None, None].sqrt() * eps)
    dropped = labels[:, 0] == -100
    assert abs(dropped.float().mean() - 0.1) < 0.02
    assert torch.equal(dropped, tokens[:, 0] == 0)
