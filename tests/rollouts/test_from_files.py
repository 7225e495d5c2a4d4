"""Scored folders are read or refused with one sentence; their rollouts and references are leaves
like any others."""

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

from flowrl.algorithms.nft import ALGORITHM as NFT
from flowrl.data import prompts as data
from flowrl.data import scored_dataset
from flowrl.data.media import read_image, save
from flowrl.rewards import load_set, score
from flowrl.rollouts import from_files
from flowrl.rollouts.roll_out import roll_out
from flowrl.rollouts.scorer import Scorer, decode_into
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import plan
from flowrl.types import MediaContext, PromptBatch

TEXTS = ["a red circle", "two blue squares"]
WEIGHTS = {"jpeg": 1.0, "shapes": 0.5}


@pytest.fixture
def plans(policy):
    return NFT(NFT.Config(steps=2)).plan(
        policy.schedule(4).sigmas,
        sampler=type("S", (), {"init_noise": "sample"}),
        iteration=0,
        seed=0,
    )


def folder_of(path, *entries):
    """A hand-made folder of 64x64 pictures."""
    for number, entry in enumerate(entries):
        if isinstance(entry.get("file"), str):
            save(torch.full((3, 64, 64), number / 10), path / entry["file"])
    (path / "scores.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def entry(file, prompt="x", total=1.0, **more):
    return {"file": file, "prompt": prompt, "total": total, **more}


def batch_of(dataset):
    return data.select(dataset.prompts, torch.arange(len(dataset.prompts)))


# ---------------------------------------------------------------------------
# round trip


def test_samples_saved_scored_and_loaded_are_the_samples(policy, made, plans):
    """encode(PNG of decode(x0)) is encode(decode(x0)) to a byte's rounding, and x0 to the VAE's
    error: 7 to 13% of its norm, where
    other samples differ by 40% or more."""
    folder, x0, pixels = made
    dataset = scored_dataset.load(folder)
    assert (
        [p["prompt"] for p in dataset.prompts] == TEXTS
        and "include" in dataset.prompts[0]
        and dataset.weights == WEIGHTS
    )
    assert [len(items) for items in dataset.items] == [4, 3] and dataset.singles == 0
    batch = batch_of(dataset)
    items = scored_dataset.gather(dataset, batch, 4, seed=0, iteration=0)
    assert [len(group) for group in items] == [4, 3]
    rollout, rewards = from_files.rollout(policy, batch, items, plans, weights=dataset.weights)
    files = [item.file for group in items for item in group]
    assert (
        sorted(files) == sorted(x0)
        and rollout.group.tolist() == rollout.prompt.tolist() == [0] * 4 + [1] * 3
    )
    assert (
        rollout.leaves.shape == (7, *policy.latent_shape) and rollout.leaves.dtype == torch.float32
    )
    assert (
        rollout.state_sigma.tolist() == [0.0] * 7
        and not len(rollout.src)
        and rollout.log_prob is None
        and rollout.guidance == "none"
    )
    for leaf, file in zip(rollout.leaves, files, strict=True):
        gaps = {name: float((leaf - truth).norm() / truth.norm()) for name, truth in x0.items()}
        assert gaps[file] < 0.2 and min(gap for name, gap in gaps.items() if name != file) > 0.35
        with torch.no_grad():
            exact = policy.encode_media(pixels[file][None])[0]
        assert float((leaf - exact).norm() / exact.norm()) < 0.02
    assert {
        len(v) for v in (rewards.total, rewards.valid, rewards.raw["jpeg"], rewards.raw["shapes"])
    } == {7} and rewards.valid.all()
    assert (
        torch.allclose(rewards.total, rewards.raw["jpeg"] + 0.5 * rewards.raw["shapes"])
        and rewards.weights == WEIGHTS
    )
    texts, metas = [batch.text[g] for g in rollout.group], [batch.meta[g] for g in rollout.group]
    direct = score(
        torch.stack([pixels[file] for file in files]),
        texts,
        load_set(WEIGHTS),
        MediaContext(meta=metas),
    )
    assert torch.equal(
        direct.raw["jpeg"], rewards.raw["jpeg"]
    )  # a PNG holds the bytes that rewards see
    assert torch.allclose(direct.total, rewards.total, atol=0.05)


def test_the_shape_of_media_is_decoded_once_for_a_policy(policy, monkeypatch):
    decoded = []
    real = type(policy).decode
    monkeypatch.setattr(type(policy), "decode", lambda *a: decoded.append(a) or real(*a))
    from_files.SHAPES.pop(policy, None)
    assert from_files.media_shape(policy) == from_files.media_shape(policy) == (3, 64, 64)
    assert len(decoded) == 1


def test_nft_trains_on_an_offline_rollout(policy, made, plans):
    """Its rows, scores and loss need nothing else; the gradient reaches the adapters, and a group's
    advantages sum to 0."""
    algorithm = NFT(NFT.Config(steps=2))
    dataset = scored_dataset.load(made[0])
    batch = batch_of(dataset)
    rollout, rewards = from_files.rollout(
        policy,
        batch,
        scored_dataset.gather(dataset, batch, 4, seed=0, iteration=0),
        plans,
        weights=WEIGHTS,
    )
    leaf = algorithm.leaf_advantages(rewards, rollout.group)
    assert bool((leaf != 0).any()) and torch.allclose(
        torch.stack([leaf[:4].sum(), leaf[4:].sum()]), torch.zeros(2), atol=1e-4
    )
    columns = algorithm.columns(rollout, algorithm.advantages(rollout, leaf), seed=0, iteration=0)
    assert len(columns) == 2 * int((leaf != 0).sum())
    scores = algorithm.score(policy, rollout, columns)
    out = algorithm.loss(scores, columns)
    assert all(
        value.shape == (len(columns),) and value.isfinite().all() for value in scores.values()
    )
    parameters = [p for part in policy.parts.values() for p in part.values()]
    grads = torch.autograd.grad(out.loss, parameters, allow_unused=True)
    assert max(float(g.abs().max()) for g in grads if g is not None) > 0


def test_combined_advantages_read_the_weights_of_the_folder(policy, made, plans):
    """combine="advantages" is jpeg's z-score plus half of shapes', which differs from the z-score
    of the sum."""
    dataset = scored_dataset.load(made[0])
    batch = batch_of(dataset)
    rollout, rewards = from_files.rollout(
        policy,
        batch,
        scored_dataset.gather(dataset, batch, 4, seed=0, iteration=0),
        plans,
        weights=WEIGHTS,
    )
    z = {}
    for name, weight in WEIGHTS.items():
        r = rewards.raw[name][:4].double()
        spread = r.std(correction=0)
        z[name] = weight * (r - r.mean()) / (spread + 1e-4) if spread >= 1e-6 else torch.zeros(4)
    adv = NFT(NFT.Config(combine="advantages")).leaf_advantages(rewards, rollout.group)
    assert float(z["shapes"].abs().max()) > 0.3 and torch.allclose(
        adv[:4].double(), z["jpeg"] + z["shapes"], atol=1e-5
    )
    assert not torch.allclose(
        adv, NFT(NFT.Config()).leaf_advantages(rewards, rollout.group), atol=1e-2
    )


# ---------------------------------------------------------------------------
# draws


def test_draws_are_functions_of_seed_iteration_and_prompt_id(tmp_path):
    dataset = scored_dataset.load(
        folder_of(tmp_path, *(entry(f"{p}{i}.png", p) for p in "ab" for i in range(8)))
    )
    both, second = batch_of(dataset), data.select(dataset.prompts, torch.tensor([1]))

    def files(batch, **options):
        drawn = scored_dataset.gather(dataset, batch, 3, **({"seed": 0, "iteration": 0} | options))
        return [[item.file for item in group] for group in drawn]

    assert (
        files(both) == files(both) and files(second) == files(both)[1:]
    )  # whatever else is in the batch
    assert len({str(files(second, iteration=i)) for i in range(8)}) > 6 and files(
        both, seed=1
    ) != files(both)
    assert [name[1:] for name in files(both)[0]] != [
        name[1:] for name in files(both)[1]
    ]  # another permutation each prompt
    assert all(len(set(group)) == 3 for group in files(both))  # without replacement
    seen = {name for i in range(40) for name in files(second, iteration=i)[0]}
    assert seen == {f"b{i}.png" for i in range(8)}
    assert (
        sorted(
            scored_dataset.gather(dataset, second, 99, seed=0, iteration=0)[0],
            key=lambda item: item.file,
        )
        == dataset.items[1]
    )


def test_a_samples_key_is_its_file_and_prompt_wherever_it_lies(tmp_path, policy, plans):
    entries = [entry(f"{i}.png", "x") for i in range(3)] + [entry("0.png", "y")]
    keys_of = []
    for place in ("one", "two/deeper"):
        dataset = scored_dataset.load(folder_of(tmp_path / place, *entries))
        batch = batch_of(dataset)
        items = dataset.items if place == "one" else [dataset.items[0][::-1], dataset.items[1]]
        rollout, _ = from_files.rollout(policy, batch, items, plans, weights=dataset.weights)
        keys_of.append(
            {
                (item.file, g): k
                for (g, item), k in zip(
                    ((g, item) for g, group in enumerate(items) for item in group),
                    rollout.leaf_key.tolist(),
                    strict=True,
                )
            }
        )
    assert keys_of[0] == keys_of[1] and len(set(keys_of[0].values())) == 4


# ---------------------------------------------------------------------------
# the folder


def test_a_list_made_by_hand_needs_file_prompt_and_total(tmp_path):
    """Human ratings: one score, "total". A prompt's meta is what its lines agree on; prompts with
    one image are counted."""
    lines = [
        entry("a.png", "x", 3, k=1, rater="A"),
        entry("b.png", "x", 2, k=1, rater="B"),
        entry("c.png", "y", 5),
    ]
    dataset = scored_dataset.load(folder_of(tmp_path, *lines))
    assert dataset.prompts == [{"prompt": "x", "k": 1}, {"prompt": "y"}] and dataset.weights == {
        "total": 1.0
    }
    assert [[(i.path.name, i.total, i.scores) for i in items] for items in dataset.items] == [
        [("a.png", 3.0, {"total": 3.0}), ("b.png", 2.0, {"total": 2.0})],
        [("c.png", 5.0, {"total": 5.0})],
    ]
    assert dataset.singles == 1
    assert [p.name for p in dataset.paths] == ["a.png", "b.png", "c.png"]
    assert scored_dataset.load(tmp_path / "scores.jsonl") == dataset


def test_a_score_of_weight_0_may_be_missing(tmp_path):
    line = entry("a.png", scores={"jpeg": 1.0, "clip": None}, weights={"jpeg": 1.0, "clip": 0})
    assert math.isnan(scored_dataset.load(folder_of(tmp_path, line)).items[0][0].scores["clip"])


GOOD = {"scores": {"jpeg": 1.0}, "weights": {"jpeg": 1.0}}


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ('{"file": ', "scores.jsonl, line 2 is not JSON"),
        ("[1]", 'line 2 needs a "prompt"'),
        ({"file": "b.png", "total": 1.0}, 'line 2 needs a "prompt"'),
        ({"prompt": "x", "total": 1.0}, 'line 2 needs a "file"'),
        (entry("gone.png", **GOOD), "gone.png, which does not exist"),
        (
            {"file": "b.png", "prompt": "x", **GOOD},
            'line 2: "total" is None, which should be a finite number',
        ),
        (
            entry("b.png", total=math.nan, **GOOD),
            'line 2: "total" is nan, which should be a finite number',
        ),
        (entry("b.png", total=math.inf, **GOOD), 'line 2: "total" is inf'),
        (entry("b.png", total=1e39, **GOOD), 'line 2: "total" is 1e+39'),
        (entry("b.png", total="high", **GOOD), "line 2: \"total\" is 'high'"),
        (entry("b.png", total=True, **GOOD), 'line 2: "total" is True'),
        (
            entry("b.png", scores={"jpeg": None}, weights={"jpeg": 1.0}),
            'line 2: the score "jpeg" is None',
        ),
        (
            entry("b.png", scores=3, weights={"jpeg": 1.0}),
            'line 2: "scores" is 3, which should hold a number a reward',
        ),
        (
            entry("b.png", scores={"jpeg": 1}, weights={"jpeg": "much"}),
            'line 2: the weight of "jpeg" is',
        ),
        (
            entry("b.png", scores={"jpeg": 1, "clip": 1}, weights={"jpeg": 1}),
            "has scores of ['clip', 'jpeg'], but weights of ['jpeg']",
        ),
        (
            entry("b.png", scores={"clip": 1.0}),
            "line 2 has weights {'clip': 1.0}, but the first line {'jpeg': 1.0}",
        ),
        (entry("./a.png", **GOOD), "line 2 repeats "),
    ],
)
def test_a_bad_line_is_named(tmp_path, second, sentence):
    for name in ("a.png", "b.png"):
        save(torch.zeros(3, 64, 64), tmp_path / name)
    second = second if isinstance(second, str) else json.dumps(second)
    (tmp_path / "scores.jsonl").write_text(
        json.dumps(entry("a.png", **GOOD)) + "\n" + second + "\n"
    )
    with pytest.raises(ValueError) as error:
        scored_dataset.load(tmp_path)
    assert (
        sentence in str(error.value)
        and str(tmp_path) in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_folder_that_is_not_there_says_what_there_may_be(tmp_path):
    said = (
        r"nowhere does not exist; give a folder or a list of media, of pairs, or of scores, which"
    )
    with pytest.raises(ValueError, match=rf"{said} `flowrl score MEDIA... .* makes"):
        scored_dataset.load(tmp_path / "nowhere")
    (tmp_path / "medai").mkdir()
    with pytest.raises(ValueError, match='media does not exist; the nearest name in .* is "medai"'):
        scored_dataset.load(tmp_path / "media")
    (tmp_path / "scores.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="scores.jsonl is empty"):
        scored_dataset.load(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(32, 64), (128, 128), (65, 64)])
def test_an_image_of_another_size_is_named_with_what_the_model_makes(
    tmp_path, policy, plans, height, width
):
    """128 x 128 holds four times the numbers: a reshape would take it for four images."""
    dataset = scored_dataset.load(folder_of(tmp_path, entry("a.png"), entry("b.png")))
    from_files.check(policy, dataset.paths)
    save(torch.rand(3, height, width), tmp_path / "b.png")
    said = rf"b.png is {width}x{height} pixels, but the model makes 64x64"
    with pytest.raises(ValueError, match=said):
        from_files.check(policy, dataset.paths)
    with pytest.raises(ValueError, match=said):
        from_files.rollout(policy, batch_of(dataset), dataset.items, plans, weights=dataset.weights)


def test_an_image_that_breaks_later_is_named(tmp_path, policy, plans):
    dataset = scored_dataset.load(folder_of(tmp_path, entry("a.png"), entry("b.png")))
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:60])
    with pytest.raises(ValueError, match="b.png cannot be read"):
        from_files.rollout(policy, batch_of(dataset), dataset.items, plans, weights=dataset.weights)


