"""The preference reward: Bradley-Terry by hand and on planted preferences, what a head's folder
holds, and the embedded head."""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowrl import rewards
from flowrl.data import media
from flowrl.rewards.networks import bradley_terry as bt
from flowrl.shapes import clip, prompts
from flowrl.shapes.agreement import plant
from flowrl.shapes.scenes import render

SPEC = importlib.util.spec_from_file_location(
    "train_preference", Path(__file__).parents[2] / "scripts/embedded/train_preference.py"
)
script = sys.modules["train_preference"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green triangle and a black circle",
    "a red circle",
]


@pytest.fixture
def pictures():
    g = torch.Generator().manual_seed(0)
    return torch.stack([render(prompts.scene(prompts.find(p), g)) for p in PROMPTS])


def head(aspects=("quality",), width=8, **settings):
    torch.manual_seed(0)
    return bt.ScoreHead(
        bt.HeadConfig(aspects=list(aspects), width=width, features=["image"], **settings)
    )


def planted(utility, count=2000, width=8, seed=0):
    """Pairs (count, width) and votes drawn from sigmoid(u(a) - u(b))."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, count, width, generator=g)
    odds = utility(a) - utility(b)
    return a, b, (torch.rand(count, generator=g) < odds.sigmoid()).float()[:, None]


# ---------------------------------------------------------------------------
# the fit


def test_the_loss_by_hand_with_a_tie_and_a_pair_that_nobody_judged():
    """d = log 3: sigmoid 3/4, so -log 3/4 for a vote for a, -log 1/4 for b; at d = 0 anything costs
    log 2."""
    d = torch.tensor([math.log(3), math.log(3), 0.0, 99.0])
    p = torch.tensor([1.0, 0.0, 0.5, math.nan])
    assert bt.loss(d[:1], p[:1]).item() == pytest.approx(math.log(4 / 3), abs=1e-6)
    assert bt.loss(d[1:2], p[1:2]).item() == pytest.approx(math.log(4), abs=1e-6)
    assert bt.loss(d, p).item() == pytest.approx(
        (math.log(4 / 3) + math.log(4) + math.log(2)) / 3, abs=1e-6
    )


def test_the_loss_of_a_share_of_votes_is_least_at_its_log_odds():
    d = torch.tensor([math.log(0.7 / 0.3)], requires_grad=True)
    bt.loss(d, torch.tensor([0.7])).backward()
    assert d.grad.item() == pytest.approx(0.0, abs=1e-6)


def test_a_linear_head_recovers_a_planted_direction_and_its_scale():
    direction = torch.linspace(-1, 1, 8)
    a, b, votes = planted(lambda x: x @ direction, count=8000)
    model = head()
    bt.fit(model, a, b, votes, l2=0.0)
    with torch.no_grad():
        slope = (model(torch.eye(8)) - model(torch.zeros(1, 8)))[:, 0]
    assert torch.nn.functional.cosine_similarity(slope, direction, dim=0) > 0.995
    assert slope.norm() / direction.norm() == pytest.approx(1.0, abs=0.06)
    x, y, _ = planted(lambda x: x @ direction, seed=1)
    agree = ((model(x) - model(y))[:, 0] > 0) == ((x - y) @ direction > 0)
    assert agree.float().mean() > 0.97


def test_a_hidden_layer_learns_what_no_linear_head_can():
    def far(x):
        return 4 * x[:, 0].abs()

    a, b, votes = planted(far)
    x, y, _ = planted(far, seed=1)
    accuracy = {}
    for hidden in (0, 16):
        model = head(hidden=hidden)
        bt.fit(model, a, b, votes, l2=1e-3)
        accuracy[hidden] = (
            (((model(x) - model(y))[:, 0] > 0) == (far(x) > far(y))).float().mean().item()
        )
    assert accuracy[0] < 0.6 and accuracy[16] > 0.9


def test_ties_alone_teach_nothing():
    a, b, _ = planted(lambda x: x[:, 0], count=200)
    model = head()
    bt.fit(model, a, b, torch.full((200, 1), 0.5), l2=0.01)
    assert (model(a) - model(b)).abs().max() < 1e-3


def test_aspects_are_fitted_side_by_side_each_on_the_pairs_that_it_was_judged_on():
    a, b, first = planted(lambda x: 2 * x[:, 0])
    _, _, second = planted(lambda x: -2 * x[:, 0])
    votes = torch.cat([first, second], 1)
    votes[::2, 1] = math.nan
    model = head(("up", "down"))
    bt.fit(model, a, b, votes, l2=1e-3)
    slope = (model(torch.eye(8)[:1]) - model(torch.zeros(1, 8)))[0]
    assert slope[0] > 1 and slope[1] < -1


def test_the_same_pairs_give_the_same_head_bit_for_bit():
    a, b, votes = planted(lambda x: x[:, 0], count=300)
    twice = [head(hidden=4), head(hidden=4)]
    for model in twice:
        bt.fit(model, a, b, votes)
    assert all(
        torch.equal(x, y)
        for x, y in zip(*(model.state_dict().values() for model in twice), strict=True)
    )


# ---------------------------------------------------------------------------
# its folder


def test_a_head_survives_its_folder(tmp_path):
    config = bt.HeadConfig(aspects=["a", "b"], width=8, hidden=4, notes={"accuracy": 0.9})
    model = bt.ScoreHead(config)
    bt.save_head(model, config, tmp_path / "new" / "head")
    again, read = bt.load_head(tmp_path / "new" / "head")
    x = torch.randn(3, 16)
    assert (
        read == config
        and torch.equal(again(x), model(x))
        and not any(p.requires_grad for p in again.parameters())
    )


def broken(folder, change):
    """The embedded head with another config."""
    shutil.copytree(bt.EMBEDDED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aspects": ["alignment"]}, "does not fit ScoreHead: .*layers"),
        ({"width": 32}, "does not fit ScoreHead: .*mean"),
        ({"feature": []}, 'unknown setting "feature"; did you mean "features"'),
        ({"features": ["picture"]}, "features.0='picture'"),
        ({"model": "ViT-B-32"}, "give pretrained=TAG or a file"),
    ],
)
def test_a_head_that_does_not_fit_its_config_is_refused(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("preference", weights=broken(tmp_path / "head", change))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "/nowhere"}, "there is no such file or folder"),
        (
            {"weights": str(clip.FOLDER)},
            "holds no config.json; give one that scripts/embedded/train_preference.py wrote",
        ),
        ({"aspect": "aligned"}, 'the head has no aspect "aligned"; did you mean "alignment"'),
        ({"aspect": {"vivid": math.inf}}, "aspect.vivid=inf is not a finite number"),
        ({"aspect": {}}, "aspect is empty; give one of alignment, vivid"),
        (
            {"backbone": "shapes", "pretrained": "/nowhere"},
            "pretrained=/nowhere would not be used: the CLIP .* has weights of its own",
        ),
        ({"pretrained": "openai"}, "goes with reward.preference.backbone, which is not set"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("preference", **settings)


def test_a_folder_with_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        rewards.load("preference", weights=str(tmp_path))
    shutil.copy(bt.EMBEDDED / "config.json", tmp_path)
    with pytest.raises(
        ValueError, match="holds a config.json and no head.safetensors; copy both files"
    ):
        rewards.load("preference", weights=str(tmp_path))


# ---------------------------------------------------------------------------
# the reward


def test_the_score_is_the_weighted_sum_of_the_aspects(pictures):
    reward = rewards.load("preference")
    parts = reward.parts(pictures, PROMPTS)
    assert list(parts) == ["alignment", "vivid"]
    assert torch.allclose(
        reward(pictures, PROMPTS), (parts["alignment"] + parts["vivid"]) / 2, atol=1e-6
    )
    assert torch.equal(
        rewards.load("preference", aspect="vivid")(pictures, PROMPTS), parts["vivid"]
    )
    mixed = rewards.load("preference", aspect={"alignment": 0.5, "vivid": -2.0})(pictures, PROMPTS)
    assert torch.allclose(mixed, 0.5 * parts["alignment"] - 2 * parts["vivid"], atol=1e-6)
    assert mixed.dtype == torch.float32 and mixed.shape == (4,)


def test_the_score_is_the_head_on_the_embeddings_of_stock_open_clip(pictures):
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(clip.SOURCE)
    model.eval()
    inner, _ = bt.load_head(bt.EMBEDDED)
    with torch.no_grad():
        image = model.encode_image(
            torch.stack([preprocess(p) for p in media.to_pil(pictures)]), normalize=True
        )
        text = model.encode_text(open_clip.get_tokenizer(clip.SOURCE)(PROMPTS), normalize=True)
        expected = inner(torch.cat([image, image * text], 1))
    parts = rewards.load("preference").parts(pictures, PROMPTS)
    assert torch.allclose(
        torch.stack(list(parts.values()), 1), expected, atol=0.05
    )  # PIL's resize rounds to bytes


def test_without_rounding_the_gradient_is_that_of_finite_differences(pictures):
    steep = rewards.load("preference", rounding=False)
    soft = pictures[:2] * 0.93 + 0.0312
    soft = torch.nn.functional.avg_pool2d(soft, 5, 1, 2).requires_grad_()
    slope = torch.autograd.grad(steep(soft, PROMPTS[:2]).sum(), soft)[0]
    direction = slope / slope.norm()
    with torch.no_grad():
        numeric = (
            steep(soft + 0.02 * direction, PROMPTS[:2])
            - steep(soft - 0.02 * direction, PROMPTS[:2])
        ).sum() / 0.04
    assert numeric.item() == pytest.approx(slope.norm().item(), rel=0.05)


def test_the_same_backbone_from_another_place_gives_the_same_scores_and_another_width_is_refused(
    pictures, tmp_path
):
    shutil.copytree(clip.FOLDER, tmp_path / "clip")
    moved = rewards.load("preference", backbone=f"local-dir:{tmp_path / 'clip'}")
    assert torch.equal(moved(pictures, PROMPTS), rewards.load("preference")(pictures, PROMPTS))
    config = json.loads((tmp_path / "clip" / "open_clip_config.json").read_text())
    config["model_cfg"]["embed_dim"] = 48
    (tmp_path / "clip" / "open_clip_config.json").write_text(json.dumps(config))
    (tmp_path / "clip" / "open_clip_model.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=(
            "embeds into 48 numbers, and the head of the shapes world reads 64: it was trained on"
            " shapes"
        ),
    ):
        rewards.load("preference", backbone=f"local-dir:{tmp_path / 'clip'}")


def test_a_head_that_reads_pictures_alone_needs_no_prompt(pictures, tmp_path):
    config = bt.HeadConfig(aspects=["nice"], width=64, features=["image"])
    bt.save_head(bt.ScoreHead(config), config, tmp_path)
    reward = rewards.load("preference", weights=str(tmp_path))
    assert not reward.reads_prompt and rewards.load("preference").reads_prompt
    assert torch.equal(reward(pictures, [""] * 4), reward(pictures, PROMPTS))


def test_the_embedded_head_prefers_right_scenes_and_full_ink():
    g = torch.Generator().manual_seed(5)
    chosen = [
        p for p in prompts.train_prompts() if p["task"] in ("counting", "color_attr", "colors")
    ][::6]
    scenes = [prompts.scene(p, g) for p in chosen]
    right = torch.stack([render(s) for s in scenes])
    wrong = torch.stack(
        [render(plant(p, s, "colour", g)) for p, s in zip(chosen, scenes, strict=True)]
    )
    text, reward = [p["prompt"] for p in chosen], rewards.load("preference")
    true, false, pale = (reward.parts(x, text) for x in (right, wrong, 1 - 0.4 * (1 - right)))
    assert (true["alignment"] > false["alignment"]).float().mean() > 0.8
    assert (true["vivid"] > pale["vivid"]).float().mean() > 0.9


# ---------------------------------------------------------------------------
# the script


@pytest.fixture
def pairs(tmp_path):
    """40 prompts, four pictures each at 100, 80, 60 and 40% of the ink; the deeper is the
    better."""
    g = torch.Generator().manual_seed(0)
    lines = []
    for n, prompt in enumerate(
        [p for p in prompts.train_prompts() if p["task"] == "color_attr"][:40]
    ):
        truth = render(prompts.scene(prompt, g))
        for ink in (100, 80, 60, 40):
            media.save(1 - ink / 100 * (1 - truth), tmp_path / f"{n}-{ink}.png")
        for a, b in ((100, 40), (60, 100), (80, 60), (40, 80)):
            line = {
                "prompt": prompt["prompt"],
                "a": f"{n}-{a}.png",
                "b": f"{n}-{b}.png",
                "ink": float(a > b),
                "id": n,
                "said": "tie",
            }
            lines.append(json.dumps(line))
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, ""]))
    return tmp_path / "pairs.jsonl"


def test_the_script_learns_synthetic_preferences_and_the_reward_loads_what_it_wrote(
    pairs, tmp_path, capsys
):
    script.main(["fit", str(pairs), "--out", str(tmp_path / "head"), "--aspects", "ink"])
    notes = json.loads((tmp_path / "head" / "config.json").read_text())["notes"]
    assert (
        notes["ink"]["accuracy"] > 0.85
        and notes["ink"]["low"] <= notes["ink"]["accuracy"] <= notes["ink"]["high"]
    )
    assert notes["pairs"] == 160 and 0 < notes["pairs_held_out"] < 80 and notes["prompts"] == 40
    assert (
        f"ink: {notes['ink']['accuracy']:.1%} of {notes['ink']['decided_pairs']} held-out pairs"
        in capsys.readouterr().out
    )
    reward = rewards.load("preference", weights=str(tmp_path / "head"))
    deep, pale = (media.from_pil(Image.open(tmp_path / f"3-{ink}.png")) for ink in (100, 40))
    text = [json.loads(pairs.read_text().splitlines()[12])["prompt"]]
    assert reward.config.aspects == ["ink"] and reward(deep, text) > reward(pale, text)


def test_held_out_prompts_do_not_move_when_the_file_grows():
    chosen = [p["prompt"] for p in prompts.all_prompts()]
    share = sum(script.held_out(p, 0.2) for p in chosen) / len(chosen)
    assert share == pytest.approx(0.2, abs=0.03)
    assert all(script.held_out(p, 0.5) for p in chosen if script.held_out(p, 0.2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"ink": 1.5},
            "line 2: ink=1.5 is not a preference; give the share of votes for a, from 0 to 1",
        ),
        ({"ink": "a"}, "line 2: ink='a' is not a preference"),
        ({"a": "none.png"}, 'line 2: "a": there is no picture .*none.png'),
        ({"prompt": 3}, "line 2: .* is not a pair"),
    ],
)
def test_a_line_that_is_no_pair_is_named(pairs, change, said):
    lines = pairs.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    pairs.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=said):
        script.read(pairs)


def test_ties_and_gaps_are_read_as_half_and_as_not_asked(pairs):
    lines = [json.loads(line) for line in pairs.read_text().splitlines()[:3]]
    lines[1]["ink"], lines[2]["ink"] = "tie", None
    pairs.write_text("\n".join(map(json.dumps, lines)))
    found = script.read(pairs, ["ink"]).preference[:, 0].tolist()
    assert found[:2] == [1.0, 0.5] and math.isnan(found[2])


def test_a_file_without_enough_prompts_or_with_another_aspect_is_refused_with_a_sentence(
    pairs, tmp_path, capsys
):
    pairs.write_text("\n".join(pairs.read_text().splitlines()[:4]))
    for words, said in (
        (["--aspects", "inc"], "has no aspect ['inc']; it has ['ink', 'said']"),
        (["--aspects", "ink"], "1 prompts, --held-out 0.2: no decided pair of ['ink'] is"),
    ):
        with pytest.raises(SystemExit) as stopped:
            script.main(["fit", str(pairs), "--out", str(tmp_path / "head"), *words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_annotator_sees_what_is_right_and_how_deep_the_ink_is():
    """Red is (0.9, 0.1, 0.1), so 0.9 deep where it covers all; at 60% of the ink 0.54; paper has no
    ink at all."""
    prompt = prompts.find("a red circle and a blue square")
    right = render(prompts.scene(prompt, torch.Generator().manual_seed(0)))
    worth = script.utilities(
        torch.stack([right, 1 - 0.6 * (1 - right), torch.ones_like(right)]), prompt["include"]
    )
    assert (
        worth["alignment"] == [1.0, 1.0, 0.0]
        and worth["vivid"][0] > worth["vivid"][1] > worth["vivid"][2] == 0.0
    )
    red = torch.tensor([0.9, 0.1, 0.1])[:, None, None].expand(3, 64, 64)
    assert script.utilities(torch.stack([red, 1 - 0.6 * (1 - red)]), prompt["include"])[
        "vivid"
    ] == pytest.approx([0.9, 0.54], abs=0.003)


def test_the_drawn_pairs_hold_each_prompt_six_pictures_and_no_held_out_combination(
    tmp_path, monkeypatch, capsys
):
    drawn = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(script.flowrl, "load_policy", lambda name: name)
    monkeypatch.setattr(
        script.flowrl, "generate", lambda policy, texts, **settings: drawn[: len(texts)]
    )
    script.main(["shapes", "--work", str(tmp_path), "--prompts", "3"])
    found = script.read(tmp_path / "pairs.jsonl")
    assert (
        len(found.prompts) == 45
        and len(set(found.a + found.b)) == 18
        and found.aspects == ["alignment", "vivid"]
    )
    assert not any(prompts.held_out(prompts.find(p)) for p in found.prompts)
    sides = zip(found.a, found.b, found.preference[:, 0].tolist(), strict=True)
    votes = {(a.stem[-1], b.stem[-1]): vote for a, b, vote in sides if a.stem.startswith("0000")}
    assert (
        votes.get(("4", "0"), 1 - votes.get(("0", "4"), 0.0)) == 1.0
    )  # the rendered scene against noise
    assert "the utilities themselves agree with the votes in: alignment" in capsys.readouterr().out
