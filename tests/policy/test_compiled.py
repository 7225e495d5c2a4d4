"""Blocks compiled in place, by a backend that needs no compiler: torch's "eager"."""

import logging

import long
import pytest
import small
import tiny
import torch
from torch import nn

from flowrl.policy.weights import compiled
from flowrl.policy.weights.blocks import blocks
from flowrl.runtime.ledger import compiled_graphs

LORA = {"rank": 2, "alpha": 4}


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


def velocity(policy, rows=4, seed=1):
    x = torch.randn(rows, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    cond = policy.encode(tiny.PROMPTS)
    return policy.velocity(x, torch.linspace(0.8, 0.2, rows), cond, torch.arange(rows) % 2)


KINDS = {
    **dict.fromkeys(["sd15", "sdxl"], {"BasicTransformerBlock", "ResnetBlock2D"}),
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "qwenimage": {"QwenImageTransformerBlock"},
    **dict.fromkeys(["wan21", "wan22"], {"WanTransformerBlock"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_compiled_are_the_blocks_that_are_gathered_and_moved(name):
    """One rule for all: the classes that a network lists, the innermost where they are nested."""
    pipe = tiny.pipeline(name)
    network = pipe.unet if name.startswith("sd1") or name == "sdxl" else pipe.transformer
    found = compiled.compile_blocks([network]).blocks
    assert found == blocks(network) and {type(block).__name__ for block in found} == KINDS[name]


def test_without_a_list_of_classes_the_outermost_lists_hold_the_blocks():
    inner = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for _ in range(2)])
    net = nn.ModuleDict({"inner": inner, "one": nn.ModuleList([nn.Linear(1, 1)])})
    assert blocks(net) == list(inner)
    with pytest.raises(ValueError, match="Linear has no list of equal blocks; use train.compile"):
        compiled.compile_blocks([nn.Linear(1, 1)])


def test_names_views_and_values_stay_and_nothing_is_compiled_twice():
    """Gradient or none, and three views; then the same again, after an optimizer step and with rows
    that do not fill a forward."""
    policy, plain = (tiny.policy("wan21", lora=LORA) for _ in range(2))
    plain.trainable.load("default", policy.state())
    names = list(policy.trainable.named())
    for made in (policy, plain):
        made.trainable.add_view("old")
    policy.compile_blocks()
    adamw = torch.optim.AdamW(policy.trainable.named().values(), lr=1e-2)

    def pass_over(sizes):
        for rows in sizes:
            v = velocity(policy, rows)
            v.square().mean().backward()
            for view in ("default", "old", "reference"):
                with torch.no_grad(), policy.view(view), plain.view(view):
                    ours, theirs = velocity(policy, rows), velocity(plain, rows)
                    assert (ours - theirs).abs().max() < 2e-5

    pass_over((4,))
    before = compiled_graphs()
    assert before > 0
    adamw.step()
    plain.trainable.load("default", policy.state())
    pass_over((4, 3, 2))
    assert compiled_graphs() == before
    assert policy.compiled.sizes == {4} and list(policy.trainable.named()) == names
    policy.compile_blocks(False)
    assert all(b._compiled_call_impl is None for b in blocks(policy.modules["transformer"]))


@long.mark
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_blocks_are_compiled_and_leave_and_come_back(kind):
    policy, plain = (tiny.policy("flux", lora=LORA, quantize=kind) for _ in range(2))
    plain.trainable.load("default", policy.state())
    policy.compile_blocks()
    policy.turns.offload(policy.networks)
    for _ in range(2):
        with torch.no_grad():
            expected = velocity(plain)
            assert torch.allclose(velocity(policy), expected, atol=1e-5 * expected.abs().max())
        policy.turns.rest()
    grads = []
    for made in (policy, plain):
        velocity(made).square().sum().backward()
        grads.append([p.grad for p in made.trainable.named().values()])
    assert not policy.compiled.failed
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_padded_rows_change_neither_values_nor_gradients_and_are_counted():
    policy = tiny.policy("sd3", lora=LORA)
    with torch.no_grad():
        for p in policy.trainable.named().values():
            p.normal_(std=0.1)
    made = {}
    for size in (3, 4):
        policy.compiled = compiled.Compiled([], {size})
        before = policy.calls
        v = velocity(policy, 3)
        assert policy.calls - before == size * policy.branches("pipeline")
        v.square().sum().backward()
        made[size] = [v, *(p.grad for p in policy.trainable.named().values())]
        policy.trainable.modules["transformer"].zero_grad()
    for own, padded in zip(made[3], made[4], strict=True):
        if own is not None:
            assert (own - padded).abs().max() <= 1e-5 * own.abs().max()


def test_sizes_at_most_double_a_forward():
    made = compiled.Compiled([])
    assert [made.size(n) for n in (64, 40, 31, 20, 64, 5)] == [64, 64, 31, 31, 64, 5]


def test_a_backend_that_fails_is_one_line_and_the_blocks_run_as_they_are(
    monkeypatch, heard, caplog
):
    def broken(graph, inputs):
        raise OSError("no C++ compiler\nat all")

    plain, policy = tiny.policy("sd3"), tiny.policy("sd3")
    monkeypatch.setattr(compiled, "BACKEND", broken)
    policy.compile_blocks()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="flowrl"):
        for seed in (1, 2):
            assert torch.equal(velocity(policy, seed=seed), velocity(plain, seed=seed))
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("flowrl")]
    assert "could not be compiled and run as they are" in line and "no C++ compiler" in line
    assert "\n" not in line and policy.compiled.failed
    with pytest.raises(ValueError, match="expected"):  # other errors are errors
        policy.velocity(torch.zeros(1, 1), 0.5, None, torch.zeros(1, dtype=torch.int64))


