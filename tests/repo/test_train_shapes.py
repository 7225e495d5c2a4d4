"""Pretraining of the embedded model, a few steps of it: all stages, interrupted and not, and what
export writes."""

import json

import diffusers
import pytest
import reads_words
import torch
import train_shapes

from flowrl.shapes import prompts

SIZES = {
    "vae-steps": 4,
    "vae-batch": 2,
    "vae-scenes": 8,
    "flow-steps": 4,
    "flow-scenes": 16,
    "faded-steps": 4,
    "faded-scenes": 16,
    "read-steps": 4,
    "read-scenes": 16,
}
STAGES = ("vae", "flow", "faded", "read")


class Killed(Exception):
    pass


def run(stage, work):
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    train_shapes.main(
        [
            stage,
            f"--work={work}",
            f"--out={work / 'out'}",
            "--device=cpu",
            "--threads=1",
            "--batch=4",
            "--save=2",
            *sizes,
        ]
    )


def killed_at_the_first_save(stage, work, monkeypatch):
    save = train_shapes.save

    def once(*args, **parts):
        save(*args, **parts)
        raise Killed

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(train_shapes, "save", once)
        run(stage, work)


@pytest.mark.long
def test_every_stage_goes_on_where_it_was_killed_and_ends_bit_for_bit_the_same(
    tmp_path, monkeypatch
):
    for stage in STAGES:
        run(stage, tmp_path / "whole")
        killed_at_the_first_save(stage, tmp_path / "parts", monkeypatch)
        assert torch.load(tmp_path / "parts" / f"{stage}.pt")["step"] == 2
        run(stage, tmp_path / "parts")
        whole, parts = (torch.load(tmp_path / name / f"{stage}.pt") for name in ("whole", "parts"))
        assert whole["step"] == parts["step"] == 4
        for part in ("model", "ema") if stage != "vae" else ("model",):
            different = [
                name
                for name, value in whole[part].items()
                if not torch.equal(value, parts[part][name])
            ]
            assert not different
    first, second, last = (
        torch.load(tmp_path / "whole" / f"{stage}.pt")["ema"] for stage in STAGES[1:]
    )
    for before, after in ((first, second), (second, last)):
        assert any(not torch.equal(before[name], after[name]) for name in before)

    run("export", tmp_path / "whole")
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        tmp_path / "whole" / "out", text_encoder_3=None, tokenizer_3=None
    )
    assert type(pipe).__name__ == "StableDiffusion3Pipeline"
    weight = next(name for name in last if name.startswith("transformer.") and last[name].ndim == 2)
    assert torch.equal(
        pipe.transformer.state_dict()[weight.removeprefix("transformer.")].half(),
        last[weight].half(),
    )
    provenance = json.loads((tmp_path / "whole" / "out" / "provenance.json").read_text())
    assert all(provenance[f"{stage}_steps"] == 4 for stage in STAGES)
    assert sum(f.stat().st_size for f in (tmp_path / "whole" / "out").rglob("*")) < 12e6


def test_the_read_stage_asks_for_what_each_prompt_says():
    reading = train_shapes.Reading()
    texts = ["a circle", "two red squares", "a red circle left of a blue square"]
    labels = reading.labels(texts)
    said = [
        [part[i] for part, i in zip(reading.PARTS, row, strict=True)] for row in labels.tolist()
    ]
    assert said == [
        ["circle", None, 1, None, None, None],
        ["square", "red", 2, None, None, None],
        ["square", "blue", 1, "circle", "red", "left of"],
    ]
    dropped = torch.full((1, 6), -100)
    pooled = torch.randn(4, train_shapes.build.WIDTH)
    torch.testing.assert_close(
        reading.loss(pooled, torch.cat([labels, dropped])), reading.loss(pooled[:3], labels)
    )


def test_the_read_stage_sees_high_noise_first(tmp_path):
    sizes = [f"--{name}={value}" for name, value in SIZES.items()] + [f"--work={tmp_path}"]
    args = train_shapes.parser().parse_args(["read", "--batch=4000", *sizes])
    batches = object.__new__(train_shapes.Batches)
    batches.args, batches.stage = args, "read"
    early, late = (
        (batches.noise_levels(step, torch.Generator().manual_seed(0)) > 0.7).float().mean()
        for step in (0, 3)
    )
    assert 0.77 < early < 0.87 and 0.2 < late < 0.35


def test_wrong_words_are_prompts_of_the_world_that_say_something_else():
    prompt = prompts.find("a red circle left of a blue square")
    assert reads_words.opposite(prompt) == "a red circle right of a blue square"
    assert reads_words.exchanged(prompt) == "a blue square left of a red circle"
    texts = {prompt["prompt"] for prompt in prompts.all_prompts()}
    positions = [p for p in prompts.all_prompts() if p["task"] == "position"]
    assert positions and texts.issuperset(map(reads_words.opposite, positions))
    assert texts.issuperset(map(reads_words.exchanged, positions))
