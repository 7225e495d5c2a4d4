"""The benchmark's queue and its page: what is run next, which setting wins, and that the page says
what the cells hold."""

import json
import shutil
import sys
from types import SimpleNamespace

import cells
import gains
import long
import pytest
import quickstart_seeds
import results_page
import small
from at_inference import turned

from flowrl.config import build
from flowrl.config.load import load_config
from flowrl.data.prompts import load_prompts
from flowrl.samplers import sigmas
from flowrl.training.loop import Trainer

BASE = "1000" * 87  # a quarter of the images right


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The cells' module, with an empty folder of cells."""
    shutil.copytree(cells.FOLDER.parent / "algorithms", tmp_path / "algorithms")
    monkeypatch.setattr(cells, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    return cells


def finish(bench, cell, strict, *, images=BASE):
    """Write the result of a cell, as a run would."""
    whole = cell["kind"] in ("run", "claim")
    score = {f"{bench.world_of(cell)}/strict": {"mean": strict}, "preference": {"mean": strict}}
    curve = [
        {
            "iteration": i + 1,
            "calls": 100.0 * (i + 1),
            "rows": 10.0,
            "seconds": 2.0 * (i + 1),
            "strict": 0.1 * i,
        }
        for i in range(4)
    ]
    record = {**cell, "commit": "abc", "spent": {"seconds": 8.0}, "curve": curve}
    record |= {"before": score if whole else None, "after": score}
    record |= {"images_before": BASE if whole else None, "images": images}
    record |= {"paired": {"preference": {"difference": 0.7}}}
    record |= {"rlg": [{"rlg": w, "strict": 0.5, "distance": w / 10} for w in bench.RLG]}
    bench.path_of(cell).parent.mkdir(parents=True, exist_ok=True)
    bench.path_of(cell).write_text(json.dumps(record))


def tuned(bench, method):
    """Finish a method's tuning: the rate in the middle is the best."""
    while unknown := [c for c in bench.tuning(method) if not bench.result(c)]:
        for cell in unknown:
            finish(bench, cell, 0.4 if "optimizer.lr=3e-3" in cell["words"] else 0.3)


def planned(cell):
    cfg = load_config(None, cell["settings"])
    algorithm = build.make_algorithm(cfg)
    plan = algorithm.plan(sigmas.sd3(cfg.sampler.steps), sampler=cfg.sampler, iteration=0, seed=0)
    algorithm.check(plan)
    return cfg, plan


def test_every_method_has_a_valid_cell_and_all_share_what_is_compared(bench):
    shared, lora = set(), set()
    for method in bench.METHODS | bench.CLIMBING:
        cfg, plan = planned(bench.tuning(method)[0])
        assert cfg.batch.group % plan.leaves == 0 and cfg.batch.prompts % cfg.batch.updates == 0
        batch = (cfg.batch.prompts * cfg.batch.group, cfg.sampler.steps)
        if method in bench.FIFTH | bench.SIXTH:  # files or teachers: the verifier is only read
            assert cfg.reward["shapes"]["weight"] == 0
        elif method in bench.METHODS:
            batch = (cfg.batch.prompts, cfg.sampler.steps)
            shared.add((cfg.model.source, *batch, *map(str, (cfg.reward, cfg.eval, cfg.ema))))
        lora.add(str(cfg.train) if method not in bench.THIRD else "")
    assert len(shared) == 1 and len(bench.METHODS) == 31
    assert len(lora) == 2  # that of the denoiser, but where the method is to train something else
    assert set(bench.CLIPS) <= set(bench.METHODS)


def test_every_claim_has_a_valid_cell(bench):
    for method, *_ in bench.CLAIMS.values():
        tuned(bench, method)
    for name in bench.CLAIMS:
        runs = bench.claims(name)
        assert {run["claim"] for run in runs} == {name}
        usual = (0, 1, 2) if name in bench.SEEDED else (0,)
        assert tuple(run["seed"] for run in runs) == bench.MORE.get(name, usual)
        planned(runs[0])


def test_what_is_timed_is_what_is_run(bench):
    tuned(bench, "nft")
    run, timed = bench.finals("nft")[0], bench.timing("nft")[0]
    assert timed["settings"] == run["settings"]
    assert timed["name"] == run["name"].replace("run-", "time-")
    assert {"dance_25_14", "branch_mix_20"} < set(bench.TIMED_CLAIMS)
    assert not any("steps" in name for name in bench.TIMED_CLAIMS)


def test_a_proxy_is_trained_on_and_the_verifier_read(bench):
    for name, outcome in (("proxy_points", "reward"), ("proxy_wins", "win_rate")):
        method, words, *_ = bench.CLAIMS[name]
        cfg, _ = planned(bench.cell(method, words, seed=0, budget=1, kind="claim"))
        assert cfg.reward == {
            "clip": {"weight": 1.0, "preset": "shapes"},
            "shapes": {"weight": 0, "reading": "strict"},
        }
        assert cfg.algorithm["outcome"] == outcome


def test_tuning_tries_the_other_clip_at_the_best_rate_and_runs_take_the_best_of_all(bench):
    rates = bench.tuning("mix_grpo")
    assert len(rates) == 3 and not bench.finals("mix_grpo")
    for cell, strict in zip(rates, (0.2, 0.4, 0.3), strict=True):
        finish(bench, cell, strict)
    *_, other = bench.tuning("mix_grpo")
    assert other["words"][0] == rates[1]["words"][0]
    assert "algorithm.clip=[1e-3,1e-3]" in other["words"]
    assert not bench.finals("mix_grpo")
    finish(bench, other, 0.35)
    runs = bench.finals("mix_grpo")
    assert [c["seed"] for c in runs] == [0, 1, 2]
    assert all(c["words"] == ["optimizer.lr=0.001"] for c in runs)  # a third of 3e-3
    assert len({c["name"] for c in runs}) == 3 and all(c["budget"] == bench.BUDGET for c in runs)


def test_settings_are_chosen_on_other_images_than_they_are_judged_by(bench):
    tune = load_config(None, bench.tuning("nft")[0]["settings"])
    tuned(bench, "nft")
    run = load_config(None, bench.finals("nft")[0]["settings"])
    assert (tune.data.eval, tune.eval.seed) == ("shapes:train", 1)
    assert (run.data.eval, run.eval.seed) == ("shapes:eval", 0)


def test_a_cell_is_named_by_all_that_it_runs(bench, monkeypatch):
    one = bench.tuning("nft")[0]["name"]
    assert bench.tuning("nft")[0]["name"] == one
    monkeypatch.setattr(bench, "COMMON", [*bench.COMMON, "batch.micro=64"])
    assert bench.tuning("nft")[0]["name"] != one


def test_the_page_holds_what_the_cells_hold(bench):
    tuned(bench, "nft")
    better = "".join(
        "1" if mark == "1" or (i < 116 and i % 4 == 1) else "0" for i, mark in enumerate(BASE)
    )
    gain = better.count("1") / 348 - 0.25  # 29 images more
    for cell in bench.finals("nft"):
        finish(bench, cell, 0.5, images=better)
    results_page.write()
    assert (bench.FOLDER / "strict-by-calls.svg").exists()
    assert not (bench.FOLDER / "strict-by-seconds.svg").exists()  # nothing was timed
    finish(bench, bench.timing("nft")[0], 0.0)
    results_page.write()
    page = results_page.PAGE.read_text()
    row = next(line for line in page.splitlines() if "[nft](algorithms/nft.md)" in line)
    assert f"| {gain:+.3f} |" in row and "0.500, 0.500, 0.500" in row
    assert "| 8 |" in row  # 4 x 100 rows of 0.02 s
    assert f"| [{gain:+.3f}, {gain:+.3f}] | yes |" in row  # seeds that are equal
    low, high = (float(x) for x in row.split("[+")[2].split("]")[0].split(", +"))
    assert low < gain < high and gain == pytest.approx(29 / 348)
    assert "| nft | 0.300 (1e-3) | **0.400** (3e-3) | 0.300 (1e-2) |" in page
    assert (bench.FOLDER / "strict-by-seconds.svg").exists()
    assert (bench.FOLDER / "gain.svg").exists()
    said = (results_page.PAGE.parent / "algorithms" / "nft.md").read_text()
    assert f"gain {gain:+.3f}, [+{low:.3f}, +{high:.3f}] over texts" in said
    assert said.count(results_page.BEGIN) == said.count(results_page.END) == 1


def seeds_of(*gains):
    """Runs with these gains, one a seed."""
    right = [f"{'1' * (200 + round(1000 * g)):0<1000}" for g in gains]
    return [{"images_before": f"{'1' * 200:0<1000}", "images": images} for images in right]


@pytest.mark.parametrize(
    ("runs", "texts", "said"),
    [
        ((0.098, 0.0, 0.078), 0.02, "open"),  # two seeds of three
        ((0.206, 0.221, 0.198), 0.02, "yes"),
        ((0.003, 0.003, 0.003), 0.004, "open"),  # all by the same picture
        ((-0.03, -0.04, -0.035), 0.02, "no"),
        ((-0.03, -0.04, -0.035), 0.04, "open"),
        ((0.206, 0.221), 0.02, "open"),  # too few seeds, whatever they say
        ((0.206,), 0.02, "open"),
    ],
)
def test_a_method_learns_where_seeds_and_texts_agree(bench, runs, texts, said):
    """texts: half of the interval over texts."""
    mean = sum(runs) / len(runs)
    over = gains.Gain(mean, mean - texts, mean + texts)
    assert gains.learns(seeds_of(*runs), over) == said


def test_intervals_over_seeds_are_students(bench):
    """.098, 0, .078: mean .0587, deviation .0518, t 4.303: .0587 +- 4.303 .0518 / sqrt 3."""
    over = gains.seed_gain(seeds_of(0.098, 0.0, 0.078))
    assert str(over) == "+0.059 [-0.070, +0.187]"
    assert gains.seed_gain(seeds_of(0.1)) is None
    assert gains.over_seeds(seeds_of(0.1)) == "one seed"
    assert gains.over_seeds(seeds_of(0.1, 0.1)) == "[+0.100, +0.100], 2 seeds"
    assert gains.over_seeds(seeds_of(0.1, 0.1, 0.1)) == "[+0.100, +0.100]"


def test_a_best_rate_at_an_edge_of_what_was_tried_is_marked(bench, monkeypatch):
    monkeypatch.setattr(bench, "METHODS", {"nft": bench.METHODS["nft"]})
    assert not results_page.at_edge("nft")  # nothing was tried
    for best, edge in ((0, True), (1, False), (2, True)):
        shutil.rmtree(bench.FOLDER / "cells", ignore_errors=True)
        for i, cell in enumerate(bench.tuning("nft")):
            finish(bench, cell, 0.4 if i == best else 0.3)
        assert results_page.at_edge("nft") == edge
        assert ("edge" in results_page.tuning_table()) == edge


def test_tuning_goes_on_until_the_best_rate_has_a_neighbour_on_both_sides(bench, monkeypatch):

    def tried():
        return [dict(w.split("=") for w in c["words"])["optimizer.lr"] for c in bench.tuning("nft")]

    assert tried() == bench.RATES
    for strict in (0.5, 0.3, 0.2):
        unknown = [c for c in bench.tuning("nft") if not bench.result(c)]
        finish(bench, unknown[0], strict)
    assert tried() == ["3e-4", *bench.RATES] and not bench.finals("nft")
    finish(bench, bench.tuning("nft")[0], 0.6)
    assert tried() == ["1e-4", "3e-4", *bench.RATES]
    finish(bench, bench.tuning("nft")[0], 0.4)
    assert tried() == ["1e-4", "3e-4", *bench.RATES]
    assert bench.finals("nft")[0]["words"] == ["optimizer.lr=0.0001"]  # a third of 3e-4


def test_a_rate_at_the_end_of_the_ladder_is_the_last_one_tried(bench, monkeypatch):
    for _ in bench.LADDER:
        for c in bench.tuning("nft"):
            finish(bench, c, bench.rates("nft").index(c["words"][0].partition("=")[2]))
    assert bench.rates("nft") == bench.LADDER[bench.LADDER.index("1e-3") :]


def test_runs_that_set_what_tuning_chooses_are_marked_as_set_by_hand(bench):
    hand = {name for name in bench.CLAIMS if results_page.by_hand(name)}
    own = ("_few", "_many", *(f"cps_{steps}" for steps in (4, 8, 16)))
    more = {*bench.MASKED, "edit_nft", "video_nft"}  # at the rates of their quickstarts
    assert hand == {name for name in bench.CLAIMS if name.endswith(own) or name in more}
    tuned(bench, "nft")
    finish(bench, bench.claims("nft_1_steps")[0], 0.4)
    table = results_page.claims_table(
        {"nft_1_steps": [bench.result(bench.claims("nft_1_steps")[0])]}
    )
    assert "| tuned | 25,000 |" in table and "| one seed |" in table


def test_intervals_resample_the_texts_that_evaluation_drew(bench):
    prompts = load_prompts("shapes:eval")
    texts = gains.texts_of("shapes:eval", 348)
    assert len(texts) == 348 and len(set(texts)) == 87 < len(prompts) == 128
    assert texts == [prompts[i % 128]["prompt"] for i in range(348)]  # as Evaluation.prompt


def test_the_page_leaves_out_claims_of_older_settings(bench, monkeypatch):
    monkeypatch.setattr(results_page, "show_plots", lambda done: "")
    tuned(bench, "nft")
    finish(bench, bench.claims("nft_1_steps")[0], 0.4)
    results_page.write()
    assert "| nft_1_steps |" in results_page.PAGE.read_text()
    monkeypatch.setattr(bench, "COMMON", [*bench.COMMON, "batch.micro=64"])
    tuned(bench, "nft")
    results_page.write()
    assert "| nft_1_steps |" not in results_page.PAGE.read_text()


def test_the_page_shows_proxy_and_verifier_of_each_run(bench):
    gain = {
        "clip": {"difference": 0.2, "ci": [0.1, 0.3]},
        "shapes/strict": {"difference": -0.05, "ci": [-0.1, 0.0]},
    }
    cell = {
        "claim": "proxy_points",
        "seed": 1,
        "paired": gain,
        "curve": [{"strict": 0.31}, {}],
        "after": {"shapes/strict": {"mean": 0.25}},
    }
    *_, row = results_page.proxy_table([cell]).splitlines()
    assert (
        row == "| proxy_points | 1 | +0.200 [+0.100, +0.300] | -0.050 [-0.100, +0.000] | 0.310 |"
        " 0.250 |"
    )


def test_ways_to_train_on_a_proxy_are_compared_seed_by_seed(bench):
    none, some = "1000" * 87, "1100" * 87
    runs = [
        {
            "claim": name,
            "seed": seed,
            "images": images,
            "after": {"shapes/strict": {"mean": images.count("1") / 348}},
        }
        for name, seed, images in (
            ("proxy_points", 0, none),
            ("proxy_points", 2, none),
            ("proxy_wins", 0, some),
            ("proxy_wins", 1, some),
        )
    ]
    said = results_page.proxy_difference(runs)
    assert "points: +0.250 [" in said and said.endswith("by seed +0.250.")
    assert results_page.proxy_difference(runs[:2]) == ""


def test_every_method_has_improved_significantly_in_a_committed_run():
    """On held-out prompts at the shared settings, or, where that is too much for it, on the eight
    prompts it trained on; branch_grpo with twenty steps."""
    low = {}
    for method in cells.FIRST | cells.SECOND:
        found = [gains.gain(gains.results(cells.finals(method)))]
        if (claim := f"{method}_few") in cells.CLAIMS:
            found += [gains.few_gain(c) for c in gains.results(cells.claims(claim))]
        if method == "branch_grpo":
            found.append(gains.gain(gains.results(cells.claims("branch_20"))))
        low[method] = max(own.low for own in found)
    assert len(low) == 23 and not {method for method, value in low.items() if value <= 0}


@pytest.mark.parametrize(
    "method", long.but(["mix_grpo_flash", "tree_grpo", "dpo", "nft"], ["mix_grpo_flash", "dpo"])
)
def test_the_code_as_it_is_makes_the_committed_runs(tmp_path, monkeypatch, method):
    """Their first iteration: the samples' mean reward, the gradient's size, and by winner_gain its
    direction."""
    cell = cells.result(cells.tune(method, [f"optimizer.lr={cells.RATES[0]}"]))
    only = ["eval.at_start=false", "guard.check_rewards=false", f"output={tmp_path}/run"]
    trainer, then = Trainer(load_config(None, [*cell["settings"], *only])), cell["curve"][0]
    now = next(iter(trainer)).metrics
    assert now["policy/rows"] == then["rows"] > 0
    for key, rel in (
        ("reward/total", 0.1),
        ("policy/grad_norm", 0.03),
        ("policy/winner_gain", 0.1),
    ):
        assert now[key] == pytest.approx(then[key], rel=rel), key
    assert then["policy/winner_gain"] > 0


def test_the_words_that_a_committed_cell_records_are_the_run_that_its_name_says():
    """Where a default changes, its runs are to be made anew."""
    paths = sorted((cells.FOLDER / "cells").glob("run-*-0-*.json"))
    assert len(paths) >= 23
    for path in paths:
        cell = json.loads(path.read_text())
        digest = cells.digest_of(tuple(cell["settings"]), cell["budget"])
        assert cell["name"] == path.stem == f"run-{cell['method']}-0-{digest}"


def test_the_quickstarts_seeds_may_be_followed_by_overrides(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        quickstart_seeds, "run", lambda seed, folder, overrides: asked.append((seed, overrides))
    )
    monkeypatch.setattr(quickstart_seeds, "row", lambda seed, folder: "")
    monkeypatch.setattr(quickstart_seeds, "tasks", lambda folders: [])
    for words in (
        ["--seeds", "0", "2", "algorithm=awm", "--output", str(tmp_path)],
        ["optimizer.lr=5e-4", "--seeds", "1"],
    ):
        monkeypatch.setattr(sys, "argv", ["quickstart_seeds.py", *words])
        quickstart_seeds.main()
    assert asked == [(0, ["algorithm=awm"]), (2, ["algorithm=awm"]), (1, ["optimizer.lr=5e-4"])]


def test_a_seed_of_the_quickstart_is_a_run_of_the_command_line(tmp_path, monkeypatch):
    def run(command, check):
        assert command[:3] == [sys.executable, "-m", "flowrl"] and check
        assert small.invoke(*command[3:]).exit_code == 0

    monkeypatch.setattr(quickstart_seeds, "subprocess", SimpleNamespace(run=run))
    tiny = ["iterations=1", "batch.group=8", "batch.prompts=2", "algorithm.steps=1"]
    tiny += [
        "reward.shapes.reading=partial",
        "sampler.steps=4",
        "eval.steps=1",
        "eval.images=4",
        "model.self_check=false",
    ]
    folder = tmp_path / "run"
    quickstart_seeds.run(0, folder, [*tiny, "guard.check_rewards=false"])
    assert quickstart_seeds.row(0, folder).startswith("| 0 | ")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    by_row = {r["name"]: r["tasks"]["shapes/strict"] for r in evaluation["rows"]}
    heads, _, *lines = quickstart_seeds.tasks([folder, folder])
    assert heads == f"| task | {' | '.join(by_row)} |"
    task = next(iter(by_row["after"]))
    means = " | ".join(f"{of_task[task]:.2f}" for of_task in by_row.values())
    assert f"| {task} | {means} |" in lines


def beyond_cells(bench):
    """Finished runs of nft and of all that is compared with it, of three seeds."""
    for method in ("nft", "tree_grpo", *bench.CLIMBING):
        tuned(bench, method)
    for cell in bench.finals("nft"):
        finish(bench, cell, 0.25)
    for name in bench.BEYOND:
        for cell in bench.claims(name):
            finish(bench, cell, 0.5, images="1100" * 87)
    for cell in (c for method in bench.CLIMBING for c in bench.finals(method)):
        finish(bench, cell, 0.5)
    for name, what in bench.SEARCHES.items():
        for cell in bench.searches(name):
            made = {**cell, "calls": 8.0 * what.samples, "images_before": BASE, "images": BASE}
            bench.path_of(cell).write_text(json.dumps(made))


def test_what_goes_beyond_policy_gradients_has_its_tables(bench):
    beyond_cells(bench)
    results_page.write()
    page = results_page.PAGE.read_text()
    assert "| text_alone | +0.250 | [+0.250, +0.250] | 0.500, 0.500, 0.500 | +0.250 [" in page
    assert "| before | " in page and "| two_tasks | " in page
    assert "| draft | draft, 0.001 | +0.700 | [+0.700, +0.700] | +0.000 |" in page
    assert "| 1e-3 | 0.500 at 0.050 | 0.500 at 0.100 |" in page
    assert "| best_of_28 | 224 | 0 | +0.000 |" in page
    assert "| nft | 8 | 400 | +0.000 |" in page


def test_other_models_are_judged_in_their_world_and_stand_beside_shapes_sd3(bench):
    tuned(bench, "nft")
    for planned_run in bench.finals("nft"):
        finish(bench, planned_run, 0.5, images="1100" * 87)
    for name in ("edit_nft", "masked_trace_rl"):
        for planned_run in bench.claims(name):
            finish(bench, planned_run, 0.75, images="1110" * 87)
    finish(bench, bench.timing("edit_nft")[0], 0.0)
    cfg = load_config(None, bench.claims("edit_nft")[0]["settings"])
    assert cfg.data.eval == "shapes_edit:eval"
    assert cfg.reward == {"shapes_edit": {"weight": 1.0, "reading": "strict"}}
    results_page.write()
    page = results_page.PAGE.read_text()
    assert "| shapes-edit | nft | 1e-3, by hand | 50,000 | +0.500 | [+0.500, +0.500] |" in page
    # nft's own gain beside it, and minutes beside other work and alone
    assert "| 0.750, 0.750, 0.750 | +0.250 | 4 | 0.1 | 0.1 |" in page
    masked = page.partition("## Masked generators")[2]
    assert "| shapes-masked | trace_rl | 3e-3, by hand | 150,000 | +0.500 |" in masked
    assert "| 4 | 0.1 |  |" in masked
    assert (
        "edit_nft" not in page.partition("## Runs for the papers' claims")[2].partition("\n## ")[0]
    )


def test_a_climbing_method_is_tuned_by_the_reward_that_it_climbs(bench):
    """And every other one by the verifier."""
    after = {"preference": {"mean": 2.0}, "shapes/strict": {"mean": 0.1}}
    assert bench.climbed({"method": "draft", "after": after}) == 2.0
    assert bench.climbed({"method": "nft", "after": after}) == 0.1
    cfg, _ = planned(bench.tuning("draft")[0])
    assert cfg.reward["preference"]["weight"] == 1 and cfg.reward["shapes"]["weight"] == 0


def test_a_prompt_in_the_other_order_says_the_same(bench):
    """As the world itself words it: with the same clauses."""
    from flowrl.shapes.prompts import find

    assert turned("a red circle left of a blue square") == "a blue square right of a red circle"
    assert turned("a circle and a square") == "a square and a circle"
    assert turned("three red circles") is None
    for prompt in load_prompts("shapes:eval"):
        if other := turned(prompt["prompt"]):
            assert find(other)["combination"].split("+")[0] and turned(other) == prompt["prompt"]
