"""What a list of prompts is, its content decides; every command reads the same lists."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import small
from image_files import in_an_empty_folder, noise  # noqa: F401  a fixture for every test
from PIL import Image

from flowrl.cli import generate
from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data import conditions, tables
from flowrl.data.prompts import load_prompts, of_words
from flowrl.data.samples import collect
from flowrl.evaluation.suites import prompt_files
from flowrl.rollouts.inference import gallery
from flowrl.runtime.text import items

TEXTS = ["a red circle", 'a sign, "Hi"', "zwei blaue Würfel"]


def write(name, content):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def records():
    return [{"prompt": text, "kind": f"k{n}"} for n, text in enumerate(TEXTS)]


def as_table(mark):
    quoted = [text if mark == "\t" else '"' + text.replace('"', '""') + '"' for text in TEXTS]
    return f"prompt{mark}kind\n" + "".join(f"{t}{mark}k{n}\n" for n, t in enumerate(quoted))


FORMS = {
    "lines of JSON": "\n".join(map(json.dumps, records())),
    "a list of JSON": json.dumps(records(), indent=2, ensure_ascii=False),
    "a key with a list": json.dumps({"prompts": records()}),
    "columns": json.dumps({"prompt": TEXTS, "kind": ["k0", "k1", "k2"]}),
    "documents of JSON": "\n".join(json.dumps(row, indent=1) for row in records()),
    "tabs": as_table("\t"),
    "tabs with quotes": as_table("\t").replace('a sign, "Hi"', '"a sign, ""Hi"""'),
    "commas": as_table(","),
    "semicolons": as_table(";"),
    "bars": as_table("|"),
    "spaces in the header": as_table(",").replace("prompt,kind", "prompt, kind"),
    "UTF-16": as_table("\t").encode("utf-16"),
    "a mark and \\r\\n": ("\ufeff" + as_table(";")).replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", ["list.txt", "list", "list.dat", "list.csv", "list.tsv"])
@pytest.mark.parametrize("form", FORMS)
def test_a_list_is_what_it_holds_whatever_its_name(form, name):
    assert load_prompts(write(name, FORMS[form])) == records()


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(TEXTS),
        json.dumps(TEXTS),
        "\n".join(f" {t}\t" for t in TEXTS) + "\n\n",
        "\ufeff" + "\r\n\n  ".join(TEXTS) + "  \n",
    ],
)
def test_texts_alone_are_prompts(content):
    assert [row["prompt"] for row in load_prompts(write("list.txt", content))] == TEXTS
    assert of_words(["list.txt", "one more"]) == [*TEXTS, "one more"]


@pytest.mark.parametrize(
    "lines",
    [
        ["text, logo, a vector drawing", "a cat, a dog", "one"],  # tags, no header
        ["[1] a cat", "{red} and blue", "a cat; a dog | a cow"],
        ["a prompt", "caption", "a file, a rank"],
        ['"quoted', 'a "b', "it's"],
    ],
)
def test_a_plain_text_is_no_table_and_no_json(lines):
    assert load_prompts(write("list.txt", "\n".join(lines))) == [{"prompt": t} for t in lines]


def test_parquet_and_tar_shards_are_known_by_their_first_bytes():
    tables.write(Path("list.parquet"), records())
    Path("list.parquet").rename("list.txt")
    assert load_prompts("list.txt") == records()
    shard("shard.tar")
    Path("shard.tar").rename("shard.csv")
    for name in ("shard.csv", "hf:shard.csv"):
        found = load_prompts(name, {"prompt": "txt", "image": "png"})
        assert [row["prompt"] for row in found] == TEXTS
        assert conditions.of(found)[1]["image"].getpixel((0, 0)) == (1, 0, 0)
    found = load_prompts("shard.csv")
    assert [row["prompt"] for row in found] == TEXTS and found[2]["json"] == {"width": 2}
    assert conditions.of(found) is None  # a column "png" is no argument of a pipeline
    write("broken.tar", b"no shard")
    with pytest.raises(ValueError, match=r"broken.tar cannot be loaded"):
        load_prompts("broken.tar")


