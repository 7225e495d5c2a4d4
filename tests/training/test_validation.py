"""The loss on held-out media and pairs: by hand, at noise that never changes."""

import dataclasses
import json
import math

import pytest
import small
import torch
from torch import nn
from torchvision.io import write_png

import flowrl
from flowrl.config.load import load_config
from flowrl.data.media import read_image
from flowrl.policy.module import ModulePolicy
from flowrl.report import run_page
from flowrl.runtime.store import files as disk
from flowrl.samplers import keys
from flowrl.training import finished, validation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(193, 192)

    def forward(self, x, t, cond):
        return self.layer(torch.cat([x.flatten(1), t[:, None]], 1)).view_as(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten 8x8 pictures; lists of media and of pairs to train on, and others that are held out."""
    place = tmp_path_factory.mktemp("media")
    for i in range(10):
        pixels = torch.randint(256, (3, 8, 8), generator=torch.Generator().manual_seed(i))
        write_png(pixels.to(torch.uint8), str(place / f"{i}.png"))
    media = [{"file": f"{i}.png", "prompt": f"a square {i}"} for i in range(10)]
    pairs = [{"prompt": "a", "chosen": f"{i}.png", "rejected": f"{i + 1}.png"} for i in range(8)]
    scored = [{"file": "1.png", "prompt": "a", "total": 1.0}]
    lists = {"train": media[:4], "held": media[4:], "shared": media[3:], "scored": scored}
    lists |= {"pairs": pairs[:4], "held-pairs": pairs[5:], "empty": [pairs[0] | {"label": 0.5}]}
    for name, rows in lists.items():
        disk.write(place / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return place


def trainer(path, folder, method="sft", policy=None, resume=None, **changes):
    torch.manual_seed(0)
    policy = policy or ModulePolicy(Net(), (3, 8, 8))
    small.ALGORITHMS.setdefault(method, {})
    pairs = method == "dpo"
    lists = ("pairs", "held-pairs") if pairs else ("train", "held")
    usual = {"data__offline": str(folder / f"{lists[0]}.jsonl"), "data__eval": "null"}
    usual |= {"data__validation": str(folder / f"{lists[1]}.jsonl"), "batch__group": 1 + pairs}
    usual |= {"reward__jpeg__weight": "0", "iterations": "4", "optimizer__lr": "0.003"}
    usual |= {"train__mode": "full", "ema__decay": "0.5"}
    cfg = load_config(None, small.words(path, method, **usual | changes))
    return flowrl.Trainer(cfg, policy=policy, resume=resume)


def by_hand(made, folder, files, prompt, method, file_of_key=None):
    """Squared errors (quarters, files) fp64 of the policy's net at the fixed levels and noise.

    Keys as the documentation of keys has them: purpose, seed of the evaluation, file and prompt.
    """
    net = made.policy.networks["module"].double()
    names = [keys.key("offline", f"0:{file}", prompt(file)) for file in file_of_key or files]
    shared = min(names) if file_of_key else None
    found = torch.zeros(4, len(files), dtype=torch.float64)
    for i, file in enumerate(files):
        name = shared if file_of_key else names[i]
        seed = keys.key(made.cfg.eval.seed, "validation")
        key = keys.key(method, seed, 0, torch.tensor([name]))
        x0 = read_image(folder / file).double()
        for q in range(4):
            u = (q + keys.uniform(keys.key("level", key, torch.tensor(q)))) / 4
            s = torch.special.ndtri(u).sigmoid()
            eps = keys.gaussian(keys.key("eps", key, torch.tensor(q)), (3, 8, 8))[0].double()
            with torch.no_grad():
                v = net((1 - s) * x0[None] + s * eps[None], s, None)[0]
            found[q, i] = (v - (eps - x0)).square().mean()
    net.float()
    return found


def test_the_loss_by_hand_and_of_each_quarter(folder, tmp_path):
    made = trainer(tmp_path / "run", folder)
    found = validation.losses(made.parts)
    files = [f"{i}.png" for i in range(4, 10)]
    error = by_hand(made, folder, files, lambda f: f"a square {f[0]}", "sft")
    assert found["validation/loss"] == pytest.approx(error.mean().item(), rel=1e-5)
    for q in range(4):
        mean = error[q].mean().item()
        assert found[f"validation/loss/q{q + 1}"] == pytest.approx(mean, rel=1e-5)
    assert len(found) == 5 and found == validation.losses(made.parts)


def test_neither_the_runs_seed_nor_its_batches_change_it(folder, tmp_path):
    one = validation.losses(trainer(tmp_path / "a", folder).parts)
    changes = {"seed": "7", "batch__states": "host", "batch__micro": "1"}
    changes |= {"algorithm__levels": "schedule", "algorithm__kl_weight": "0.1"}
    other = validation.losses(trainer(tmp_path / "b", folder, **changes).parts)
    assert other == pytest.approx(one, rel=1e-5)
    third = validation.losses(trainer(tmp_path / "c", folder, eval__seed="1").parts)
    assert abs(third["validation/loss"] - one["validation/loss"]) > 1e-4


def test_it_is_of_the_averaged_weights_which_it_leaves_as_they_are(folder, tmp_path):
    made = trainer(tmp_path / "run", folder)
    before = validation.losses(made.parts)
    weight = made.policy.networks["module"].layer.weight
    with torch.no_grad():
        weight += 1
    kept = weight.clone()
    assert validation.losses(made.parts) == before and torch.equal(weight, kept)


def test_pairs_have_loss_margin_and_accuracy_by_hand(folder, tmp_path):
    """h = (e_l - e_l_ref) - (e_w - e_w_ref), L = -log sigmoid(beta h / 2), log 2 at the start."""
    made = trainer(tmp_path / "run", folder, "dpo", algorithm__beta="20", algorithm__shift="1")
    found = validation.losses(made.parts)
    assert found["validation/loss"] == pytest.approx(math.log(2)) and not found["validation/margin"]
    pairs = [(f"{i}.png", f"{i + 1}.png") for i in (5, 6, 7)]

    def errors():
        return [by_hand(made, folder, pair, lambda f: "a", "dpo", pair) for pair in pairs]

    reference = errors()
    with torch.no_grad():
        for p in made.policy.networks["module"].parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    made.parts.weights.ema.load_state_dict(
        {n: p.detach() for n, p in made.parts.weights.parameters.items()} | {"step": 0}
    )
    now = errors()
    h = torch.stack([(n - r)[:, 1] - (n - r)[:, 0] for n, r in zip(now, reference, strict=True)])
    found = validation.losses(made.parts)
    loss = -nn.functional.logsigmoid(10 * h).mean().item()
    assert found["validation/loss"] == pytest.approx(loss, rel=1e-5)
    assert found["validation/margin"] == pytest.approx(h.mean().item(), abs=1e-6)
    assert found["validation/accuracy"] == pytest.approx((h > 0).double().mean().item())
    winner = torch.stack([n[:, 0] for n in now]).mean().item()
    assert found["validation/winner_error"] == pytest.approx(winner, rel=1e-5)


class Half:
    """One of two processes, which adds its sums to those of the one before."""

    def __init__(self, rank, sums):
        self.rank, self.sums = rank, sums

    def share(self, count):
        return slice(self.rank, count, 2)

    def sum_metrics(self, metrics):
        self.sums.append(metrics)
        return {k: sum(float(part[k]) for part in self.sums) for k in metrics}


def test_two_processes_find_what_one_does(folder, tmp_path):
    parts = trainer(tmp_path / "run", folder, "dpo").parts
    one, sums = validation.losses(parts), []
    for rank in range(2):
        own = dataclasses.replace(parts.source, world=Half(rank, sums))
        two = validation.losses(dataclasses.replace(parts, source=own))
    assert [part["weight"] for part in sums] == [16, 8] and two == pytest.approx(one, rel=1e-6)


def logged(run):
    return {line["iteration"]: line.get("validation/loss") for line in small.lines(run)}


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_run_logs_it_before_while_and_after_and_resumes_bit_for_bit(method, folder, tmp_path):
    held = folder / ("pairs.jsonl" if method == "dpo" else "train.jsonl")
    how = {"eval__every": "2", "data__validation": str(held), "iterations": "5"}
    how |= {"batch__prompts": "4"}
    whole = trainer(tmp_path / "whole", folder, method, **how)
    list(whole)
    whole.save()
    found = logged(tmp_path / "whole")
    assert [i for i, loss in found.items() if loss] == [0, 2, 4, 5] and len(found) == 6
    assert found[5] < found[0]  # the rows are those of training
    cut = trainer(tmp_path / "cut", folder, method, **how)
    iterations = iter(cut)
    next(iterations), next(iterations), next(iterations)
    cut.save()
    rest = trainer(tmp_path / "cut", folder, method, resume=tmp_path / "cut", **how)
    list(rest)
    rest.save()
    assert small.same(tmp_path / "whole", tmp_path / "cut")
    if method == "sft":
        page = run_page.build(tmp_path / "cut").read_text()
        assert "validation/loss" in page and "<span>iterations</span>5<" in page


def test_the_row_before_training_is_no_iteration_of_a_finished_run(folder, tmp_path, monkeypatch):
    made = trainer(tmp_path / "run", folder, iterations="2")
    made.run()
    assert list(logged(made.path)) == [0, 1, 2]
    monkeypatch.setattr(finished, "check_given", lambda *_: None)  # its policy is a live one
    found = finished.finished(made.cfg, made.path)
    assert found is not None and "all 2 iterations are done" in finished.sentence(found)


@pytest.mark.parametrize(
    ("method", "name", "says"),
    [
        ("sft", "held-pairs", "data.validation holds pairs rows; it takes media for algorithm=sft"),
        ("dpo", "held", "data.validation holds media rows; it takes media for algorithm=sft or"),
        ("sft", "scored", "data.validation holds scored rows; it takes media"),
        ("sft", "nowhere", "nowhere.jsonl does not exist"),
        ("dpo", "empty", "1 of 1 pairs of .* are ties"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(method, name, says, folder, tmp_path):
    with pytest.raises(ValueError, match=says):
        trainer(tmp_path / "run", folder, method, data__validation=str(folder / f"{name}.jsonl"))


def test_rows_that_are_trained_on_are_said(folder, tmp_path, caplog):
    trainer(tmp_path / "run", folder, data__validation=str(folder / "shared.jsonl"))
    said = "1 of the 7 files of data.validation are in data.offline, too, as "
    assert said in caplog.text and "3.png: its loss shows in part" in caplog.text
