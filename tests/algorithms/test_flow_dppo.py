"""Flow-DPPO (algorithm.trust): identities, numbers by hand, and traps; weights of steps."""

import math
from types import SimpleNamespace

import pytest
import torch
from toy import ToyPolicy, prepared

from flowrl.algorithms.common.step_weight import pulls, spreads
from flowrl.algorithms.grpo import ALGORITHM
from flowrl.config.facts import of_config
from flowrl.config.load import load_config
from flowrl.samplers import flow_sde
from flowrl.training.gradient import accumulate
from flowrl.types import Columns

SDES = {
    "flow_sde": 0.7,
    "dance_sde": 0.3,
    "precise": 0.7,
    "dance_precise": 0.3,
    "langevin": 0.7,
    "ddim": 0.7,
}
OPEN = (1e9, 1e9)  # a clip that never stops a step


def make(**options):
    return ALGORITHM(ALGORITHM.Config(**options))


def trusting(threshold, divergence="scaled", **options):
    return make(trust={"threshold": threshold, "divergence": divergence}, **options)


def moved(policy, size=0.1):
    """The policy leaves the one that sampled, which its view "old" keeps."""
    policy.update("old", 0.0)
    torch.nn.init.normal_(policy.net[2].bias, std=size)


def rows_of(adv, log_ratio, divergence):
    """Rows by hand -> (scores, batch)."""
    adv = torch.tensor(adv)
    leaf = torch.tensor(log_ratio, requires_grad=True)
    zero = torch.zeros_like(adv)
    batch = Columns({"adv": adv, "log_prob": zero, "moved": zero, "weight": zero + 1})
    return {"log_prob": leaf, "moved": torch.tensor(divergence)}, batch


def test_a_step_is_dropped_only_where_it_is_far_and_would_go_further():
    """Two rows inside; then far ones: good and likelier, good and less likely, bad and likelier,
    bad and less likely, and one without advantage."""
    adv = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 0.0]
    log_ratio = [0.2, -0.2, 0.2, -0.2, 0.2, -0.2, 0.3]
    scores, batch = rows_of(adv, log_ratio, [0.9e-3, 0.9e-3] + 4 * [1e-3] + [9.0])
    out = trusting(1e-3).loss(scores, batch)
    out.loss.backward()
    up, down = math.exp(0.2), math.exp(-0.2)
    grad = scores["log_prob"].grad.tolist()
    assert grad == pytest.approx([-up, down, 0, -down, up, 0, 0])
    assert float(out.loss.detach()) == pytest.approx(-up + down - down + up)
    found = {name: float(value) for name, value in out.metrics.items()}
    assert found["trust/outside"] == 5 and found["policy/clip_fraction"] == 2
    assert found["trust/dropped_good"] == found["trust/dropped_bad"] == 1


def test_the_largest_divergence_of_all_micro_batches_is_logged():
    own, policy = trusting(1.0), ToyPolicy(0.1)
    _, rollout, _, rows = prepared(own, policy)
    moved(policy)
    given = {"total_weight": 1.0, "backward": torch.Tensor.backward}
    whole = own.score(policy, rollout, rows)["moved"]
    for micro in (7, 1000):
        metrics = accumulate(own, policy, rollout, rows, micro=micro, **given)
        assert metrics["trust/divergence_max"].item() == pytest.approx(whole.max().item())
        assert metrics["trust/divergence"].item() == pytest.approx(whole.sum().item(), rel=1e-5)


def test_an_infinite_ratio_that_is_dropped_leaves_no_trace():
    scores, batch = rows_of([1.0, 1.0], [1e4, 0.0], [1.0, 0.0])
    out = trusting(1e-3).loss(scores, batch)
    out.loss.backward()
    assert float(out.loss.detach()) == -1 and scores["log_prob"].grad.tolist() == [0, -1]