def shard(name):
    with tarfile.open(name, "w") as tar:
        for n, text in enumerate(TEXTS):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (n, 0, 0)).save(picture, "PNG")
            parts = {"png": picture.getvalue(), "txt": text.encode()}
            parts["json"] = json.dumps({"width": n}).encode()
            for kind, content in parts.items():
                info = tarfile.TarInfo(f"{n:05}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


# ---------------------------------------------------------------------------
# what other programs write into prompts


def test_comments_and_flags_of_sample_prompts_are_no_prompt(caplog):
    write(
        "sample_prompts.txt",
        "# prompt 1\na red circle --n blur, grey --w 512 --h 768 --d 1 --l 7.5 --s 28\n\n"
        "#another\na blue square --W 64\na well--known --n\n",
    )
    assert load_prompts("sample_prompts.txt") == [
        {"prompt": "a red circle", "negative_prompt": "blur, grey"},
        {"prompt": "a blue square", "negative_prompt": ""},
        {"prompt": "a well--known", "negative_prompt": ""},
    ]
    assert "a comment or a header is no prompt: line 1, 4" in caplog.text
    assert "--d, --h, --l, --s, --w are left out" in caplog.text
    said = len(caplog.records)
    load_prompts("sample_prompts.txt")
    assert len(caplog.records) == said  # once


@pytest.mark.parametrize(
    "line",
    [
        "a cat --ar 16:9 --v 6",
        "a {red|blue} circle",
        "a __colour__ circle",
        "{{masterpiece}}, a cat",
        "a cat --n blur --style raw",
    ],
)
def test_what_may_be_more_than_text_is_text_and_is_said(tmp_path, line, caplog):
    name = write(tmp_path / "a.txt", f"a dog\n{line}\n")
    assert load_prompts(str(name)) == [{"prompt": "a dog"}, {"prompt": line}]
    assert "a.txt: flags, {} and __ are read as text, not as commands: line 2" in caplog.text
    assert load_prompts(write("a.jsonl", json.dumps({"prompt": line})))[0]["prompt"] == line


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a cat\tanimal\n", 'line 1 holds a tab: "a cat animal"; a table needs a first line'),
        ("Text\tKind\na\tb\tc\n", "line 1 holds a tab"),
        ("ok\n{'prompt': 'a cat'}\n", "line 2 looks like a record and is not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', "line 1 looks like a record and is not JSON"),
        ("- ok\n[{prompt: a}]\n", "line 2 looks like a record"),
        ("a\0b\n", "line 1 holds a NUL byte, so it is no text"),
        ('{"prompt": "a\\u0000b"}\n', "line 1 holds a NUL byte"),
        ("a cat".encode("utf-16-le") + b"\n\0", "line 1 holds a NUL byte"),
        (b"PK\x03\x04\x8f", "is not UTF-8: byte 4, in line 1"),
        (b"\x1f\x8b\x08", "is not UTF-8: byte 1, in line 1"),
        ("# only a comment\n", "is empty"),
        ("\ufeff\r\n \n", "is empty"),
        ("prompt,kind\n", "is empty"),
        ("[]", "is empty"),
    ],
)
def test_what_is_no_prompt_is_questioned(content, sentence):
    with pytest.raises(ValueError) as error:
        load_prompts(write("list.txt", content))
    assert sentence in str(error.value) and str(error.value).startswith("prompt file list.txt")


# ---------------------------------------------------------------------------
# columns


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.tsv", "Prompt\tCategory\na cat\tAnimals\n", "Prompt"),
        ("a.csv", "id;Caption\n1;a cat\n", "Caption"),
        ("a.txt", "text|id\na cat|1\n", "text"),
        ("a.jsonl", '{"caption": "a cat", "id": 1}\n', "caption"),
        ("a.json", '[{"Text": "a cat"}]', "Text"),
        ("a.csv", "words,id\na cat,1\n", "words"),
        ("a.dat", "id\tSentence\n1\ta cat\n", "Sentence"),
    ],
)
def test_a_column_that_is_called_otherwise_is_proposed_and_then_taken(name, content, column):
    write(name, content)
    if column != "Sentence":  # which nothing tells from a prompt
        said = f"data.columns.prompt={column} .*--columns prompt=NAME"
        with pytest.raises(ValueError, match=said):
            load_prompts(name)
    assert load_prompts(name, {"prompt": column}) == [{"prompt": "a cat"}]


