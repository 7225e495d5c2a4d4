"""A budget is what a run then is: rows and FLOPs to the digit, peaks of memory as torch's profiler
counts them, settings that fit a card, and one sentence where nothing can be said."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import long
import pytest
import small
import thin
import torch
from torchvision.io import write_png
from typer.testing import CliRunner

import flowrl
from flowrl.cli.main import app
from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.runtime.ledger import Ledger
from flowrl.training.budget import fit
from flowrl.training.budget.call_costs import COMPILED, Costs
from flowrl.training.budget.meter import POINTWISE, bytes_of
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.roofline import GPUS, device, of_cuda
from flowrl.training.budget.whole_run import guidances, hours

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "budget.py"
spec = importlib.util.spec_from_file_location("bench_budget", SCRIPT)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
H100 = GPUS["h100"]
CPU = replace(H100, name="cpu", cuda=False, reserve=0.0, memory=None)
METHODS = {
    "flow_grpo": ["batch.group=4"],
    "mix_grpo": ["batch.group=4", "batch.updates=2", "algorithm.window.size=2"],
    "tree_grpo": ["batch.group=9", "algorithm.window.size=2"],
    "nft": ["batch.group=4", "batch.updates=2"],
}
SMALL = ["batch.prompts=2", "batch.micro=8", "batch.decode=4", "sampler.steps=4"]


def shapes(method="mix_grpo", *more):
    return bench.config("shapes-sd3", method, *SMALL, *METHODS[method], *more)


@pytest.fixture(scope="module")
def policy():
    cfg = shapes()
    return load_policy(
        "shapes-sd3", lora=cfg.train.lora.model_dump(), device="cpu", **cfg.model.pipeline
    )


@pytest.mark.parametrize("method", long.but(METHODS, METHODS.keys() - {"mix_grpo"}))
def test_rows_flops_and_peaks_are_those_of_the_run(method, policy, tmp_path):
    told_as_run(shapes(method), policy, tmp_path)


@long.mark
def test_full_weights_are_fp32_and_their_bf16_copies_are_counted(tmp_path):
    cfg = shapes("nft", "train.mode=full", "train.precision=bf16")
    told = told_as_run(cfg, load_policy("shapes-sd3", **cfg.model.pipeline), tmp_path)
    assert told.fixed["network"] * 2**30 == 4 * told.parameters["trained"]


def test_rows_of_media_beside_the_samples_are_counted(policy, tmp_path):
    write_png(torch.zeros(3, 64, 64, dtype=torch.uint8), str(tmp_path / "a.png"))
    (tmp_path / "a.txt").write_text("a red circle")
    beside = ["anchor.data.weight=0.1", f"anchor.data.source={tmp_path}", "anchor.data.per_row=0.5"]
    cfg = shapes("nft", *beside)
    told = Planner(cfg, CPU).budget()
    prompts = [{"prompt": f"a red circle {k}"} for k in range(8)]
    rewards = {label: bench.scores(label) for label in cfg.reward}
    cfg = cfg.model_copy(update={"output": str(tmp_path / "run")})
    run = bench.Trainer(cfg, policy=policy, prompts=prompts, rewards=rewards)
    first, metrics = (run.iterate(i).metrics for i in range(2))
    assert {name: metrics.get(name, 0) for name in told.rows} == told.rows
    assert {name: first.get(name, 0) for name in told.first} == told.first
    assert told.rows["nfe/update"] == 1.5 * told.rows["policy/rows"]
    assert "reading and encoding the media of anchor.data is not counted" in told.notes


def told_as_run(cfg, policy, tmp_path):
    """Compare a budget with the run -> the budget."""
    told = Planner(cfg, CPU).budget()
    prompts = [{"prompt": f"a red circle {k}"} for k in range(4 * cfg.batch.prompts)]
    cfg = cfg.model_copy(update={"output": str(tmp_path / "run")})
    rewards = {label: bench.scores(label) for label in cfg.reward}
    run = bench.Trainer(cfg, policy=policy, prompts=prompts, rewards=rewards)
    first = run.iterate(0).metrics
    metrics, peaks = bench.allocated(run.ledger, lambda: run.iterate(1).metrics)
    above = bench.above_the_start(told)
    assert {name: metrics.get(name, 0) for name in told.rows} == told.rows
    assert {name: first.get(name, 0) for name in told.first} == told.first
    for name in ("rollout", "update"):
        assert told.phases[name].flops == pytest.approx(metrics[f"flops/{name}"], rel=1e-12)
    assert max(above.values()) == pytest.approx(max(peaks.values()), rel=0.15)
    for name in ("rollout", "update"):
        assert above[name] == pytest.approx(peaks[name], rel=0.15)
    return told


def test_what_phases_allocate_is_counted_above_what_lived_before():
    """16 MiB that stay while 8 more come and go; then 4. Each count begins anew, also after a run
    that failed."""
    ledger = Ledger()

    def run():
        with ledger.phase("rollout"):
            kept = torch.empty(2**24, dtype=torch.uint8)
            with ledger.phase("decode"):
                torch.empty(2**23, dtype=torch.uint8)
        del kept
        with ledger.phase("update"):
            torch.empty(2**22, dtype=torch.uint8)

    def fails():
        with ledger.phase("rollout"):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bench.allocated(ledger, fails)
    for _ in range(2):
        _, found = bench.allocated(ledger, run)
        assert {name: gb * 2**10 for name, gb in found.items()} == {
            "rollout": 16,
            "decode": 24,
            "update": 4,
        }
    assert not any(name.startswith("memory/rollout") for name in ledger.iteration())


@long.mark
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_peak_of_split_weights_is_that_of_two_processes(mode, tmp_path, monkeypatch):
    """When a block comes and goes differs from run to run."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    processes = importlib.import_module("processes")
    cfg = shapes("nft", "batch.prompts=4", f"train.mode={mode}", "train.shard=[denoiser]")
    told = bench.above_the_start(Planner(cfg, CPU, gpus=2).budget())

    def work():
        run = bench.trainer_of(cfg.model_copy(update={"output": str(tmp_path / "run")}))
        run.iterate(0)
        _, peaks = bench.allocated(run.ledger, lambda: run.iterate(1))
        return {"peak": torch.tensor(max(peaks.values()))}

    for found in processes.on(2, work):
        assert max(told.values()) == pytest.approx(float(found["peak"]), rel=0.15)


