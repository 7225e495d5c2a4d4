"""Media of a user's own beside the method (anchor.data): one gradient, which is the sum of both."""

import json

import pytest
import small
import tiny
import torch
from torch import nn
from torchvision.io import write_png
from toy import ToyPolicy, gradient, in_fp64, prepared, roll_out
from toy_learner import ALONE, learner, term

import flowrl
from flowrl.algorithms import crd, dpo, grpo, nft
from flowrl.algorithms.common.data_anchor import DataAnchor, paired
from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.policy.module import ModulePolicy
from flowrl.rollouts import from_files
from flowrl.rollouts.data_stream import places
from flowrl.runtime.store import files as disk
from flowrl.training.update import Term
from flowrl.types import Advantages, Columns


def media(algorithm, copies=4):
    """Samples of another policy, which stand for media of three prompts."""
    return roll_out(ToyPolicy(0.5), algorithm, copies=copies, seed=7)


def ones(rollout):
    return Advantages(leaf=torch.ones(len(rollout.leaf)))


METHODS = [(grpo, {"kl_weight": 0.1}), (nft, {}), (dpo, {}), (crd, {})]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_the_two_gradients_add(method, options, monkeypatch):
    policy = ToyPolicy(0.3).double()
    algorithm = method.ALGORITHM(method.ALGORITHM.Config(**options))
    _, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    objective, data = DataAnchor(0.25), media(nft.ALGORITHM(nft.ALGORITHM.Config()))
    beside = objective.rows(data, seed=0, iteration=0)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    data, beside = in_fp64(monkeypatch, data, beside)
    own, anchor = term(algorithm, rollout, rows), term(objective, data, beside)
    plain = term(DataAnchor(1.0), data, beside)
    found = {}
    for name, terms in {"own": [own], "data": [plain], "both": [own, anchor]}.items():
        learner(policy).gradient(terms)
        found[name] = gradient(policy.net).clone()
    assert found["own"].norm() > 1e-3 and found["data"].norm() > 1e-3
    both = found["own"] + 0.25 * found["data"]
    torch.testing.assert_close(found["both"], both, rtol=1e-9, atol=1e-12)


def test_filters_of_the_method_leave_the_share_of_the_data_as_it_is(monkeypatch):
    policy, algorithm = ToyPolicy(0.3).double(), nft.ALGORITHM(nft.ALGORITHM.Config())
    _, rollout, _, rows = prepared(algorithm, ToyPolicy(0.3))
    data = media(algorithm)
    objective = DataAnchor(0.5, levels=2)
    beside = objective.rows(data, seed=0, iteration=0)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    data, beside = in_fp64(monkeypatch, data, beside)
    anchor = term(objective, data, beside)
    assert len(beside) == 24 and anchor.weight == 24
    found = []
    for kept in (rows, rows[torch.arange(0, len(rows), 5)], rows[torch.arange(0)]):
        own = term(algorithm, rollout, kept)
        learner(policy).gradient([own])
        alone = gradient(policy.net).clone() if len(kept) else 0
        learner(policy).gradient([own, anchor])
        found.append(gradient(policy.net) - alone)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