def test_a_parquet_and_a_dataset_propose_their_column_too():
    Path("data").mkdir()
    tables.write(Path("data/a.parquet"), [{"n": 1, "Caption": "a cat"}])
    for source in ("data/a.parquet", "hf:data"):
        with pytest.raises(ValueError, match="data.columns.prompt=Caption"):
            load_prompts(source)


ABOUT = items("""
    image_width, image_url, image_id, num_images, video_fps, mask_ratio, images_count, image_hash,
    imagery, attention_mask, prompt_attention_mask, image_guidance_scale
""")
PICTURES = items("""
    image, images, last_image, mask_image, control_image_2, image2, video, ip_adapter_image, mask,
    conditioning_masks, reference_images
""")


@pytest.mark.parametrize("name", ABOUT)
def test_columns_about_pictures_are_no_pictures(name):
    assert not conditions.is_picture(name)
    row = {"prompt": "x", name: "https://x.org/a.png"}
    write("a.jsonl", json.dumps(row))
    assert load_prompts("a.jsonl") == [row]


@pytest.mark.parametrize("name", PICTURES)
def test_columns_of_pictures_are_files(name):
    assert conditions.is_picture(name)
    write("a.jsonl", json.dumps({"prompt": "x", name: "gone.png"}))
    with pytest.raises(ValueError, match=f'"{name}" names gone.png, which is no file'):
        load_prompts("a.jsonl")


# ---------------------------------------------------------------------------
# one reader


def test_score_and_suites_read_what_training_reads():
    noise("imgs/a.png")
    for name, content in (
        ("l.tsv", "file\tCaption\na.png\tx\n"),
        ("l.dat", "file;Caption\na.png;x"),
    ):
        columns = {"file": "file", "prompt": "Caption"}
        found = collect([Path("imgs")], prompts=Path(write(name, content)), columns=columns)
        assert [sample.prompt for sample in found] == ["x"]
    write("suite.dat", "PROMPT;Kind\na;b\n;c\n")
    asked = {"suite": "s", "origin": "", "columns": {"prompt": "Prompt", "kind": "kind"}}
    assert prompt_files.load("suite.dat", **asked) == [{"prompt": "a", "kind": "b"}]
    for form in ("lines of JSON", "a list of JSON"):
        assert prompt_files.load(write("suite.txt", FORMS[form]), **asked) == records()


def test_generate_takes_lists_beside_prompts(monkeypatch):
    write("my list.txt", "# two\na red circle\na blue square\n")
    write("p.tsv", "Prompt\tKind\na green square\tx\n")
    write("edits.json", '[{"prompt": "a", "negative_prompt": "b"}]')
    asked = []
    monkeypatch.setattr(generate, "_load", lambda *of: None)
    monkeypatch.setattr(generate, "_name", lambda *of: None)
    monkeypatch.setattr(gallery, "fill", lambda policy, prompts, *_, **__: asked.extend(prompts))
    words = ["generate", "shapes-sd3", "p.tsv", "my list.txt", "a. b"]
    result = small.invoke(*words)
    assert result.exit_code == 2 and "data.columns.prompt=Prompt" in result.stderr
    result = small.invoke(*words, "--columns", "prompt=Prompt")
    assert result.exit_code == 0, result.output
    assert asked == ["a green square", "a red circle", "a blue square", "a. b"]
    assert small.invoke("generate", "shapes-sd3", "edits.json", "geneval:eval").exit_code == 0
    assert asked[4] == {"prompt": "a", "negative_prompt": "b"} and "include" in asked[5]
    bad = {
        "gone.txt": "gone.txt does not exist",
        "shapes:evil": "unknown data",
        "--columns=Prompt": "--columns Prompt should be NAME=VALUE, such as prompt=Caption",
    }
    for word, sentence in bad.items():
        result = small.invoke("generate", "shapes-sd3", "a cat", word)
        assert result.exit_code == 2 and sentence in result.stderr
