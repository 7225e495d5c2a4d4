"""Datasets of Hugging Face by name, and pictures inside parquet files."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import small
import torch
from PIL import Image
from tiny import PROMPTS
from zoo import cases

from flowrl.config import build
from flowrl.config.compose import ConfigError
from flowrl.config.facts import of_config
from flowrl.config.load import load_config
from flowrl.data import conditions, media, stored
from flowrl.data.prompts import load_prompts
from flowrl.data.stored import PictureCell
from flowrl.training import identity

EDITS = {"prompt": "caption", "image": "before"}


def picture(k):
    return Image.frombytes("RGB", (16, 16), bytes((k * i) % 256 for i in range(16 * 16 * 3)))


def encoded(k):
    buffer = io.BytesIO()
    picture(k).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path, rows, group=2):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    names = {"before": kind, "after": kind, "caption": pa.string(), "prompt": pa.string()}
    schema = pa.schema([(name, names[name]) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=group)
    return str(path)


@pytest.fixture
def decoded(monkeypatch):
    """How often a picture was decoded."""
    seen, real = [], media.read_picture

    def counted(path, *, content=None, alpha=False):
        seen.extend([str(path)] if content else [])
        return real(path, content=content, alpha=alpha)

    monkeypatch.setattr(stored.media, "read_picture", counted)
    return seen


def test_pictures_inside_parquet_are_decoded_when_a_prompt_needs_them(tmp_path, decoded):
    cell = {"bytes": encoded(1), "path": None}
    rows = [{"caption": f"text {k}", "before": cell, "after": cell} for k in range(10_000)]
    rows[4321]["before"] = {"bytes": encoded(7), "path": "a.png"}
    source = write_parquet(tmp_path / "edits.parquet", rows, group=1000)
    found = load_prompts(source, EDITS)
    assert len(found) == 10_000 and set(found[0]) == {"prompt", "image"} and not decoded
    own = conditions.of([found[4321], found[9999]])
    assert own[0]["image"].tobytes() == picture(7).tobytes()
    assert own[1]["image"].tobytes() == picture(1).tobytes()
    assert decoded == [f'{source}, row {n}: "before"' for n in (4322, 10_000)]
    assert conditions.of([found[4321]])[0]["image"] is own[0]["image"] and len(decoded) == 2
    assert conditions.files(found[:3]) == []


def test_a_cell_of_parquet_may_be_empty_a_path_or_broken(tmp_path):
    picture(2).save(tmp_path / "2.png")
    cells = [None, {"path": "2.png"}, {"bytes": b"no"}, {"path": "none.png"}, {"bytes": b""}]
    rows = [{"prompt": "a", "before": cell} for cell in cells]
    source = write_parquet(tmp_path / "x.parquet", rows)
    found = load_prompts(source, {"prompt": "prompt", "image": "before"})
    assert "image" not in found[0]
    assert conditions.of(found[1:2])[0]["image"].tobytes() == picture(2).tobytes()
    said = ['x.parquet, row 3: "before" cannot be read', "none.png cannot be read: it does not"]
    for row, sentence in zip(found[2:], [*said, 'row 5: "before" holds no picture'], strict=True):
        with pytest.raises(ValueError, match=sentence):
            conditions.of([row])


def test_columns_are_named_for_every_kind_of_table(tmp_path):
    (tmp_path / "a.csv").write_text("caption,topic,nothing\na cat,x,\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"caption": "a cat", "topic": "x", "n": 3}))
    for name in ("a.csv", "a.jsonl"):
        found = load_prompts(str(tmp_path / name), {"prompt": "caption", "about": "topic"})
        assert found == [{"prompt": "a cat", "about": "x"}]
        with pytest.raises(ValueError, match=r'no column "captoin" \(data.columns\); did you mean'):
            load_prompts(str(tmp_path / name), {"prompt": "captoin"})
    cfg = load_config(None, ["data=hf:owner/name", "data.columns.prompt=caption"])
    assert (cfg.data.train, cfg.data.eval) == ("hf:owner/name", None)
    assert cfg.data.columns == {"prompt": "caption"}
    with pytest.raises(ConfigError, match="data.columns"):
        load_config(None, ["data.columns=[caption]"])


@pytest.mark.parametrize(("name", "said"), [("a.txt", True), ("a.csv", False)])
def test_columns_without_a_table_are_said_to_have_no_effect(name, said):
    words = ["algorithm=flow_grpo", "data=file", f"data.train={name}"]
    cfg = load_config(None, [*words, "data.columns.prompt=caption"])
    algorithm = build.make_algorithm(cfg)
    plan = algorithm.plan(torch.linspace(1, 0, 11), sampler=cfg.sampler, iteration=0, seed=0)
    found = " ".join(of_config(cfg, method=algorithm, plan=plan, spare=1).warnings())
    assert ("data.columns.prompt=caption has no effect: neither data.train" in found) is said


# ---------------------------------------------------------------------- the library


class Table:
    """What flowrl asks of a dataset of the library, without pictures."""

    def __init__(self, rows, fingerprint):
        self.rows, self._fingerprint = rows, fingerprint
        self.column_names = list(rows[0]) if rows else []
        self.features = dict.fromkeys(self.column_names)

    def __len__(self):
        return len(self.rows)

    def remove_columns(self, names):
        assert names == []
        return self

    def to_list(self):
        return [dict(row) for row in self.rows]


@pytest.fixture
def library(monkeypatch):
    """A stand-in for `datasets`: .asked is what load_dataset was called with, .version what the hub
    holds."""
    made = SimpleNamespace(asked=[], version="one")

    def load_dataset(name, **options):
        made.asked.append((name, options))
        if name == "owner/gone":
            raise ConnectionError("Couldn't reach\n'owner/gone'")
        rows = [{"caption": "a cat", "n": 3}, {"caption": "a dog", "n": None}]
        return Table([] if name == "owner/empty" else rows, made.version)

    made.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", made)
    forget()
    yield made
    forget()


def forget():
    """Datasets are loaded anew, as in another process."""
    from flowrl.data import hf

    hf.opened.cache_clear()


def test_a_dataset_of_the_hub_is_named_with_its_revision_and_split(library):
    found = load_prompts("hf:owner/name", {"prompt": "caption", "n": "n"})
    assert found == [{"prompt": "a cat", "n": 3}, {"prompt": "a dog"}]
    load_prompts("hf:owner/name@v2:test[:10]", {"prompt": "caption"})
    load_prompts("hf:owner/name@v2:test[:10]", {"prompt": "caption"})
    second = ("owner/name", {"split": "test[:10]", "revision": "v2"})
    assert library.asked == [("owner/name", {"split": "train"}), second]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "hf:owner/name",
            'has no column "prompt"; say which one holds it, as data.columns.prompt=',
        ),
        ("hf:owner/gone", "cannot be loaded: Couldn't reach 'owner/gone'"),
        ("hf:owner/empty", "has no rows"),
        ("hf:owner/name@", "has nothing after the @"),
        ("hf:", "names no dataset; give hf:OWNER/NAME or hf:FOLDER"),
    ],
)
def test_what_a_name_does_not_give_is_one_sentence(library, source, said):
    result = small.invoke("train", f"data={source}", "reward=jpeg", "output=nowhere")
    line = " ".join(result.output.split())
    assert result.exit_code == 2 and said in line and line.count("flowrl:") == 1


def test_a_run_notices_another_version_of_its_dataset(library):
    words = ["data=hf:owner/name", "data.columns.prompt=caption"]
    cfg = load_config(None, words)
    before = identity.of_config(cfg)
    assert before["files"]["hf:owner/name"] == "one"
    library.version = "two"
    forget()
    changed = identity.differences(before, identity.of_config(cfg), None)
    assert changed == ["hf:owner/name (one -> two)"]


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    forget()
    with pytest.raises(ValueError, match=r"pip install -e '\S*\[datasets\]'"):
        load_prompts("hf:owner/name")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Datasets that the real library wrote: save_to_disk, parquet, csv."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    forget()
    write_saved(datasets, "saved", [1, 2])
    held = datasets.load_from_disk("saved")
    datasets.DatasetDict(train=held, test=held.select([1])).save_to_disk("splits")
    (tmp_path / "parquet").mkdir()
    held.to_parquet("parquet/train.parquet")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "data.csv").write_text("prompt,topic\na cat,x\na dog,y\n")
    yield tmp_path
    forget()


def write_saved(datasets, folder, which):
    cells = [picture(k) for k in which]
    kinds = {"caption": datasets.Value("string"), "before": datasets.Image()}
    kinds["several"] = datasets.List(datasets.Image())
    rows = {"caption": list(PROMPTS), "before": cells, "several": [cells, cells[:1]]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).save_to_disk(folder)


def test_folders_of_the_library_are_read_without_decoding(folders, decoded):
    for name in ("saved", "splits", "parquet", "splits:train"):
        found = load_prompts(f"hf:{name}", EDITS)
        assert [row["prompt"] for row in found] == PROMPTS
        assert all(isinstance(row["image"], PictureCell) for row in found)
    assert not decoded
    assert conditions.of(found)[1]["image"].tobytes() == picture(2).tobytes()
    several = load_prompts("hf:saved", {"prompt": "caption", "image": "several"})
    own = conditions.of(several)
    assert [[p.tobytes() for p in c["image"]] for c in own] == [
        [picture(1).tobytes(), picture(2).tobytes()],
        [picture(1).tobytes()],
    ]
    assert len(load_prompts("hf:splits:test", EDITS)) == 1
    assert load_prompts("hf:csv")[1] == {"prompt": "a dog", "topic": "y"}
    with pytest.raises(ValueError, match='no split "tset"; did you mean "test"'):
        load_prompts("hf:splits:tset", EDITS)


def test_a_run_trains_an_editor_on_a_dataset_and_notices_another(folders):
    import datasets

    case = cases()["flux_kontext"]
    case.make().save_pretrained("model")
    words = [
        "model=./model",
        *(f"+model.pipeline.{k}={v}" for k, v in case.call.items()),
        "data=hf:saved",
        "data.eval=hf:saved",
        "data.columns.prompt=caption",
        "data.columns.image=before",
    ]
    words += small.words("run", "flow_grpo", iterations="1", model__pipeline=None)
    result = small.invoke("train", *words)
    assert result.exit_code == 0, result.output
    assert small.lines("run")[0]["policy/grad_norm"] > 0
    assert small.invoke("train", "--resume", "run", "iterations=2").exit_code == 0
    forget()
    write_saved(datasets, "other", [1, 5])
    (folders / "saved").rename("old")
    (folders / "other").rename("saved")
    refused = small.invoke("train", "--resume", "run", "iterations=3")
    line = " ".join(refused.output.split())
    assert refused.exit_code == 2 and "has changed since its newest checkpoint: hf:saved (" in line