@pytest.fixture(scope="module")
def planner():
    return Planner(shapes("flow_grpo", "batch.prompts=4"), H100)


def test_compiled_blocks_take_one_factor_of_the_seconds_of_pointwise_operators(planner):
    call = PolicyCall(what="velocity", rows=2, grad=True)
    Costs(planner.policy, H100, low=None).of(call, planner.cfg)  # the first call may differ
    costs = Costs(planner.policy, H100, low=None)
    compiled = fit.changed(planner.cfg, {"train.compile": "blocks"})
    for a, b in zip(costs.of(call, planner.cfg), costs.of(call, compiled), strict=True):
        assert (a.flops, a.operators, a.peak, a.left) == (b.flops, b.operators, b.peak, b.left)
        shares = {kind: COMPILED if kind in POINTWISE else 1 for kind in a.kinds}
        assert b.kinds == pytest.approx({kind: shares[kind] * t for kind, t in a.kinds.items()})
        assert b.seconds == pytest.approx(sum(b.kinds.values())) and b.seconds < a.seconds
    decoded = PolicyCall(what="decode", rows=2)
    assert costs.of(decoded, planner.cfg) == costs.of(decoded, compiled)


@pytest.mark.parametrize("size", [(8, 8), (1, 8)])
def test_an_expanded_tensor_is_read_as_it_is_stored(size):
    x = torch.empty(size, device="meta").expand(8, 8)
    assert bytes_of(x) == 4 * size[0] * size[1]