def test_rows_of_data_take_the_methods_levels_in_turn():
    """Prompt 0 has two rows of the method for three of data, prompt 1 has none, and prompt 2 more
    than are needed."""

    def columns(prompt, sigma):
        levels = torch.tensor(sigma, dtype=torch.float64)
        keys = (1000 * levels).long()
        return Columns({"prompt": torch.tensor(prompt), "sigma": levels, "noise_key": keys})

    method = columns([2, 0, 2, 0, 2, 2], [0.21, 0.01, 0.22, 0.02, 0.23, 0.24])
    rows = columns(list(range(9)), [0.9] * 9)
    found = paired(rows, method, torch.arange(9) // 3)
    sigma = [0.01, 0.02, 0.01, 0.9, 0.9, 0.9, 0.21, 0.22, 0.23]
    assert found.sigma.tolist() == sigma and found.prompt.tolist() == list(range(9))
    assert found.noise_key.tolist() == [int(1000 * s) for s in sigma]


def test_an_update_trains_the_media_of_its_own_prompts():
    algorithm = nft.ALGORITHM(nft.ALGORITHM.Config())
    data, objective = media(algorithm), DataAnchor(1.0)
    rows = objective.rows(data, seed=0, iteration=0)
    whole = Term(objective=objective, rows=rows, rollout=data, turns=torch.tensor([0, 0, 1]))
    parts = [whole.part(u, ALONE) for u in range(2)]
    assert [part.weight for part in parts] == [8, 4]
    assert parts[1].rows.prompt.unique().tolist() == [2]


@pytest.mark.parametrize(("count", "size"), [(7, 3), (5, 5), (3, 8)])
def test_epochs_follow_one_another_without_a_remainder(count, size):
    seen = torch.cat([places(count, iteration=i, size=size, seed=1) for i in range(count)])
    epochs = seen.view(size, count)
    assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1
    assert not torch.equal(seen[:count], places(count, iteration=0, size=count, seed=2))


# ---------------------------------------------------------------------------
# runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven pictures with their prompts; two rows of another list have none, one is a pair."""
    place = tmp_path_factory.mktemp("media")
    for i in range(7):
        write_png(torch.full((3, 64, 64), 30 * i, dtype=torch.uint8), str(place / f"{i}.png"))
    rows = [{"file_name": f"{i}.png", "text": f"a square {i}"} for i in range(7)]
    lists = {
        "metadata": rows,
        "empty": [*rows, {"file_name": "0.png", "text": " "}],
        "pairs": [{"prompt": "a square", "chosen": "1.png", "rejected": "2.png", "label": 0.5}],
        "scored": [{"file": "1.png", "prompt": "a square", "total": 1.0}],
    }
    for name, of in lists.items():
        text = "".join(json.dumps(row) + "\n" for row in of)
        disk.write(place / f"{name}.jsonl", text.encode())
    return place


def trainer(path, folder, method="nft", **changes):
    small.ALGORITHMS.setdefault(method, {})
    beside = {"anchor__data__source": str(folder), "anchor__data__weight": "0.1"}
    usual = {"data__eval": "null", "iterations": "2", "batch__updates": "2"}
    return small.trainer(path, method, **usual | beside | changes)


@pytest.mark.long
def test_until_it_counts_there_are_no_calls_and_the_same_numbers(folder, tmp_path, monkeypatch):
    """Neither at weight 0 nor before anchor.data.start."""

    def never(*_, **__):
        raise AssertionError("media were read")

    late = trainer(tmp_path / "late", folder, anchor__data__start="1")
    off = trainer(tmp_path / "off", folder, anchor__data__weight="0")
    none = trainer(tmp_path / "none", folder, anchor__data__weight="0", anchor__data__source="null")
    with monkeypatch.context() as patched:
        patched.setattr(from_files, "rollout", never)
        list(off), list(none)
        first = next(iter(late)).metrics
    assert small.numbers(tmp_path / "off") == small.numbers(tmp_path / "none")
    assert small.numbers(tmp_path / "late") == small.numbers(tmp_path / "off")[:1]
    assert "anchor/data_error" not in first
    late.iteration = 1
    assert late.iterate(1).metrics["anchor/data_error"] > 0


def test_a_run_resumes_bit_for_bit(folder, tmp_path):
    made = trainer(tmp_path / "whole", folder, "flow_grpo")
    assert "trained rows, and 1 x that of media, in 2 optimizer step(s)" in made.describe()
    logged = [it.metrics for it in made]
    made.save()
    # 2 prompts x 2 samples x 3 steps, and as many rows of media
    assert [m["nfe/update"] - m["policy/rows"] for m in logged] == [12, 12]
    assert all(m["anchor/data_error"] > 0 and m["policy/grad_norm"] > 0 for m in logged)
    cut = trainer(tmp_path / "cut", folder, "flow_grpo")
    next(iter(cut))
    cut.save()
    rest = small.Trainer(resume=tmp_path / "cut")
    assert len(list(rest)) == 1
    rest.save()
    assert small.same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        # pairs, of which a prompt has two rows, and a reward's gradient
        ("dpo", {"algorithm__steps": "1"}),
        ("draft", {"anchor__data__levels": "own", "reward": "preference"}),
    ],
)
def test_it_stands_beside_methods_of_every_family(method, changes, folder, tmp_path):
    scorer = {"reward__preference__rounding": "false"} if method == "draft" else {}
    made = trainer(tmp_path / "run", folder, method, **changes, **scorer)
    metrics = made.iterate(0).metrics
    assert metrics["policy/rows"] > 0 and metrics["anchor/data_error"] > 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(193, 192)

    def forward(self, x, t, cond):
        return self.layer(torch.cat([x.flatten(1), t[:, None]], 1)).view_as(x)


