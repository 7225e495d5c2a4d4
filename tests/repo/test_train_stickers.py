"""Pretraining of the models of stickers, a few steps of it: all stages, interrupted and not, and
what export writes."""

import json
from functools import partial

import diffusers
import pytest
import stages
import torch
import train_stickers as train
import train_stickers_edit as edit
import train_stickers_wan as wan

SIZES = {"work": None, "out": None, "device": "cpu", "threads": 1, "seed": 0, "save": 1}
SIZES |= {"vae-steps": 2, "decoder-steps": 2, "vae-batch": 1}
SIZES |= {"scenes": 6, "pairs": 6, "steps": 2, "batch": 2}
STAGES = [(train, "vae"), (train, "sd"), (edit, "edit")]
STAGES += [(wan, "wan-vae"), (wan, "wan-decoder"), (wan, "wan")]


def words(script, stage, work):
    """A command line of those sizes that the script has."""
    sizes = SIZES | {"work": work, "out": work / script.__name__}
    known = {action.dest for action in script.arguments()._actions}
    own = [f"--{k}={v}" for k, v in sizes.items() if k.replace("-", "_") in known]
    return [stage, *own]


def run(script, stage, work):
    script.main(words(script, stage, work))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of all stages, uninterrupted; `first` has what each saved after its first step."""
    folder = tmp_path_factory.mktemp("whole")
    with stages.first_saved(folder, train) as patch:
        patch.setattr(train, "CHUNK", 4)
        for script, stage in STAGES:
            run(script, stage, folder)
    return folder


def test_every_stage_goes_on_where_it_was_killed(whole, tmp_path):
    for script, stage in STAGES:
        work = tmp_path / stage
        work.mkdir()
        parts = ("model", "ema") if stage in ("sd", "edit", "wan") else ("model",)
        stages.assert_goes_on(whole, work, stage, partial(run, script), parts)


def exported(script, stage, work):
    """The pipeline that a stage exports, and its provenance."""
    run(script, f"export-{stage}", work)
    out = work / script.__name__
    pipe = diffusers.DiffusionPipeline.from_pretrained(out, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe, json.loads((out / "provenance.json").read_text())


def ended(work, stage, name):
    return torch.load(work / f"{stage}.pt")["ema"][name].half()


def test_sd_is_exported_as_it_ended(whole):
    pipe, said = exported(train, "sd", whole)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert torch.equal(pipe.unet.conv_in.weight.half(), ended(whole, "sd", "unet.conv_in.weight"))
    assert said["vae_steps"] == said["steps"] == 2
    assert said["settings"]["batch"] == 2 and not {"work", "threads"} & said["settings"].keys()
    made = pipe("two tacos", num_inference_steps=2, output_type="pt").images
    assert made.shape == (1, 3, 64, 64) and made.isfinite().all()


def test_edit_is_exported_as_it_ended(whole):
    pipe, _ = exported(edit, "edit", whole)
    assert type(pipe).__name__ == "StableDiffusionInstructPix2PixPipeline"
    assert torch.equal(pipe.unet.conv_in.weight.half(), ended(whole, "edit", "unet.conv_in.weight"))
    image = torch.rand(1, 3, 64, 64)
    made = pipe("remove the cat", image=image, num_inference_steps=2, output_type="pt").images
    assert made.shape == (1, 3, 64, 64) and made.isfinite().all()


def test_wan_is_exported_as_it_ended(whole):
    pipe, _ = exported(wan, "wan", whole)
    assert type(pipe).__name__ == "WanPipeline"
    name = "transformer.patch_embedding.weight"
    assert torch.equal(pipe.transformer.patch_embedding.weight.half(), ended(whole, "wan", name))
    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
    made = pipe("a cat moves left", num_inference_steps=2, output_type="pt", **size).frames
    assert made.shape == (1, 9, 3, 64, 64) and made.isfinite().all()


def test_the_decoder_is_trained_on_and_the_encoder_is_not(whole):
    """Latents stay as they are, and what is exported has the newer decoder."""
    first, then = (torch.load(whole / f"wan-{name}.pt")["model"] for name in ("vae", "decoder"))
    moved = {name for name in first if not torch.equal(first[name], then[name])}
    assert moved and all(name.startswith(("decoder.", "post_quant_conv.")) for name in moved)
    pipe, said = exported(wan, "wan", whole)
    name = "decoder.conv_in.weight"
    assert torch.equal(pipe.vae.state_dict()[name].half(), then[name].half())
    assert said["vae_steps"] == said["decoder_steps"] == 2


def test_weights_of_the_video_model_are_restored_from_what_ships(whole, tmp_path):
    """They are those that were exported, and training goes on from their step."""
    exported(wan, "wan", whole)
    again = [f"--work={tmp_path}", "--steps=3"]
    wan.main([*words(wan, "restore-wan", whole), *again])
    for stage, part in (("wan-vae", "model"), ("wan-decoder", "model"), ("wan", "ema")):
        one, other = (torch.load(folder / f"{stage}.pt") for folder in (whole, tmp_path))
        assert one["step"] == other["step"] == 2 and "optimizer" not in other
        if stage != "wan-vae":  # its decoder is the newer one
            assert all(torch.equal(w.half(), other[part][k].half()) for k, w in one[part].items())
    wan.main([*words(wan, "wan", whole), *again])
    assert torch.load(tmp_path / "wan.pt")["step"] == 3


def test_latents_have_unit_variance_and_a_prompts_own_picture(whole):
    data = torch.load(whole / "latents-6.pt")
    assert data["z"].shape == (6, 16, 8, 8) and len(data["text"]) == 6
    assert abs(data["z"].float().std() - 1) < 1e-2
    own = encode(whole, train.prompts.scene(data["text"][5], 5)) * data["scale"]
    torch.testing.assert_close(data["z"][5:].float(), own, rtol=2e-3, atol=2e-3)


@torch.no_grad()
def encode(work, scene):
    return train.encoder(train.arguments().parse_args(words(train, "sd", work)))([scene])


def test_latents_go_on_where_they_were_saved(tmp_path, monkeypatch):
    """Of 5 rows in chunks of 2 the first 2 are kept: the others are encoded."""
    monkeypatch.setattr(train, "CHUNK", 2)
    rows = []

    def encode_rows(some):
        rows.extend(some)
        return torch.tensor(some)[:, None].float()

    torch.save([torch.tensor([[0.0], [1.0]])], tmp_path / "z.part")
    every = train.encoded(tmp_path / "z.part", 5, encode_rows)
    assert every.flatten().tolist() == [0, 1, 2, 3, 4] and rows == [2, 3, 4]


def test_a_batch_of_edits_holds_an_instructions_own_pictures(whole):
    """What lies in channels 16 to 32 is the source as the pipeline encodes it: in no unit."""
    data = torch.load(whole / "edit-latents-6.pt")
    before, after = edit.EDITS.pair(data["text"][3], 3)
    torch.testing.assert_close(
        data["target"][3:4].float(), encode(whole, after) * data["scale"], rtol=2e-3, atol=2e-3
    )
    args = edit.arguments().parse_args(words(edit, "edit", whole))
    batches = edit.EditBatches(args, edit.tokenizer(), edit.edit_reading(), data)
    u = torch.tensor([0.0, 0.04, 0.06, 0.12, 0.16])
    x = batches.seen(torch.zeros(5, 16, 8, 8), torch.full((5,), 3), u)
    source = encode(whole, before)[0]
    torch.testing.assert_close(x[0, 16:], source, rtol=2e-3, atol=2e-3 * source.abs().max())
    lost = [not row.any() for row in x[:, 16:]]
    assert lost == [False, False, True, True, False]  # the paper's 5 % of each kind


def test_an_edit_starts_as_the_model_of_pictures():
    """Weights of the source's channels are zero: whatever the source, the noise is sd's."""
    tok = edit.tokenizer()
    plain, model = edit.Denoiser(tok), edit.Denoiser(tok, edit.CHANNELS)
    model.load_state_dict(edit.widened(plain.state_dict()))
    x, t, ids = torch.randn(2, 32, 8, 8), torch.tensor([3, 700]), tok(["a cat", "a dog"]).input_ids
    ids = torch.tensor(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(x, t, ids), plain(x[:, :16], t, ids))


def test_the_video_vae_learns_from_pixels_that_its_pipeline_clamps():
    model = wan.wan_vae()
    z = torch.randn(1, 16, 3, 8, 8)
    with torch.no_grad():
        model.decoder.conv_out.bias.add_(2)
        free = wan.unclamped(model, z)
        assert free.max() > 1
        torch.testing.assert_close(model.decode(z).sample, free.clamp(-1, 1))


def test_muon_is_torchs_but_for_the_precision_of_its_iterations():
    rates = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    for shape in ((6, 4), (4, 6)):
        one = torch.randn(shape, requires_grad=True)
        other = one.detach().clone().requires_grad_()
        ours, theirs = train.Muon([one], **rates), torch.optim.Muon([other], **rates)
        for _ in range(3):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
            ours.step(), theirs.step()
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0.02)
        assert ours.state_dict()["state"][0].keys() == theirs.state_dict()["state"][0].keys()


def test_the_video_model_reads_a_text_as_its_pipeline_does():
    tok = wan.wan_tokenizer()
    model = wan.WanDenoiser(tok).eval()
    pipe = diffusers.WanPipeline(tok, model.text_encoder, None, None, model.transformer)
    text = ["two octopuses move left on a blue background", ""]
    x, t = torch.randn(2, 16, 3, 8, 8), torch.tensor([900.0, 20.0])
    for length in (16, wan.PADDED):
        ids = tok(text, padding="max_length", max_length=length, return_tensors="pt").input_ids
        with torch.no_grad():
            state, _ = pipe.encode_prompt(text, None, False, max_sequence_length=length)
            torch.testing.assert_close(model(x, t, ids)[0], pipe.transformer(x, t, state).sample)


def test_the_video_model_sees_both_lengths_of_padding_and_learns_velocities(whole):
    args = wan.arguments().parse_args(words(wan, "wan", whole))
    data, tok, reading = wan.wan_latents(args), wan.wan_tokenizer(), wan.motion_reading()
    batches = wan.WanBatches(args, tok, reading, data["z"], data["text"])
    assert [batches(step)[3].shape[1] for step in (0, 1, 8)] == [512, 16, 512]
    assert batches.empty.tolist() == [[tok.eos_token_id] + [0] * 15] and tok.pad_token_id == 0
    x0, eps = torch.randn(2, 1, 16, 3, 8, 8)
    x, t, target = batches.noisy(x0, eps, torch.tensor([0.25]))
    assert t.item() == 250
    torch.testing.assert_close(x - 0.25 * target, x0)
    torch.testing.assert_close(x + 0.75 * target, eps)


def test_each_word_of_the_world_is_a_token():
    sentence = "a unicorn left of an umbrella on a purple background"
    for text in (sentence, "two octopuses move left", "replace the taco with a cat"):
        assert len(train.tokenizer()(text).input_ids) == len(text.split()) + 2
        ids = wan.wan_tokenizer()(text).input_ids
        assert len(ids) == len(text.split()) + 1 and wan.wan_tokenizer().unk_token_id not in ids
    assert train.tokenizer().get_vocab() == train.tokenizer().get_vocab()  # no ties broken anew
    longest = max(map(len, (p["prompt"].split() for p in train.prompts.all_prompts())))
    assert longest + 2 <= train.TEXT_TOKENS


def test_what_a_sentence_says_is_read_part_by_part():
    said = {
        train.picture_reading: {
            "a cat": ["cat", None, 1, None, None],
            "three tacos": ["taco", None, 3, None, None],
            "a cat below a taco on a blue background": ["cat", "taco", 1, "below", "blue"],
        },
        edit.edit_reading: {
            "replace the cat with a taco": ["replace", "cat", "taco"],
            "make the background pink": ["background", None, "pink"],
            "remove the cat": ["remove", "cat", None],
            "move the cat up": ["move", "cat", "up"],
        },
        wan.motion_reading: {
            "two foxes grow": ["fox", 2, "grows", None],
            "a cat moves left on a blue background": ["cat", 1, "moves left", "blue"],
        },
    }
    for make, known in said.items():
        reading = make()
        labels = reading.labels([*known]).tolist()
        found = [[p[i] for p, i in zip(reading.parts, row, strict=True)] for row in labels]
        assert found == [*known.values()]


def test_a_sentence_that_is_dropped_does_not_count():
    reading = train.picture_reading()
    labels, pooled = reading.labels(["a cat", "three tacos"]), torch.randn(3, train.WIDTH)
    dropped = torch.full((1, 5), -100)
    torch.testing.assert_close(
        reading.loss(pooled, torch.cat([labels, dropped])), reading.loss(pooled[:2], labels)
    )


def test_sentences_that_are_drawn_have_their_shares():
    text = edit.instructions(4000, 0)
    for action, share in edit.SHARES.items():
        start = "make" if action == "background" else action
        assert abs(sum(t.startswith(start) for t in text) / 4000 - share) < 0.03
    text = wan.motion_sentences(4000, torch.Generator().manual_seed(0), 0.7, wan.MOTIONS.world)
    assert abs(sum("background" not in t for t in text) / 4000 - 0.7) < 0.03
    say = wan.motion_reading().say
    assert len({say(t)[:3] for t in text}) == 32 * 2 * 8


def test_high_noise_levels_are_more_frequent_and_the_noise_is_that_of_the_schedule():
    args = train.arguments().parse_args(["sd", "--batch=4000", "--device=cpu"])
    text = ["a cat", "a dog"]
    batches = train.Batches(
        args, train.tokenizer(), train.picture_reading(), torch.zeros(2, 16, 8, 8), text
    )
    x, t, eps, tokens, labels = batches(0)
    assert abs((t >= 500).float().mean() - 0.5 ** (2 / 3)) < 0.03  # P(u < 0.5^(2/3))
    torch.testing.assert_close(x, (1 - batches.alphas[t])[:, None, None, None].sqrt() * eps)
    dropped = labels[:, 0] == -100
    assert abs(dropped.float().mean() - 0.1) < 0.02
    assert torch.equal(dropped, (tokens == batches.empty).all(1))


def test_the_video_model_of_shapes_has_their_words_and_no_background():
    motions, g = wan.WORLDS["shapes"], torch.Generator().manual_seed(0)
    text = wan.motion_sentences(50, g, 0.7, motions.world)
    tok = wan.wan_tokenizer(motions.world.language)
    assert tok.unk_token_id not in sum(tok(text).input_ids, [])
    assert not any("background" in one for one in text)
    assert wan.motion_reading(motions.world.language).labels(text).shape == (50, 4)
    seen = wan.videos(1, g, motions)
    assert seen.shape == (1, 3, 9, 64, 64) and seen.max() == 1