def test_costs_are_affine_in_rows(planner):
    exact, lined = (Costs(planner.policy, H100, low=None) for _ in range(2))
    calls = [PolicyCall(what="velocity", rows=rows, grad=True) for rows in (2, 4, 7)]
    for call in calls[:2]:
        lined.of(call, planner.cfg)
    both = lined.of(calls[2], planner.cfg), exact.of(calls[2], planner.cfg)
    for ours, theirs in zip(*both, strict=True):
        assert ours.flops == pytest.approx(theirs.flops, rel=1e-12)
        assert ours.peak == pytest.approx(theirs.peak, rel=1e-9)
        assert ours.left == pytest.approx(theirs.left, rel=1e-9)
        assert ours.operators == theirs.operators


def test_a_weight_that_a_branch_without_a_gradient_casts_first_has_its_gradient(planner):
    """Under autocast, with guidance's other branch detached."""
    call = PolicyCall(what="velocity", rows=2, branches=2, guidance="guided", grad=True)
    costs = Costs(planner.policy, H100, low=torch.bfloat16)
    both = costs.of(call, planner.cfg)
    one = costs.of(replace(call, detach_uncond=True), planner.cfg)
    assert one[0].flops == both[0].flops and 0 < one[0].left < both[0].left
    assert one[1].flops == pytest.approx(both[1].flops / 2, rel=1e-6)


def test_small_latents_stand_in_for_large_ones(planner, monkeypatch):
    exact = planner.budget()
    monkeypatch.setattr("flowrl.training.budget.from_small.EXACT", 0)
    drawn = Planner(planner.cfg, H100).budget()
    assert drawn.rows == exact.rows
    for name, phase in exact.phases.items():
        assert drawn.phases[name].gb == pytest.approx(phase.gb, rel=0.02), name


def test_checkpointing_trades_memory_for_flops(planner):
    plain = planner.budget()
    saved = planner.budget(fit.changed(planner.cfg, {"train.gradient_checkpointing": True}))
    assert saved.phases["update"].gb < 0.6 * plain.phases["update"].gb
    half = planner.budget(fit.changed(planner.cfg, {"train.gradient_checkpointing": 0.5}))
    assert saved.phases["update"].gb < half.phases["update"].gb < plain.phases["update"].gb
    assert saved.phases["update"].flops > half.phases["update"].flops > plain.phases["update"].flops
    forward = plain.phases["update"].flops / 2.14  # its backward has no gradient of frozen weights
    assert saved.phases["update"].flops == pytest.approx(
        plain.phases["update"].flops + forward, rel=0.03
    )


def test_changes_are_proposed_until_a_card_is_large_enough(planner):
    own = planner.budget()
    card = 0.5 * own.phases["update"].gb + own.resident + H100.reserve
    found = fit.fit(planner, (card,))
    step = found.on(card)
    assert found.own.needed > card and step.budget.needed <= card
    assert step.settings
    with pytest.raises(fit.DoesNotFit, match="guard.fits=false") as error:
        fit.check(found, card)
    assert f"try {fit.as_words(step.settings)};" in str(error.value)
    fit.check(found, 1000.0)
    with pytest.raises(fit.DoesNotFit, match="no batch size is small enough"):
        fit.check(found, 0.1)


def test_train_refuses_what_its_gpu_cannot_hold(monkeypatch):
    monkeypatch.setattr(fit, "LARGE", 0)
    device = of_cuda("NVIDIA H100 80GB HBM3", 0.1)
    assert device.rates == H100.rates and device.memory == 0.1
    with pytest.raises(fit.DoesNotFit):
        fit.planned(shapes(), device)
    told = fit.planned(shapes("mix_grpo", "guard.fits=false"), device)
    assert told.startswith("budget") and "modelled" in told
    other = shapes().model_copy(
        update={"model": shapes().model.model_copy(update={"source": "some/thing"})}
    )
    assert fit.planned(other, device) is None  # unknown: it starts without a budget