@pytest.mark.long
def test_a_compiler_that_does_nothing_is_said_once(monkeypatch, caplog, heard):
    policy = tiny.policy("sd3", lora=LORA)
    policy.compile_blocks()
    monkeypatch.setattr(compiled, "FORWARDS", 3)
    for graphs, said in ((1, 0), (0, 1)):
        monkeypatch.setattr(compiled, "compiled_graphs", lambda graphs=graphs: graphs)
        policy.compiled.forwards = 0
        for _ in range(4):
            velocity(policy)
        assert caplog.text.count("train.compile=blocks has no effect") == said
    assert policy.compiled.failed and policy.compiled.size(3) == 3
    # a rehearsal, which compiles nothing, pads rows to its end
    rehearsed = compiled.Compiled([], {8})
    for _ in range(4):
        rehearsed.check()
    assert not rehearsed.failed and rehearsed.size(6) == 8


def test_a_kernel_that_does_not_start_is_the_compilers_fault():
    kernel = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    assert compiled.of_compiler(kernel()) and not compiled.of_compiler(ValueError())


@long.mark
def test_a_compiled_run_learns_what_a_plain_one_does_and_counts_its_graphs(tmp_path):
    """Also its FLOPs, in calls of their own: inside a counter nothing compiled runs."""
    made = {}
    for how in ("none", "blocks"):
        changes = {"train__compile": how, "algorithm__kl_weight": "0", "batch__micro": "4"}
        run = small.trainer(tmp_path / how, "flow_grpo", iterations="2", **changes)
        for _ in run:
            pass
        made[how] = small.weights(tmp_path / how), small.lines(tmp_path / how)
    plain, own = made["none"], made["blocks"]
    for name, value in plain[0].items():
        assert torch.allclose(value, own[0][name], rtol=1e-4, atol=1e-6), name
    graphs = [line.get("compile/graphs", 0) for line in own[1]]
    assert graphs[0] > 0 and graphs[1] == 0 and "compile/graphs" not in plain[1][0]
    for key in ("nfe/rollout", "flops/rollout"):
        assert own[1][0][key] == plain[1][0][key]
