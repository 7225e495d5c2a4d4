"""One gradient, many methods: at the behaviour policy each is a coefficient of a row.

It multiplies the gradient of the row's flow-matching error m = mean((v - u)^2), u = eps - x0. With
w = mean|v - u|, which is a constant, A the advantage, c = adv_clip and s the noise level, per row
and with v = v_old = v_ref it is

    NFT   A s / w, whatever its beta
    AWM   A / c s (m + 1e-10)^(p - 1), p = 1/4
    DGPO  A / 2
    CRD   (A - mean of A) / w, whatever beta
    DPO   +- beta / 4 of a pair's mean
    RAFT  1
    RWR   softmax(A)
"""

import pytest
import torch
from toy import Fixed, ToyPolicy, backward, in_fp64, noised, prepared, slope

from flowrl.algorithms import awm, crd, dgpo, dpo, nft, raft
from flowrl.types import Columns

MODULES = {"nft": nft, "awm": awm, "dgpo": dgpo, "crd": crd, "dpo": dpo, "raft": raft, "rwr": raft}


def make(name, **options):
    cls = MODULES[name].ALGORITHM
    return cls(
        cls.Config(
            **{
                "kl_weight": 0.0,
                "steps": 3,
                **({"select": "softmax"} if name == "rwr" else {}),
                **options,
            }
        )
    )


def of_units(value, unit):
    """(u, members) of a column whose units are equally large."""
    return torch.stack([value[unit == u] for u in torch.unique(unit)])


def coefficient(name, rows, gap, s, options):
    """The table above: what grad m of each row is multiplied by, (n,)."""
    m, w, adv = gap.square().mean(1), gap.abs().mean(1), rows.adv
    if name == "crd":
        centre = {int(u): adv[rows.unit == u].mean() for u in torch.unique(rows.unit)}
        return (adv - torch.stack([centre[int(u)] for u in rows.unit])) / w
    if name == "rwr":
        total = {int(u): adv[rows.unit == u].exp().sum() for u in torch.unique(rows.unit)}
        return adv.exp() / torch.stack([total[int(u)] for u in rows.unit])
    return {
        "nft": lambda: adv * s / w,
        "awm": lambda: adv / 5 * s * (m + 1e-10) ** -0.75,
        "dgpo": lambda: adv / 2,
        "dpo": (
            lambda: adv * options.get("beta", 100.0) / 2
        ),  # both rows of a pair carry its term: half of it a row
        "raft": lambda: torch.ones_like(adv),
    }[name]()