@pytest.mark.long
def test_a_run_from_python_is_refused_likewise(monkeypatch, tmp_path):
    device = of_cuda("NVIDIA H100 80GB HBM3", 0.1)
    monkeypatch.setattr(fit, "this_gpu", lambda: device)
    monkeypatch.setattr(fit, "LARGE", 0)
    cfg = shapes().model_copy(update={"output": str(tmp_path / "run")})
    with pytest.raises(fit.DoesNotFit, match="guard.fits=false starts it all the same"):
        flowrl.train(cfg)
    assert not (tmp_path / "run").exists()


def test_several_processes_share_the_prompts_and_sum_gradients(planner):
    one, two = planner.budget(), Planner(planner.cfg, H100, gpus=2).budget()
    assert two.rows["nfe/rollout"] * 2 == one.rows["nfe/rollout"]
    assert two.reduced["seconds"] > 0 == one.reduced["seconds"]
    assert two.reduced["gb"] == pytest.approx(
        4 * two.parameters["trained"] * planner.cfg.batch.updates / 2**30
    )


def test_rings_between_machines_cross_over_all_adapters_of_a_machine():
    assert H100.over(1, 8) is H100
    assert H100.over(2, 16).link == H100.link  # eight adapters carry more than a link inside
    assert H100.over(2, 2).link == H100.network
    assert GPUS["rtx4090"].over(2, 8).link == 4 * GPUS["rtx4090"].network


@pytest.mark.parametrize(
    ("said", "known"),
    [
        *((name, name) for name in GPUS),
        ("RTX 4090", "rtx4090"),
        ("3090", "rtx3090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("A100-80GB", "a100"),
        ("a100_40gb", "a100-40gb"),
        ("RTX-A6000", "a6000"),
        ("H200 SXM", "h200"),
        ("Nvidia B200", "b200"),
    ],
)
def test_a_device_is_known_by_its_names(said, known):
    assert device(said) is GPUS[known]


def test_gpus_are_scaled_by_their_data_sheets():
    """bf16 with fp32 sums, without sparsity: an RTX 3090 has 71 TFLOP/s, an H100 989."""
    ratio = {name: GPUS[name].ceiling / H100.ceiling * 989 for name in GPUS}
    assert ratio == pytest.approx(
        {
            "h100": 989,
            "h200": 989,
            "b200": 2250,
            "a100": 312,
            "a100-40gb": 312,
            "l40s": 362,
            "a6000": 154.8,
            "rtx3090": 71,
            "rtx4090": 165.2,
            "rtx5090": 209.5,
        }
    )
    assert of_cuda("NVIDIA GeForce RTX 3090", 23.6).ceiling == GPUS["rtx3090"].ceiling
    assert of_cuda("NVIDIA RTX A6000", 47.5).ceiling == GPUS["a6000"].ceiling
    help_text = CliRunner().invoke(app, ["budget", "--help"]).output
    assert not [name for name in GPUS if name not in help_text]


EVALUATED = ["data.eval=shapes:eval", "eval.at_start=true", "eval.baseline_guidance=3"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval.every=0"], ["none", "none", 3.0]),
        (["eval.every=0", "eval.baseline_guidance=null"], ["none", "none"]),
        (["eval.every=5"], ["none"] * 3 + [3.0]),  # the one at 10 is the last, which comes anyway
        (["eval.every=4", "eval.at_start=false"], ["none"] * 3),
        (["data.eval=null"], []),
    ],
)
def test_evaluations_of_a_run_are_counted(words, expected):
    cfg = shapes("mix_grpo", "iterations=10", *EVALUATED, *words)
    assert guidances(cfg) == expected


def test_a_run_takes_its_iterations_evaluations_and_loading(planner):
    def plan(*words):
        few = ["batch.prompts=4", "iterations=7", "eval.every=0"]
        return planner.budget(shapes("flow_grpo", *few, *EVALUATED, *words))

    told = plan("eval.baseline_guidance=null")
    assert told.run["iterations"] == pytest.approx(7 * told.seconds)
    assert told.run["loading"] > 0
    assert told.run["total"] == pytest.approx(sum(v for k, v in told.run.items() if k != "total"))
    more = plan("eval.baseline_guidance=null", "eval.images=1024", "eval.steps=32")
    sampled = told.run["evaluations"], more.run["evaluations"]
    assert 2 * sampled[0] < sampled[1] < 4.001 * sampled[0]  # decoding takes no more steps
    assert plan().run["evaluations"] > 1.5 * told.run["evaluations"]
    assert plan("data.eval=null").run["evaluations"] == 0
    assert (hours(0), hours(61), hours(12 * 3600 - 1)) == ("0:00", "0:02", "12:00")