# ---------------------------------------------------------------------------
# references


def online(policy, texts, meta):
    batch = PromptBatch(text=texts, ids=torch.arange(len(texts)), meta=meta)
    path = plan.ode(policy.schedule(4).sigmas)
    ledger = Ledger("cpu")
    rollout = roll_out(
        policy, batch, path, group=2, guidance="none", seed=0, iteration=0, micro=64, ledger=ledger
    )
    with closing(Scorer(load_set({"jpeg": 1.0}), ledger)) as scorer:
        decode_into(scorer, policy, rollout, batch, decode=8)
        rewards = scorer.scores()
    return batch, rollout, rewards


def test_a_reference_is_one_more_scored_member_of_its_group(policy, made):
    """Of three prompts the first and the last have one: 6 leaves become 8, the new ones last."""
    folder, x0, _ = made
    first, last = (folder / "media" / f"{i}.png" for i in (0, 5))
    batch, rollout, rewards = online(
        policy, [*TEXTS, "a square"], [{"reference": str(first)}, {}, {"reference": str(last)}]
    )
    more, scored = from_files.add_references(
        policy, rollout, batch, rewards, load_set({"jpeg": 1.0}), decode=1
    )
    assert (
        more.group.tolist() == [0, 0, 1, 1, 2, 2, 0, 2]
        and more.prompt[more.leaf].tolist() == more.group.tolist()
    )
    assert torch.equal(more.leaves[:6], rollout.leaves) and torch.equal(
        scored.total[:6], rewards.total
    )
    assert (
        more.state_sigma[more.leaf].tolist() == [0.0] * 8
        and more.leaf_edge.tolist() == [-1] * 8
        and len(set(more.tree.tolist())) == 8
    )
    for leaf, name in zip(more.leaves[6:], ("media/0.png", "media/5.png"), strict=True):
        assert float((leaf - x0[name]).norm() / x0[name].norm()) < 0.2
    own = score(
        torch.stack([read_image(first), read_image(last)]), ["", ""], load_set({"jpeg": 1.0})
    ).total
    assert (
        torch.equal(scored.total[6:], own)
        and torch.equal(scored.raw["jpeg"], scored.total)
        and scored.valid.all()
    )
    names = more.leaf_key.tolist()
    assert names[:6] == rollout.leaf_key.tolist() and len(set(names)) == 8
    alone = online(policy, ["a square"], [{"reference": str(last)}])
    again, _ = from_files.add_references(
        policy, alone[1], alone[0], alone[2], load_set({"jpeg": 1.0})
    )
    assert again.leaf_key[-1] == names[7]  # whatever else is in the batch
    algorithm = NFT(NFT.Config(steps=2))
    leaf = algorithm.leaf_advantages(scored, more.group)
    r = scored.total[[0, 1, 6]]  # the reference moves its group's mean
    assert leaf[[0, 1, 6]].tolist() == pytest.approx(
        ((r - r.mean()) / (r.std(correction=0) + 1e-4)).tolist(), rel=1e-4
    )
    columns = algorithm.columns(more, algorithm.advantages(more, leaf), seed=0, iteration=0)
    assert {6, 7} <= set(columns.state.tolist()) and algorithm.score(policy, more, columns)[
        "positive"
    ].isfinite().all()


