"""Supervised fine-tuning: its gradient by hand, dropped prompts, and runs on files."""

import json

import pytest
import small
import tiny
import torch
from torchvision.io import write_png
from toy import Fixed, ToyPolicy, noised, roll_out, slope

from flowrl.algorithms import sft
from flowrl.config.load import load_config
from flowrl.data import media
from flowrl.runtime.store import files as disk
from flowrl.types import Advantages


def make(**options):
    return sft.ALGORITHM(sft.ALGORITHM.Config(**options))


def ones(rollout):
    return Advantages(leaf=torch.ones(len(rollout.leaf)))


def test_the_gradient_by_hand_is_twice_the_error_over_dims():
    algorithm = make(prompt_dropout=0)
    rollout = roll_out(ToyPolicy(0.1), algorithm)
    rows = algorithm.columns(rollout, ones(rollout), seed=0, iteration=0)
    *_, u = noised(rollout, rows)
    v = torch.randn(len(rows), 2, requires_grad=True)
    torch.testing.assert_close(slope(algorithm, Fixed(v), rollout, rows), 2 * (v - u).detach() / 2)


def test_a_share_of_the_samples_reads_the_empty_prompts_row():
    algorithm = make(prompt_dropout=0.25)
    rollout = roll_out(ToyPolicy(0.1), algorithm, copies=400)
    rows = algorithm.columns(rollout, ones(rollout), seed=0, iteration=0)
    dropped = rows.text != rows.prompt
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.04)
    assert bool((rows.text[dropped] == rows.prompt[dropped] + 3).all())
    again = algorithm.columns(rollout, ones(rollout), seed=0, iteration=1)
    assert not torch.equal(again.text, rows.text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of the embedded model's size with their prompts, and pairs of them."""
    place = tmp_path_factory.mktemp("media")
    rows = []
    for i in range(6):
        picture = torch.full((3, 64, 64), 30 * i, dtype=torch.uint8)
        write_png(picture, str(place / f"{i}.png"))
        rows.append({"file_name": f"{i}.png", "text": "a red circle" if i % 2 else "a square"})
    disk.write(place / "metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    pairs = [
        {"prompt": "a red circle", "chosen": f"{i}.png", "rejected": f"{i + 1}.png"}
        for i in range(5)
    ]
    pairs[0]["mask"] = "5.png"  # grey, so that the errors of this pair count everywhere
    disk.write(place / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in pairs).encode())
    return place


def trainer(path, method, source, monkeypatch, **changes):
    monkeypatch.setitem(small.ALGORITHMS, method, {})
    usual = {"data__offline": str(source), "data__eval": "null", "reward__jpeg__weight": "0"}
    usual |= {"batch__prompts": "2", "batch__updates": "1", "iterations": "3"}
    return small.trainer(path, method, **usual | changes)


@pytest.mark.parametrize(
    ("method", "source", "more"),
    [
        ("sft", "", {"batch__group": "1"}),
        (
            "dpo",
            "pairs.jsonl",
            {"batch__group": "2", "data__labels": "soft", "algorithm__limit_loser": "true"},
        ),
    ],
)
def test_a_run_on_files_resumes_bit_for_bit(method, source, more, folder, tmp_path, monkeypatch):
    made = trainer(tmp_path / "whole", method, folder / source, monkeypatch, **more)
    logged = [it.metrics for it in made]
    made.save()
    assert all(m["policy/rows"] > 0 and m["policy/grad_norm"] > 0 for m in logged)
    assert not any("reward/total" in m for m in logged)  # media have no reward
    assert f"(of evaluations; trained on is {folder / source})" in made.describe()
    cut = trainer(tmp_path / "cut", method, folder / source, monkeypatch, **more)
    next(iter(cut))
    cut.save()
    rest = small.Trainer(resume=tmp_path / "cut")
    assert len(list(rest)) == 2
    rest.save()
    assert small.same(tmp_path / "whole", tmp_path / "cut")


def test_videos_are_trained_as_pictures_are(tmp_path, monkeypatch):
    """By their first frames, with prompts dropped, and as pairs with a tie."""
    policy = tiny.policy("wan21", lora={"rank": 2, "alpha": 2})
    shape = policy.decode(torch.zeros(1, *policy.latent_shape)).shape[1:]
    for i in range(2):
        media.save(torch.rand(shape[0] + i, *shape[1:]), tmp_path / f"{i}.gif", fps=8)
        (tmp_path / f"{i}.txt").write_text("a cat")
    pair = {"prompt": "a cat", "chosen": "0.gif", "rejected": "1.gif", "label": 0.5}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    for method, source, group in (("sft", ".", "1"), ("dpo", "pairs.jsonl", "2")):
        monkeypatch.setitem(small.ALGORITHMS, method, {})
        usual = {"data__offline": str(tmp_path / source), "batch__group": group}
        usual |= {"batch__prompts": "1", "iterations": "1", "data__labels": "hard"}
        usual |= {"algorithm__steps": "2", "data__eval": "null", "reward__jpeg__weight": "0"}
        usual |= {"data__labels": "soft"} if method == "dpo" else {}
        words = small.words(tmp_path / method, method, **usual)
        (it,) = small.Trainer(load_config(None, words), policy=policy)
        assert it.metrics["policy/rows"] == 2 * int(group) and it.metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("algorithm=sft", "name them with data.offline=FOLDER"),
        ("algorithm=sft data.offline=FOLDER", "climbs no reward, and jpeg would count; watch it"),
        ("algorithm=sft data.offline=FOLDER/pairs.jsonl ~", "and data.offline holds pairs ones"),
        ("algorithm=nft data.offline=FOLDER ~", "holds media without scores, and nft compares"),
        ("algorithm=dpo data.offline=FOLDER/pairs.jsonl batch.group=1 ~", "use at least 2"),
        ("algorithm=nft data.offline=FOLDER/pairs.jsonl batch.group=2 ~", "has masks, which weigh"),
        ("algorithm=sft data.offline=FOLDER data.labels=soft ~", "chosen file at reward 1 and the"),
        ("algorithm=sft data.offline=FOLDER replay.size=4 ~", "keeps new samples"),
        ("algorithm=sft data.offline=FOLDER stop.reward=0.5 ~", "of rewards that count, and here"),
        ("algorithm=sft data.offline=FOLDER draw.mode=refill ~", "samples again, and data.offline"),
    ],
)
def test_what_does_not_go_together_is_said(words, says, folder, tmp_path, monkeypatch):
    small.load_once(monkeypatch)
    given = words.replace("FOLDER", str(folder)).replace("~", "reward.jpeg.weight=0").split()
    usual = small.words(tmp_path / "run", algorithm="nft")
    kept = [w for w in usual if not w.startswith(("algorithm", "data.train", "batch.group"))]
    with pytest.raises(ValueError, match=says):
        small.Trainer(load_config(None, [*kept, "data.eval=null", *given]))