@pytest.mark.long
def test_another_device_has_the_rows_of_the_first_and_its_own_seconds(planner):
    other = planner.on(GPUS["rtx3090"])
    first, second = planner.budget(), other.budget()
    assert second.rows == first.rows and second.peak == first.peak
    anew = Planner(planner.cfg, GPUS["rtx3090"]).budget()
    # a network's first call may have a few operators more
    assert second.run == pytest.approx(anew.run, rel=0.03)
    gemm = [told.phases["update"].ledger["gemm_fp32"] for told in (first, second)]
    assert gemm[1] > gemm[0]
    assert planner.budget().seconds == first.seconds


def cli(*words):
    return CliRunner().invoke(app, ["budget", *words])


def test_the_command_prints_json_whose_keys_stay():
    done = small.invoke("budget", *WORDS, "--json", "-")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["fits"] and found["card_gb"] == 79.1
    assert "rehearse two iterations" in done.stderr
    assert set(found) == set(KEYS.split())
    assert set(found["phases"]["update"]) == set(PHASE.split())
    assert set(found["start"]["self-check"]) == {"rows", "encodes", "decodes", "seconds"}
    assert [*found["start"]][:2] == ["loading", "probing"] and found["start"]["probing"][
        "rows"
    ] == 4
    assert set(found["cards"]) == {"24", "40", "80", "141"} and found["cards"]["24"]["fits"]
    assert set(found["rows"]) == {"nfe/rollout", "nfe/reference", "nfe/update", "policy/rows"}
    assert "modelled" in found["basis"]
    assert found["gb"]["resident/rewards"] == 0
    assert 'reward "red": the size of its networks is not known, and not counted' in found["notes"]


RED = Path(__file__).resolve().parents[2] / "docs" / "examples" / "red.py"
WORDS = ["model=shapes-sd3", "algorithm=nft", "data=shapes", f"reward={RED}:red", *SMALL]
PHASE = "gb above_gb seconds flops rows ledger"
KEYS = (
    "model pipeline architecture device gpus basis samples parameters gb phases rows run"
    " first_iteration start all_reduce seconds flops utilisation cards notes fits card_gb"
)


def test_a_run_that_does_not_fit_is_said_first_and_has_exit_code_1(planner, monkeypatch):
    """The card is smaller than the run, than which the lighter ones are smaller."""
    own = planner.budget()
    card = 0.5 * own.phases["update"].gb + own.resident + H100.reserve
    small = replace(H100, memory=card)
    found = fit.fit(planner.on(small), (card,))
    monkeypatch.setattr("flowrl.training.budget.planner.Planner", lambda *_, **__: planner)
    monkeypatch.setattr(fit, "fit", lambda _: found)
    monkeypatch.setattr(fit, "CARDS", {7: card})
    done = cli(*WORDS)
    settings = fit.as_words(found.on(card).settings)
    first = f"does not fit h100: needs {own.needed:.1f} of {card:.1f} GB; add {settings}"
    assert done.exit_code == 1 and done.stdout.splitlines()[0] == first
    assert f"To fit 7 GB, add {settings}" in done.stdout.splitlines()
    # the hours are those of the device that was asked for
    assert "Start: before the first iteration" in done.stdout
    assert "h:min on h100" in done.stdout and "changed, see below" in done.stdout
    monkeypatch.setattr(fit, "fit", lambda _: fit.Fit(steps=found.steps[:1]))
    assert "GB; no settings of a config make it fit" in cli(*WORDS).stdout
    monkeypatch.setattr(fit, "fit", lambda _: fit.Fit(steps=found.steps[-1:]))
    done = cli(*WORDS, "model.offload=all", "model.encoders=leave")
    assert done.exit_code == 0 and done.stdout.startswith("fits h100: yes, ")