def test_without_references_nothing_changes(policy):
    batch, rollout, rewards = online(policy, TEXTS, [{}, {}])
    same = from_files.add_references(policy, rollout, batch, rewards, load_set({"jpeg": 1.0}))
    assert same[0] is rollout and same[1] is rewards


def test_a_reference_that_cannot_serve_is_named(tmp_path, policy):
    prompts = [
        {"prompt": "x"},
        {"prompt": "y", "reference": "a.png"},
        {"prompt": "z", "reference": "a.png"},
    ]
    assert data.references(prompts) == [Path("a.png")]
    with pytest.raises(
        ValueError, match=r'the prompt "x" has reference=3, which should be the path of an image'
    ):
        data.references([{"prompt": "x", "reference": 3}])
    with pytest.raises(ValueError, match=r"gone.png cannot be read: it does not exist"):
        from_files.check(policy, [tmp_path / "gone.png"])
    small_one = save(torch.rand(3, 32, 32), tmp_path / "small.png")
    batch, rollout, rewards = online(policy, ["x"], [{"reference": str(small_one)}])
    with pytest.raises(ValueError, match=r"small.png is 32x32 pixels, but the model makes 64x64"):
        from_files.add_references(policy, rollout, batch, rewards, load_set({"jpeg": 1.0}))

    def compare(media, prompts, context):
        return media.flatten(1).mean(1)

    compare.needs = {"group"}
    with pytest.raises(
        ValueError, match="compares the members of a group cannot judge a reference image"
    ):
        from_files.add_references(policy, rollout, batch, rewards, load_set({"compare": compare}))