@pytest.mark.parametrize("sde", SDES)
def test_what_a_step_s_own_noise_tells_is_the_distance_to_the_stored_old_mean(sde):
    """scaled is the exact KL with the old policy as the reference; log ratio + D = mean(noise *
    delta); raw = std^2 scaled; velocity = 2 raw / Q^2 = mean((v - v_old)^2)."""
    algorithms = {name: trusting(1.0, name, sde=sde) for name in ("scaled", "raw", "velocity")}
    policy, own = ToyPolicy(0.1), algorithms["scaled"]
    sampler = SimpleNamespace(eta=SDES[sde], init_noise="sample")
    _, rollout, _, rows = prepared(own, policy, sampler=sampler)
    first = own.score(policy, rollout, rows)
    assert first["moved"].abs().max() < 1e-10
    moved(policy)
    found = {n: a.score(policy, rollout, rows)["moved"] for n, a in algorithms.items()}
    with torch.no_grad():
        now, v = own.transition(policy, rollout, rows)
        with policy.view("old"):
            old, v_old = own.transition(policy, rollout, rows)
    delta = (now.mean - old.mean) / old.std
    scaled = delta.square().flatten(1).mean(1) / 2
    torch.testing.assert_close(found["scaled"], scaled, rtol=1e-3, atol=1e-7)
    std, pull = spreads(rollout, rows), pulls(rollout, rows)
    torch.testing.assert_close(found["raw"], std**2 * scaled, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found["velocity"], 2 * found["raw"] / pull**2, rtol=1e-4, atol=1e-7)
    gap = (v - v_old).square().flatten(1).mean(1)
    torch.testing.assert_close(found["velocity"], gap, rtol=1e-3, atol=1e-6)
    noise = (rollout.at(rows.dst) - old.mean) / old.std
    log_ratio = own.score(policy, rollout, rows)["log_prob"] - rows.log_prob
    torch.testing.assert_close(
        log_ratio.detach() + scaled, (noise * delta).flatten(1).mean(1), rtol=1e-3, atol=1e-5
    )


def test_by_hand():
    """d=2, flow_sde eta=.7, s=.75 -> .5 (shared spec's toy): D, log ratio and what is dropped."""
    x, eps = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, -0.5]])
    at = {"eta": 0.7, "sigma_cap": 1.0}
    s, t = torch.tensor(0.75), torch.tensor(0.5)
    old = flow_sde.transition(torch.tensor([[0.2, 0.4]]), x, s, t, **at)
    new = flow_sde.transition(torch.tensor([[0.3, 0.3]]), x, s, t, **at)
    y = old.sample(eps)
    d = float(((new.mean - y) / new.std + eps).square().mean() / 2)
    log_ratio = float(new.log_prob(y) - old.log_prob(y))
    assert d == pytest.approx(0.001318, abs=1e-6) and log_ratio == pytest.approx(
        -0.039825, abs=2e-6
    )
    for adv, kept in ((1.0, True), (-1.0, False)):
        out = trusting(1e-3).loss(*rows_of([adv], [log_ratio], [d]))
        assert float(out.metrics["policy/clip_fraction"]) == (not kept)


def test_states_in_bf16_would_look_as_if_the_policy_had_moved():
    """Why states, means and their difference stay fp32: D of rounding alone exceeds 1e-5."""
    y = torch.randn(4, 65536, generator=torch.Generator().manual_seed(0))
    rounding = ((y - y.bfloat16().float()) / 0.3).square().mean(1) / 2
    assert rounding.min() > 1e-5


@pytest.mark.parametrize(
    ("threshold", "how", "said"),
    [(0.6, "scaled", True), (1e-4, "scaled", False), (0.6, "velocity", False)],
)
def test_a_threshold_of_a_sum_over_dims_is_said(threshold, how, said):
    words = [f"algorithm.trust.threshold={threshold}", f"algorithm.trust.divergence={how}"]
    cfg = load_config(None, ["algorithm=flow_grpo", *words])
    policy = SimpleNamespace(latent_shape=(4, 100, 150))
    warned = [w for w in of_config(cfg, policy=policy).warnings() if "mean over latent dims" in w]
    sentence = "is divided by 60,000, which gives 1e-05"
    assert [sentence in warning for warning in warned] == [True] * said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("algorithm.ratio=guard", "ratio=guard and algorithm.trust.threshold=1e-05 are two trust"),
        ("algorithm.ratio=log", "are two trust regions"),
        ("algorithm.dual_clip=3", "dual_clip=3.0 and algorithm.trust.threshold"),
        ("algorithm.sde=cps", "and algorithm.sde=cps has none"),
        ("algorithm.plan=branch algorithm.tree.correlation=2", "tree.correlation=2.0 has none"),
        ("algorithm.trust.divergence=kl", "scaled"),
        ("algorithm.trust.threshold=0", "greater than 0"),
        ("algorithm.trust.threshold=-1", "greater than 0"),
        ("algorithm.trust.threshold=.nan", "threshold"),
    ],
)
def test_what_does_not_go_together_is_said(words, says):
    given = ["algorithm=flow_grpo", "algorithm.trust.threshold=1e-5", *words.split()]
    with pytest.raises(ValueError, match=says):
        load_config(None, given)
