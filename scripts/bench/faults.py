"""Can a run be destroyed or falsified? Kills, full disks, damaged files, two processes at once.

    python scripts/bench/faults.py                    # 200 kills, 40 disks, 120 damaged, 30 pairs
    python scripts/bench/faults.py --kills 20 --only kills --seed 7

Every case is a tiny run with one fault. A run then has to resume to exactly what an uninterrupted
one is, bit for bit, or to say in one sentence why not, with a way out that works. No tracebacks, no
hangs. Cases are processes forked from this one, which has imported everything and loaded the model;
they drive the command line's entry function. A case depends on its kind, number and seed alone.
With --out a run that was stopped goes on where it was, and the folders of failed cases stay.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "200"}

import fault_damage
import torch
import yaml
from fault_disk import ERRORS, KILLS, Disk
from forked import Ended, Forked
from rich.table import Table

from flowrl.cli.common import show
from flowrl.config import build
from flowrl.config.load import load_config
from flowrl.runtime.store import checkpoint
from flowrl.runtime.store.files import TEMPORARY
from flowrl.runtime.store.lines import append
from flowrl.training import build as training_build

ITERATIONS = 4
SETTINGS = {
    "reward": "jpeg",
    "iterations": ITERATIONS,
    "batch.prompts": 2,
    "batch.group": 2,
    "batch.updates": 1,
    "sampler.steps": 3,
    "sampler.guidance": "none",
    "ema.every": 1,
    "eval.every": 3,  # not the last iteration of a run that is half done
    "eval.images": 2,
    "eval.steps": 2,
    "eval.baseline_guidance": "null",
    "checkpoint.every": 1,
    "trackers": "[]",
    "model.self_check": "false",
}
METHODS: dict[str, dict[str, Any]] = {
    "nft": {"algorithm.steps": 2},
    "mix_grpo": {"algorithm.window.every": 1, "algorithm.window.size": 1, "checkpoint.every": 2},
}
CHANGING = ("time/", "memory/", "mfu")  # metrics that depend on the machine
Problems = list[str]


def words(run: Path, method: str, **more: Any) -> list[str]:
    settings = SETTINGS | {"algorithm": method} | METHODS[method] | more | {"output": run}
    return ["train", *(f"{key}={value}" for key, value in settings.items())]


def resume(run: Path) -> list[str]:
    return ["train", "--resume", str(run), f"iterations={ITERATIONS}"]


class Command(Forked):
    """A command of a case."""

    def __init__(self, arguments: list[str], room: Path, disk: Disk | None = None) -> None:
        """room: folder of the case, with its run and what its commands print."""
        printed = room / f"printed-{time.monotonic_ns()}.txt"
        super().__init__(arguments, printed, disk.at_work if disk else contextlib.nullcontext)


# ---------------------------------------------------------------------------
# what a run is, and whether two are equal


def outcome(run: Path) -> dict[str, Any]:
    """All that must not depend on what happened to a run on its way."""
    saved = checkpoint.latest(run)
    meta = json.loads((saved / checkpoint.META).read_bytes())
    rows = json.loads((run / "evaluation.json").read_bytes())["rows"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    return {
        "weights": {path.name: _hash(path) for path in saved.glob("*.safetensors")},
        "counters": {key: meta[key] for key in ("iteration", "step", "nonfinite")},
        "metrics": [_plain(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "before": [row["values"] for row in rows if row["name"] == "before"],
        "after": [row["values"] for row in rows if row["name"] == "after"],
        "lora": {path.name: _hash(path) for path in (run / "lora").iterdir()},
        "pictures": {path.name: _hash(path) for path in files_of(run / "samples")},
        "config": config | {"output": None},
        "report": (run / "report.html").read_text().rstrip().endswith("</html>"),
        "unfinished": sorted(str(path.relative_to(run)) for path in run.rglob(f"{TEMPORARY}*")),
    }


def _plain(line: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(line).items() if not key.startswith(CHANGING)}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unequal(run: Path, whole: dict[str, Any], *, but: Sequence[str] = ()) -> Problems:
    """What differs from an uninterrupted run."""
    try:
        found = outcome(run)
    except (OSError, ValueError, KeyError) as error:
        return [f"the resumed run cannot be read: {error!r}"]
    return [f"{key} differ" for key in whole if key not in but and found[key] != whole[key]]


# ---------------------------------------------------------------------------
# cases


class Bench:
    """Uninterrupted runs of every method, and what cases do with copies of them."""

    def __init__(self, home: Path, hang: float) -> None:
        self.home, self.hang = home, hang
        self.whole: dict[str, dict[str, Any]] = {}
        self.ops: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def prepare(self, *, halves: bool = True) -> None:
        """Load the model, and make each method's uninterrupted run and one that is half done."""
        policy = build.make_policy(load_config(None, words(self.home, "nft")[1:]))
        build.make_policy = training_build.make_policy = lambda *_, **__: policy
        for method in METHODS:
            room = self.home / method
            room.mkdir(parents=True, exist_ok=True)
            if halves:
                self._must(words(room / "half", method, iterations=ITERATIONS // 2), room)
                again = ["evaluate", str(room / "half"), "--suite", "shapes", "--count", "2"]
                self._must([*again, "--images", "2", "--steps", "1"], room)
            end = self._must(words(room / "run", method), room, Disk(room / "run"))
            self.seconds[method], self.ops[method] = end.seconds, counted(end.text)
            self.whole[method] = outcome(room / "run")

    def _must(self, arguments: list[str], room: Path, disk: Disk | None = None) -> Ended:
        run = Path(arguments[-1].partition("=")[2] or arguments[1])
        if arguments[0] == "train":
            shutil.rmtree(run, ignore_errors=True)
        end = Command(arguments, room, disk).wait(self.hang)
        if end.code != 0:
            raise SystemExit(f"{' '.join(arguments)}: exit code {end.code}\n{end.text}")
        return end

    def case(self, kind: str, number: int, seed: int, room: Path) -> tuple[str, Problems]:
        """-> what was done, and what was wrong afterwards."""
        rng = random.Random(f"{kind} {number} {seed}")
        method = rng.choice(list(METHODS))
        return getattr(self, kind)(rng, method, room)

    def _finish(self, run: Path, method: str, *, but: Sequence[str] = ()) -> Problems:
        """Resume; where the run had not begun, start it as before. It must end as it should."""
        end = Command(resume(run), run.parent).wait(self.hang)
        if end.code != 0:
            if wrong := end.wrong():
                return wrong
            if (run / "config.yaml").exists():
                return [f"it does not resume: {last_line(end.text)}"]
            end = Command(words(run, method), run.parent).wait(self.hang)
            if end.code != 0:
                return [f"dead end: {last_line(end.text)}", *end.wrong()]
        return unequal(run, self.whole[method], but=but)

    def kills(self, rng: random.Random, method: str, room: Path) -> tuple[str, Problems]:
        """SIGKILL at a write or at any moment, sometimes again while the run is resumed."""
        run, done = room / "run", []
        commands = [words(run, method)] + [resume(run)] * rng.choice([0, 0, 0, 1, 2])
        for arguments in commands:
            disk = moment = None
            if rng.random() < 0.7:
                most = self.ops[method] if arguments[1] != "--resume" else self.ops[method] // 2
                how, at = rng.choice(KILLS), rng.randint(1, most)
                disk = Disk(run, how, at, rng.randrange(2**31))
                done.append(f"killed {how} write {at}")
            else:
                moment = rng.uniform(0, self.seconds[method])
                done.append(f"killed after {moment:.2f} s")
            end = Command(arguments, room, disk).wait(self.hang, moment)
            if end.code is None or "Traceback" in end.text:
                return ", ".join(done), end.wrong()
            if not (run / "config.yaml").exists():
                break
        return f"{method} {', '.join(done)}", self._finish(run, method)

    def disk(self, rng: random.Random, method: str, room: Path) -> tuple[str, Problems]:
        """A full or read-only disk from some write on, while a run trains or is read."""
        run, how = room / "run", rng.choice([*ERRORS, "ENOSPC", "EROFS"])
        command, most = rng.choice(["train", "train", "train", "evaluate", "report"]), 12
        arguments, before = [command, str(run)], {}
        if command == "train":
            arguments, most = words(run, method), self.ops[method]
        else:
            shutil.copytree(self.home / method / "run", run)
            before = {path: path.read_bytes() for path in files_of(run)}
        at = rng.randint(1, most)
        end = Command(arguments, room, Disk(run, how, at)).wait(self.hang)
        done, wrong = f"{method} {command}, {how} at write {at}", []
        if end.code != 0:
            started = (run / "config.yaml").exists()
            wrong += end.wrong(run.name) + [f"exit code {end.code}"] * (started and end.code != 1)
            gone = [path.name for path in before if not path.exists()]
            wrong += [f"{name} is gone" for name in gone]
        return done, wrong or self._finish(run, method)

    def damage(self, rng: random.Random, method: str, room: Path) -> tuple[str, Problems]:
        """A damaged or edited file; then a command. What it refuses works once that is restored."""
        run, source = room / "run", self.home / method / "half"
        shutil.copytree(source, run)
        path = rng.choice(fault_damage.candidates(run))
        name = path.relative_to(run)
        how = fault_damage.damage(path, rng)
        make = ["generate", "shapes-sd3", "a red circle", "--lora", str(run), "--steps", "2"]
        arguments = rng.choice(
            [resume(run)] * 3
            + [["report", str(run)], ["evaluate", str(run), "--images", "2"]]
            + [[*make, "-o", str(room / "out.png")]]
        )
        end = Command(arguments, room).wait(self.hang)
        done = f"{method} {name} {how}, {' '.join(arguments[:2])}"
        if wrong := end.wrong():
            return done, wrong
        if end.code != 0 or arguments != resume(run):
            fault_damage.restore(path, source / name)
            return done, self._finish(run, method, but=["pictures"])
        but = ["pictures", "config"]
        but += ["metrics"] * ("metrics.jsonl" in end.text)
        but += ["before"] * (name.name == "evaluation.json")
        return done, unequal(run, self.whole[method], but=but)

    def pairs(self, rng: random.Random, method: str, room: Path) -> tuple[str, Problems]:
        """Two commands at once in one folder."""
        run, kind = room / "run", rng.choice(["train", "train --resume", "evaluate", "report"])
        first, second = words(run, method), [kind, str(run)]
        if kind == "train":
            second = first
        else:
            shutil.copytree(self.home / method / "half", run)
            first = resume(run)
            second = first if kind == "train --resume" else second
        delay = rng.uniform(0, self.seconds[method]) * rng.choice([0, 0, 1])
        commands = [Command(first, room)]
        time.sleep(delay)
        commands.append(Command(second, room))
        ends = [command.wait(self.hang) for command in commands]
        wrong = [problem for end in ends for problem in end.wrong(run.name)]
        if all(end.code != 0 for end in ends):
            wrong.append("neither went on")
        done = f"{method} {first[0]} and {kind} after {delay:.2f} s"
        return done, wrong or self._finish(run, method)


def files_of(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.is_file() and TEMPORARY not in str(path)]


def counted(text: str) -> int:
    """Operations of the disk that a command printed at its end (Disk.at_work)."""
    return int(text.rpartition("operations: ")[2])


def last_line(text: str) -> str:
    found = [line for line in text.splitlines() if line.strip()]
    return found[-1] if found else "nothing was said"


# ---------------------------------------------------------------------------
# all of them


def work(bench: Bench, cases: Sequence[tuple[str, int]], seed: int, log: Path) -> None:
    """Run cases one after another; a line of the log each."""
    for kind, number in cases:
        room = bench.home / "cases" / f"{kind}-{number}"
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(parents=True)
        began = time.monotonic()
        done, wrong = bench.case(kind, number, seed, room)
        line = {"kind": kind, "number": number, "seed": seed, "done": done, "wrong": wrong}
        append(log, [line | {"seconds": round(time.monotonic() - began, 1)}])
        if wrong:
            print(f"{kind} {number}: {done}: {'; '.join(wrong)} ({room})", flush=True)
        else:
            shutil.rmtree(room)


def warm_up() -> None:
    """Import what a whole run imports; networks run in children alone, so that forks are safe."""
    torch.set_num_threads(1)
    for name in ("flowrl.training.loop", "flowrl.report.run_page", "flowrl.report.terminal"):
        importlib.import_module(name)
    importlib.import_module("flowrl.evaluation.suites.runs")


def results(log: Path, seed: int) -> dict[tuple[str, int], dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    found = [json.loads(line) for line in lines]
    return {(line["kind"], line["number"]): line for line in found if line["seed"] == seed}


def table(found: Sequence[dict[str, Any]]) -> Table:
    out = Table("fault", "cases", "failed", "longest", title="Runs with a fault")
    for kind in Counter(line["kind"] for line in found):
        own = [line for line in found if line["kind"] == kind]
        failed = sum(bool(line["wrong"]) for line in own)
        longest = max(line["seconds"] for line in own)
        out.add_row(kind, str(len(own)), str(failed), f"{longest:.0f} s")
    return out


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind, count in (("kills", 200), ("disk", 40), ("damage", 120), ("pairs", 30)):
        parser.add_argument(f"--{kind}", type=int, default=count, metavar="N")
    parser.add_argument("--only", choices=["kills", "disk", "damage", "pairs"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--hang", type=float, default=120, help="seconds of one command")
    parser.add_argument("--out", type=Path, help="go on in this folder, and keep failed cases")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    kinds = [chosen.only] if chosen.only else ["kills", "disk", "damage", "pairs"]
    cases = [(kind, number) for kind in kinds for number in range(getattr(chosen, kind))]
    warm_up()
    with contextlib.ExitStack() as stack:
        home = chosen.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home, log = home.resolve(), home.resolve() / "cases.jsonl"
        bench = Bench(home, chosen.hang)
        bench.prepare()
        known = results(log, chosen.seed)
        left = [case for case in cases if known.get(case, {"wrong": True})["wrong"]]
        workers = []
        for job in range(chosen.jobs):
            workers.append(os.fork())
            if workers[-1] == 0:
                work(bench, left[job :: chosen.jobs], chosen.seed, log)
                os._exit(0)
        broken = any(os.waitpid(worker, 0)[1] for worker in workers)
        found = results(log, chosen.seed)
    show(table([found[case] for case in cases if case in found]))
    return int(broken or any(case not in found or found[case]["wrong"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
