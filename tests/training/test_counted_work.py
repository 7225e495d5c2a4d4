"""The work of one iteration, counted: network calls and rows, FLOPs, operators and bytes; and
what a tree or a window saves of chains. Reads of the device: tests/rollouts/test_no_waiting.py."""

import long
import pytest
import torch

from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.runtime.ledger import FlopCounter
from flowrl.samplers import plan as plans
from flowrl.training.budget.meter import Meter
from flowrl.training.loop import Trainer

PROMPTS, MICRO, WINNERS = 1, 4, 16  # WINNERS: rows that policy/winner_gain looks at, at most
SHARED = [
    "model=shapes-sd3",
    "reward=jpeg",
    "data=shapes",
    "data.eval=null",
    f"batch.prompts={PROMPTS}",
    f"batch.micro={MICRO}",
    "batch.updates=1",
    "batch.decode=4",
    "sampler.steps=4",
    "ema.every=1",
    "model.self_check=false",
    "guard.check_rewards=false",
    "eval.baseline_guidance=null",
    "trackers=[]",
]
FROZEN = ["algorithm.window.size=2", "algorithm.window.schedule=frozen"]
METHODS = {
    "flow_grpo": ["batch.group=4", "sampler.guidance=none"],
    "mix_grpo": ["batch.group=4", *FROZEN],
    "tree_grpo": ["batch.group=9", "sampler.guidance=none", *FROZEN],
    "nft": ["batch.group=4"],
}
# Of a prompt, by hand: states that the network sees in a rollout of 4 steps; distinct states that
# are trained; further forwards of each of these (reference, old policy); branches of guidance.
# mix_grpo: all samples start from one x_T, which is one state. tree_grpo: 1, 3, 9 and 9 states.
EXPECTED = {
    "flow_grpo": (4 * 4, 4 * 3, 1, 1),
    "mix_grpo": (1 + 4 * 3, 1 + 4, 0, 2),
    "tree_grpo": (1 + 3 + 9 + 9, 1 + 3, 0, 1),
    "nft": (4 * 4, 4 * 3, 2, 1),
}


def config(method, *more):
    return load_config(None, [*SHARED, f"algorithm={method}", *METHODS[method], *more])


def fresh_policy():
    cfg = config("nft")
    lora = cfg.train.lora.model_dump()
    return load_policy("shapes-sd3", lora=lora, device="cpu", **cfg.model.pipeline)


@pytest.fixture(scope="module")
def policy():
    return fresh_policy()


def trainer_of(cfg, policy, folder):
    """A trainer whose samples get the same rewards in each iteration, after its first one, which
    fills caches and checks ratios."""
    seen, samples = 0, PROMPTS * cfg.batch.group

    def score(media, *_):
        nonlocal seen
        seen += len(media)
        return (torch.arange(seen - len(media), seen) % samples).float().square()

    cfg = cfg.model_copy(update={"output": str(folder / "run")})
    prompts = [{"prompt": f"a red circle {k}"} for k in range(16)]
    made = Trainer(cfg, policy=policy, prompts=prompts, rewards={"fixed": score})
    made.iterate(0)
    return made


class Forwards:
    """Rows of each call of the network while inside."""

    def __init__(self, policy):
        # of its last layer: where prompts are bound, the network itself is not run
        self.layer, self.rows = policy.networks["transformer"].proj_out, []

    def __enter__(self):
        def note(module, args):
            self.rows.append(len(args[0]))

        self.hook = self.layer.register_forward_pre_hook(note)
        return self

    def __exit__(self, *error):
        self.hook.remove()


def flops_of_a_row(policy, guidance):
    """(forward, forward and backward) of one network row."""
    x, cond = torch.randn(1, *policy.latent_shape), policy.encode(["a red circle"])
    with FlopCounter() as forward:
        v = policy.velocity(x, 0.5, cond, torch.zeros(1, dtype=torch.int64), guidance=guidance)
    with FlopCounter() as backward:
        v.sum().backward()
    rows = policy.branches(guidance)
    return forward.total / rows, (forward.total + backward.total) / rows


@pytest.mark.parametrize("method", long.but(METHODS, METHODS.keys() - {"mix_grpo"}))
def test_rows_and_flops_are_those_of_the_plan_and_every_iteration_costs_the_same(
    method, policy, tmp_path
):
    trainer = trainer_of(config(method), policy, tmp_path)
    rollout, trained, more, branches = EXPECTED[method]
    books = []
    for i in (1, 2):
        with Meter() as meter, Forwards(policy) as forwards:
            metrics = trainer.iterate(i).metrics
        books.append((meter.operators, meter.bytes, meter.flops, len(forwards.rows)))
    assert books[0] == books[1]
    phases = {name: metrics[f"nfe/{name}"] for name in ("rollout", "reference", "update")}
    assert phases["rollout"] == branches * PROMPTS * rollout
    assert phases["update"] == branches * PROMPTS * trained
    winners = phases["reference"] - more * phases["update"]
    assert 0 < winners <= 2 * branches * WINNERS
    assert sum(forwards.rows) == sum(phases.values()) and max(forwards.rows) == MICRO
    guidance = trainer.source.guidance
    forward, both = flops_of_a_row(policy, guidance)
    assert metrics["flops/rollout"] == forward * phases["rollout"]
    assert metrics["flops/update"] == both * phases["update"]


@pytest.mark.parametrize(
    ("walked", "chain", "samples", "update", "iteration"),
    [("tree", 3, 27, 81 / 13, 459 / 187), ("window", 7, 24, 168 / 96, 696 / 480)],
)
def test_what_a_plan_saves_of_chains(walked, chain, samples, update, iteration):
    """8 steps. tree_grpo: 27 samples, three steps trained, 13 states for 81: 6.2 times fewer; the
    network sees 148 states for 216, and with a trained row as three forwards (its backward takes
    two) an iteration costs 2.4 times less. A window of 4 steps against chains that train 7."""
    sigmas = torch.linspace(1, 0, 9, dtype=torch.float64)
    if walked == "tree":
        plan = plans.tree(sigmas, start=0, depth=3, children=3, eta=0.7)
    else:
        plan = plans.window(sigmas, start=0, size=4, eta=0.7)
    copies = samples // plan.leaves
    states = copies * len(set(plan.parent[plan.trained].tolist()))
    seen = plans.nfe(plan, copies)
    assert samples * chain / states == pytest.approx(update)
    whole = samples * (8 + 3 * chain) / (seen + 3 * states)
    assert whole == pytest.approx(iteration)