def test_weights_that_leave_are_said_to_be_off_the_card(planner):
    from flowrl.cli import budget

    cfg = shapes("nft", "model.offload=denoiser")
    step = fit.Step(settings={}, budget=planner.budget(cfg))
    stays = budget.tables(fit.Fit(steps=[step]), cfg)[2]
    cells = dict(zip(stays.columns[0].cells, stays.columns[1].cells, strict=True))
    assert cells["network"] == "off the card" and cells["rewards"] == "0.00"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*WORDS, "--device", "h10"], 'unknown device "h10"; did you mean "h100"'),
        ([*WORDS, "--device", "RTX 4080"], 'unknown device "RTX 4080"; did you mean "rtx4090"'),
        ([*WORDS, "--gpus", "0"], "--gpus 0 should be a whole number from 1"),
        ([*WORDS, "--gpus", "3"], "does not divide by 3 processes"),
        ([*WORDS, "--machines", "2"], "--machines 2 should be a whole number from 1 that divides"),
        ([*WORDS, "model.source=some/thing"], "is not known"),
        ([*WORDS, "model.source=own.py:net"], 'own.py:net" is made by code, and a budget reads'),
        ([*WORDS, "model.source=nothing"], 'unknown model "nothing"'),
        ([*WORDS, "train.parts=[text_encoder]"], "training the text encoder"),
        ([*WORDS, "reward=clip", "reward.clip.model=ViT-B-33"], 'unknown CLIP model "ViT-B-33"'),
    ],
)
def test_bad_input_is_one_sentence(words, said):
    done = cli(*words)
    assert done.exit_code == 2 and said in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


MODELS = ["sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-1.3b", "sdxl", "sd1.5"]
MODELS += ["flux.1-kontext-dev", "qwen-image-edit-2511", "cosmos-predict2.5-2b"]


@pytest.mark.parametrize("model", long.but(MODELS, {*MODELS} - {"wan2.1-1.3b"}))
def test_real_architectures_run_with_fewer_layers(model, monkeypatch):
    from flowrl.training.budget import planner as module

    def small(source):
        known = module_read(source)
        parts = {part: {**config, **thin.fewer(config)} for part, config in known.parts.items()}
        return replace(known, parts=parts)

    module_read = module.read
    monkeypatch.setattr(module, "read", small)
    cfg = load_config(
        None,
        [f"model={model}", "algorithm=nft", "reward=pickscore", "data=ocr", "batch.prompts=1"]
        + ["batch.group=2", "batch.updates=1", "sampler.steps=2", "batch.micro=2"],
    )
    found = Planner(cfg, H100).budget()
    assert found.rows["nfe/rollout"] == 2 * 2 and found.phases["update"].flops > 0
    assert found.fixed["network"] > 0 and found.seconds > 0
    assert found.phases["decode"].flops > 1e12
    assert found.fixed["rewards"] * 2**30 == 4 * 986_109_441  # PickScore's CLIP-H
    pictured = any("one square picture, 4,096 tokens" in note for note in found.notes)
    assert pictured == (model in ("flux.1-kontext-dev", "qwen-image-edit-2511"))


def test_attention_is_counted_as_torch_counts_it():
    from torch.utils.flop_counter import FlopCounterMode

    from flowrl.training.budget import meter

    def run(device):
        q = torch.randn(2, 3, 8, 4, device=device, requires_grad=True)
        k = torch.randn(2, 3, 16, 4, device=device, requires_grad=True)
        return meter.fused_attention(q, k, k).sum()

    with FlopCounterMode(display=False) as counter:
        run("cpu").backward()
    with meter.Meter(H100) as own:
        run("meta").backward()
    assert own.flops == 3.5 * 4 * 2 * 3 * 8 * 16 * 4
    assert counter.get_total_flops() in (own.flops, 0)  # 0: a torch that knows GPU kernels alone
