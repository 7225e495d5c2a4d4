"""Optimizers by the path of their class: made, refused, and resumed to the last digit."""

import long
import pytest
import small
import torch

import flowrl
from flowrl.config.training import OptimizerConfig
from flowrl.runtime.store import checkpoint
from flowrl.training import optimizer

# counts in its group and in its parameters' states, in floats and ints, as Prodigy does
OWN = """
import torch

class Growing(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, factor=1.5, fail=False):
        super().__init__(params, {"lr": lr, "factor": factor, "d": 1e-3, "k": 0})
        self.fail = fail

    def step(self, closure=None):
        assert not self.fail, "no closure"
        for group in self.param_groups:
            group["d"] *= group["factor"]
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + group["k"]
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.data -= group["lr"] * group["d"] * state["sum"].sign() / state["n"]

class Averaging(Growing):
    def eval(self):
        pass

red = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Growing"


def test_a_class_is_given_lr_weight_decay_if_it_takes_it_and_options(own):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    o = OptimizerConfig(name="torch.optim.Muon", lr=0.1, options={"momentum": 0.5})
    group = optimizer.make(o, [weight]).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.5, 1e-4)
    made = optimizer.make(OptimizerConfig(name=own, options={"factor": 2.0}), [weight])
    assert type(made).__name__ == "Growing" and made.param_groups[0]["factor"] == 2


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("torch.optim.Adafacto", {}, 'torch.optim has no "Adafacto"; did you mean "Adafactor"'),
        ("torch.no.Adam", {}, "torch.no cannot be imported: ModuleNotFoundError"),
        ("torch.nn.Linear", {}, "no class that derives from torch.optim.Optimizer"),
        ("torch.optim.Muon", {"beta": 1}, "unexpected keyword argument 'beta'; it was given"),
        ("torch.optim.LBFGS", {}, "closure"),
        ("OWN.py:Growing", {"fail": True}, "a step fails with AssertionError: no closure"),
        ("OWN.py:Averaging", {}, "flowrl does not switch"),
        ("OWN.py:red", {}, "no class that derives"),
        ("OWN.py:Growin", {}, 'own.py has no "Growin"; did you mean "Growing"'),
    ],
)
def test_a_class_that_does_not_work_is_said_before_a_model_loads(own, name, options, says):
    name = name.replace("OWN.py", own.partition(":")[0])
    with pytest.raises(ValueError, match=f"optimizer.name={name}.*") as error:
        optimizer.try_class(OptimizerConfig(name=name, options=options))
    assert says in str(error.value)


@pytest.mark.parametrize("name", long.but(["torch.optim.Adafactor", "own"], {"own"}))
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, own, name):
    words = {"optimizer__name": own if name == "own" else name, "data__train": "shapes:eval"}
    small.trainer(tmp_path / "whole", iterations="2", **words).run()
    first = small.trainer(tmp_path / "parts", iterations="2", **words)
    next(iter(first))
    first.save()
    flowrl.train(resume=tmp_path / "parts")
    assert small.same(tmp_path / "whole", tmp_path / "parts")
    group = checkpoint.load(checkpoint.latest(tmp_path / "parts"))[0]["optimizer"]
    assert name != "own" or group["group 0/d"].item() == 1e-3 * 1.5 * 1.5


def test_the_state_of_one_class_is_not_read_by_another(own):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    names = {"w": weight}

    def stepped(name):
        made = optimizer.make(OptimizerConfig(name=name), [weight])
        weight.grad = torch.ones_like(weight)
        made.step()
        return made

    kinds = {kind: stepped(kind) for kind in ("adamw", "torch.optim.Adafactor", own)}
    packed = {kind: checkpoint.pack_optimizer(made, names) for kind, made in kinds.items()}
    for theirs in kinds:
        for ours, made in kinds.items():
            if ours != theirs:
                with pytest.raises(checkpoint.CheckpointError, match="is not converted"):
                    checkpoint.unpack_optimizer(made, names, packed[theirs])