CASES = [
    ("nft", {}),
    ("nft", {"beta": 0.1}),
    ("nft", {"beta": 2.0}),
    ("awm", {}),
    ("awm", {"ratio": "sample"}),
    ("awm", {"off_policy": True}),
    ("dgpo", {}),
    ("dgpo", {"beta": 5000.0, "clip": None}),
    ("crd", {}),
    ("crd", {"beta": 0.1}),
    ("dpo", {}),
    ("dpo", {"beta": 5.0}),
    ("raft", {}),
    ("rwr", {}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_at_the_behaviour_policy_the_gradient_is_the_tables_coefficient_times_that_of_the_error(
    name, options, monkeypatch
):
    algorithm = make(name, **options)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, s, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    got, gap = slope(algorithm, Fixed(v), rollout, rows), v.detach() - u
    # grad m = 2 gap / D, D = 2
    expected = coefficient(name, rows, gap, s.flatten(), options)[:, None] * gap
    assert got.dtype == torch.float64 and float(expected.abs().max()) > 0.1
    # its weights are fp32
    assert float((got - expected).abs().max() / expected.abs().max()) < (
        1e-6 if name == "rwr" else 1e-9
    )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_same_holds_in_the_weights_of_a_network(name, options):
    """Which states, noise, levels and prompts the score uses: the gradient is that of sum of
    coefficient times m, written out."""
    algorithm, policy = make(name, **options), ToyPolicy(0.0)
    _, rollout, _, rows = prepared(algorithm, policy)
    _, got = backward(algorithm, policy, rollout, rows)
    _, x, s, u = noised(rollout, rows)

    class Plain:
        def score(self, policy, rollout, rows):
            return policy.velocity(x, rows.sigma, None, rows.prompt) - u

        def loss(self, gap, rows):
            out = type("Out", (), {})()
            out.loss = (
                coefficient(name, rows, gap.detach(), s.flatten(), options) * gap.square().mean(1)
            ).sum()
            return out

    _, expected = backward(Plain(), policy, rollout, rows)
    assert float(expected.abs().max()) > 0.1
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-3


@pytest.fixture
def one_batch(monkeypatch):
    """Rows that every method can read: a group of four at three levels, at unit and member columns;
    A adds up to 0 in each group."""
    _, rollout, _, rows = prepared(make("dgpo"), copies=4)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    adv = of_units(rows.adv, rows.unit)
    assert torch.allclose(adv.sum(1), torch.zeros(9, dtype=torch.float64), atol=1e-6)
    return rollout, Columns({**rows.data, "adv": rows.adv - adv.mean()})


def test_without_weights_of_errors_dgpo_crd_and_awm_have_one_gradient(one_batch):
    """Twice DGPO's = CRD's (not adaptive) = c times AWM's (uniform weighting) = sum of A grad m."""
    rollout, rows = one_batch
    _, _, _, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    plain = rows.adv[:, None] * (v.detach() - u)
    for factor, algorithm in (
        (2, make("dgpo")),
        (1, make("crd", adaptive=False, beta=0.3)),
        (5, make("awm", weighting="uniform")),
        (1, make("crd", adaptive=False, adv_clip=20.0)),
    ):
        assert torch.allclose(factor * slope(algorithm, Fixed(v), rollout, rows), plain, atol=1e-6)


def test_nfts_gradient_is_crds_times_the_noise_level(one_batch):
    """mean((x0_hat - x0)^2) / mean|x0_hat - x0| = s m / w, since x0_hat - x0 = s (u - v)."""
    rollout, rows = one_batch
    _, _, s, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    assert torch.allclose(
        slope(make("nft"), Fixed(v), rollout, rows),
        s * slope(make("crd"), Fixed(v), rollout, rows),
        atol=1e-6,
    )


@pytest.mark.parametrize("beta", [0.5, 20.0])
def test_dgpo_of_a_pair_is_dpo_wherever_the_policy_is(beta, monkeypatch):
    """Two members, A = +-1: W = sigmoid(beta / 2 (d_w - d_w_ref - d_l + d_l_ref)) is DPO's, and so
    is the gradient, over beta."""
    algorithm = make("dpo", beta=beta)
    _, rollout, _, rows = prepared(algorithm, copies=2)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    assert set(rows.members.tolist()) == {2} and set(rows.adv.tolist()) == {-1.0, 1.0}
    _, _, _, u = noised(rollout, rows)
    v, v_ref = torch.randn_like(u).requires_grad_(), torch.randn_like(u)
    pair = slope(algorithm, Fixed(v, v_ref), rollout, rows)
    group = slope(make("dgpo", beta=beta, clip=None), Fixed(v, v_ref), rollout, rows)
    assert torch.allclose(pair, beta * group, atol=1e-9) and float(pair.abs().max()) > 0.01


@pytest.mark.parametrize("name", ["awm", "dgpo", "crd", "dpo"])
def test_flipping_all_advantages_flips_the_gradient_at_the_behaviour_policy(name, monkeypatch):
    algorithm = make(name)
    _, rollout, _, rows = prepared(algorithm)
    rollout, rows = in_fp64(monkeypatch, rollout, rows)
    _, _, _, u = noised(rollout, rows)
    v = torch.randn_like(u).requires_grad_()
    up, down = (
        slope(algorithm, Fixed(v), rollout, Columns({**rows.data, "adv": sign * rows.adv}))
        for sign in (1, -1)
    )
    assert torch.allclose(up, -down, atol=1e-9) and float(up.abs().max()) > 0.1