class Pictures(ModulePolicy):
    def decode(self, x, sigma=0.0, cond=None, rows=None):
        return torch.sigmoid(x)


def made(kind):
    """The embedded model of the runs above is a DiT."""
    torch.manual_seed(0)
    if kind != "unet":
        return {"module": Pictures, "decoded": ModulePolicy}[kind](
            Net(), (3, 8, 8), decode=torch.tanh if kind == "decoded" else None
        )
    lora = {"rank": 2, "alpha": 2, "targets": ["to_q"]}
    return load_policy(tiny.sd15(), lora=lora, **tiny.CALLS["sd15"])


@pytest.mark.parametrize("kind", ["unet", "module", "decoded"])
def test_a_unet_and_a_module_have_it_too(kind, folder, tmp_path):
    words = small.words(
        tmp_path / "run",
        reward=None,
        data__eval="null",
        iterations="1",
        anchor__data__source=str(folder),
        anchor__data__weight="1",
        data__crop="center",
    )
    live = {"policy": made(kind), "prompts": ["a", "b"], "rewards": ["jpeg"]}
    if kind == "decoded":
        with pytest.raises(ValueError, match="no way back, so media from files cannot be trained"):
            flowrl.Trainer(load_config(None, words), **live)
        return
    (it,) = flowrl.Trainer(load_config(None, words), **live)
    assert it.metrics["anchor/data_error"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("anchor.data.weight=0.1", "media of your own; name them with anchor.data.source=FOLDER"),
        ("anchor.data.weight=0.1 anchor.data.source=FOLDER/pairs.jsonl", "holds pairs rows, and"),
        ("anchor.data.weight=0.1 anchor.data.source=FOLDER/scored.jsonl", "holds scored rows, and"),
        ("anchor.data.weight=0.1 anchor.data.source=FOLDER/empty.jsonl", "1 of 8 rows of anchor"),
        ("anchor.data.weight=0.1 anchor.data.source=FOLDER/no", "no does not exist; give a folder"),
        ("anchor.data.weight=-1", "greater than or equal to 0"),
        (
            "algorithm=sft data.offline=FOLDER reward.jpeg=0 batch.group=1 anchor.data.weight=0.1"
            " anchor.data.source=FOLDER",
            "anchor.data.weight=0.1 adds the loss of algorithm=sft, which is the method already",
        ),
    ],
)
def test_what_does_not_go_together_is_said(words, says, folder, tmp_path, monkeypatch, caplog):
    caplog.clear()
    small.load_once(monkeypatch)
    given = words.replace("FOLDER", str(folder)).split()
    usual = [w for w in small.words(tmp_path / "run") if not w.startswith("data.train")]
    with pytest.raises(ValueError, match=says):
        small.Trainer(load_config(None, [*usual, "data.eval=null", *given]))
    assert "are ties" not in caplog.text  # a refusal stands alone


def test_rows_without_a_prompt_are_taken_where_they_are_meant(folder, tmp_path):
    source = str(folder / "empty.jsonl")
    trainer(tmp_path, folder, anchor__data__source=source, anchor__data__unconditional="true")
