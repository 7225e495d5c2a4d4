"""W&B (offline) and TensorBoard write what a run showed; trackio and SwanLab are called as they
are defined; and a tracker that fails leaves the run alone."""

import json
import os
import shutil
import struct
import sys
from types import ModuleType, SimpleNamespace

import pytest
import small
from accelerate.tracking import GeneralTracker, TensorBoardTracker

from flowrl.runtime import install
from flowrl.training import trackers

# arguments of `init`; that of swanlab also ignores any other keyword
INITS = {
    "trackio 0.43.0": "project name group space_id server_url dataset_id bucket_id config resume"
    " settings private embed auto_log_gpu gpu_log_interval auto_log_cpu cpu_log_interval"
    " webhook_url webhook_min_level",
    "swanlab 0.10.3": "reinit log_dir mode workspace project public name color description job_type"
    " group tags id resume parallel config settings callbacks",
}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run with W&B, offline, and TensorBoard, killed and resumed -> its folder, what was said."""
    place = tmp_path_factory.mktemp("tracked")
    elsewhere = dict.fromkeys(("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR"), "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**elsewhere, "HOME": f"{place}/home", "WANDB_MODE": "offline"}.items():
            patch.setenv(name, value)  # and put back at the end
        (place / "here").mkdir()
        patch.chdir(place / "here")
        words = {"trackers": "[wandb,tensorboard]", "iterations": "4", "eval__images": "2"}
        words |= {"tracking__project": "paper", "tracking__tags": "[a,b]", "checkpoint__every": "2"}
        made = small.trainer(place / "run", **words)
        for it in made:
            if it.number == 3:
                break  # iteration 3 was logged, and is after the last checkpoint
        trackers.finish(made.parts)
        said = small.invoke("train", "--resume", made.path)
        assert said.exit_code == 0, said.output
        assert not [*(place / "here").iterdir(), *place.glob("home/**/*wandb*")]
    return made.path, said.output


def records(file):
    """Records of a .wandb file, a log of LevelDB: blocks of 32 KiB with pieces of records, each
    behind (checksum, size, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        at += 32768 - at % 32768 if 32768 - at % 32768 < 7 else 0
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_names_config_pictures_and_table_and_a_resume_keeps_its_id(tracked):
    run, said = tracked
    parts = [list(records(f)) for f in sorted(run.glob("tracker/wandb/offline-run-*/*.wandb"))]
    known = json.loads((run / "tracker/run.json").read_text())["id"]
    for part, steps, row in zip(parts, ([0, 1, 2, 3], [3, 4]), ("before", "after"), strict=True):
        (told,) = [r.run for r in part if r.HasField("run")]
        assert (told.run_id, told.project, told.display_name) == (known, "paper", "run")
        assert (told.run_group, [*told.tags]) == ("nft", ["a", "b"])
        config = {u.key: u.value_json for r in part for u in r.config.update}
        assert json.loads(config["algorithm"])["label"] == "nft"
        history = [r.history for r in part if r.HasField("history")]
        assert [h.step.num for h in history] == steps
        keys = {item.key or "/".join(item.nested_key) for h in history for item in h.item}
        assert {"reward/total", f"samples/{row}/path", "evaluation/path"} <= keys
    (*_, file) = sorted(run.glob("tracker/wandb/offline-run-*/files/media/table/*.json"))
    table = json.loads(file.read_text())
    assert table["columns"][0] == "evaluation" and "jpeg" in table["columns"][-1]
    assert [row[0] for row in table["data"]] == ["before", "after"]
    assert list(run.glob("tracker/wandb/*/files/media/images/samples/iteration_*.png"))
    assert "wandb" not in said and "Next:\n  flowrl generate" in said.rpartition("Run folder:")[2]


def test_tensorboard_has_every_step_once_pictures_table_and_config(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = tracked
    events = EventAccumulator(str(run / "tracker")).Reload()
    assert [e.step for e in events.Scalars("reward/total")] == [1, 2, 3, 4]
    pictures = {"iteration", "before", "after", "before_after"}
    assert {f"samples/{name}" for name in pictures} == {*events.Tags()["images"]}
    (text,) = events.Tensors("evaluation/text_summary")[-1].tensor_proto.string_val
    assert text.startswith(b"| evaluation | guidance |") and b"| after |" in text
    assert "algorithm.label: nft" in next(run.glob("tracker/*/hparams.yml")).read_text()


def test_a_moved_run_stays_itself_and_a_copy_is_a_run_of_its_own(tmp_path):
    def known(name):
        found = trackers.identified(tmp_path / name)
        return found["id"], found["name"]

    first = known("run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert known("run") == first and known("copy")[1] == "copy" and known("copy")[0] != first[0]
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert known("run") not in (first, known("moved")) and known("moved") == first
    (tmp_path / "run/tracker/run.json").write_text("{")
    with pytest.raises(ValueError, match=r"was edited or damaged .*; restore it, or delete it and"):
        known("run")


@pytest.mark.parametrize("package", INITS)
def test_trackio_and_swanlab_are_called_as_they_are_defined(tmp_path, monkeypatch, package):
    name, calls, module = package.split()[0], [], ModuleType(package.split()[0])
    module.Image, module.Video = "Image {}".format, "Video {}".format
    module.Table = lambda columns, data: (columns, data)
    module.Text, module.config, module.finish = str, {}, lambda: calls.append("finish")
    run = SimpleNamespace(log=lambda values, step: calls.append(values), finish=module.finish)
    module.init = lambda **given: calls.append(given) or run
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # trackers name their folders there
    words = {"trackers": f"[{name}]"} | ({"tracking__entity": "me"} if name == "swanlab" else {})
    parts = SimpleNamespace(
        path=tmp_path / "run",
        setup=SimpleNamespace(cfg=small.config(tmp_path / "run", **words)),
        weights=SimpleNamespace(accelerator=SimpleNamespace(trackers=[])),
        source=SimpleNamespace(world=SimpleNamespace(main=True)),
    )
    trackers.start(parts, 4)
    trackers.put(parts, 5, "grid", "Image", "a.png")
    trackers.put(parts, 5, "moving", "Video", "a.gif")
    trackers.put(parts, 5, "moving", "Video", "a.mp4")
    trackers.put(parts, 5, "evaluation", "Table", ["metric"], [["0.5"]])
    trackers.finish(parts)
    own = {"project": "flowrl", "name": "run", "group": "nft", "resume": "allow"}
    table = ["metric"], [["0.5"]]
    if name == "swanlab":
        table = "| metric |\n| - |\n| 0.5 |"
        place = str(tmp_path / "run/tracker/swanlab")
        own |= {"id": trackers.identified(parts.path)["id"], "tags": [], "log_dir": place}
        own |= {"reinit": True}
    own |= {"embed": False} if name == "trackio" else {"workspace": "me"}
    assert calls[0] == own and own.keys() <= {*INITS[package].split()}
    moving = [{"moving": f"Video a.{suffix}"} for suffix in ("gif", "mp4")]
    assert calls[1:-2] == [{"grid": "Image a.png"}, *moving[: 1 + (name == "trackio")]]
    assert calls[-2:] == [{"evaluation": table}, "finish"]
    assert module.config["algorithm"]["label"] == "nft"


def test_a_tracker_that_fails_is_left_out_and_the_run_and_the_others_go_on(
    tmp_path, monkeypatch, caplog
):
    """In the midst of a run, as when a disk is full."""
    seen, other = [], GeneralTracker(_blank=True)
    other.name, other.log = "other", lambda values, step: seen.append(step)

    def log(self, values, step):
        raise OSError(28, "No space left on device")

    words = {"trackers": "[tensorboard]", "data__eval": "null", "iterations": "3"}
    words |= {"checkpoint__every": "9", "batch__prompts": "1"}
    made = small.trainer(tmp_path / "run", **words)
    with caplog.at_level("WARNING", "flowrl"):
        for it in made:
            made.parts.weights.accelerator.trackers.append(other) if it.number == 1 else None
            monkeypatch.setattr(TensorBoardTracker, "log", log)
    said = (
        "trackers: tensorboard failed, and the run goes on without it: OSError: [Errno 28] No space"
    )
    assert len(small.lines(made.path)) == 3 and seen == [2, 3]
    assert [r.getMessage()[: len(said)] for r in caplog.records] == [said]


def test_wandb_without_an_account_is_refused(tmp_path, monkeypatch):
    import wandb

    known = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    monkeypatch.setattr(os, "environ", known | {"HOME": str(tmp_path)})
    wandb.teardown()  # it reads the environment once
    with pytest.raises(
        ValueError, match="wandb is not logged in; run `wandb login`, or set WANDB_"
    ):
        install.check_trackers(["all"])
    wandb.teardown()
    os.environ["WANDB_API_KEY"] = 40 * "a"
    install.check_trackers(["wandb"])
    wandb.teardown()


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a/b", "a#b"])
def test_a_name_that_a_tracker_does_not_take_is_refused(name):
    with pytest.raises(ValueError, match=r"^tracking\.project: .* should be one line of text"):
        small.load_config(None, tracking={"project": name})
