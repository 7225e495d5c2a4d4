"""Pairs, samples and videos of report.html: single, small, and never without those that broke."""

import base64
import io
import itertools
import json
import math
import re

import av
import finished
import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.data.media import save
from flowrl.report import pictures

CHARTED = ("reward", "eval", "policy", "diversity")


@pytest.fixture
def run(tmp_path):
    return finished.write(tmp_path / "my-run")


def opened(source):
    return Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))


def test_pairs_are_single_pictures_whose_filter_never_hides_a_broken_one(run):
    finished.keep(run / "samples", 5, 64, judged=([0, 1, 1, 0, -1], [1, 0, 1, 0, 1]))
    html, page = finished.page_of(run)
    kinds = re.findall(r'<figure class="pair (\w+) tiny">', html)
    assert kinds == ["broken", "fixed", "same", "same", "same"]
    with np.load(run / "samples" / "after.npz") as kept:
        assert (np.asarray(opened(page.src[1])) == kept["images"][1].transpose(1, 2, 0)).all()
    for said in ("all 5", "fixed 1", "broken 1", "same 3", "By shapes: fixed is wrong before"):
        assert said in page.text, said
    assert "not judged a <b>4" in page.text and "<b>4" not in html
    style = html.partition("</style>")[0]
    for rule in re.findall(r'\.sift:has\(\[value="\w+"\]:checked\) ([^{,]+)', style):
        assert "broken" not in rule
    # four, two or one in a row
    assert re.findall(r"\.pairs \{[^}]*repeat\((\d)|\.pairs \{[^}]*columns: 1fr", style) == [
        "4",
        "2",
        "",
    ]


def test_runs_without_verdicts_show_pairs_and_one_side_stands_alone_if_the_other_is_damaged(run):
    html, page = finished.page_of(run)
    assert html.count('<figure class="pair  tiny"') == 2 and 'class="filter"' not in html
    assert len(page.src) == 4 and 'class="missing"' not in html
    torn = (run / "samples" / "after.npz").read_bytes()[:-40]
    (run / "samples" / "after.npz").write_bytes(torn)
    html, page = finished.page_of(run)
    assert len(page.src) == 2 and "samples/after.npz is missing or damaged" in page.text
    (run / "samples" / "before.npz").write_bytes(torn)
    assert "samples/before.npz is missing or damaged" in finished.page_of(run)[1].text


def test_videos_play_in_the_page_and_their_originals_are_linked(run):
    samples = run / "samples"
    finished.keep(samples, 2, 64)
    rng = torch.Generator().manual_seed(0)
    for stem, i in itertools.product(("before", "after"), range(2)):
        save(torch.rand(5, 3, 64, 320, generator=rng), samples / stem / f"{i:02d}.mp4")
    (samples / "after" / "01.mp4").write_bytes(b"torn")
    html, page = finished.page_of(run)
    assert html.count("<video") == 2 == html.count("data:video/mp4") and "media-src data:" in html
    assert [s for s in page.src if not s.startswith("data:")][:2] == [
        "samples/before/00.mp4",
        "samples/after/00.mp4",
    ]
    clip = base64.b64decode(next(s for s in page.src if "video" in s).split(",")[1])
    with av.open(io.BytesIO(clip)) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert max(stream.width, stream.height) == 256 and len([*file.decode(video=0)]) == 5


def test_the_slider_has_a_sheet_for_each_tenth_of_the_run(run):
    for i in (1, *range(3, 43, 3)):
        Image.new("RGB", (40, 20), (i, 0, 0)).save(run / "samples" / f"iteration-{i:06d}.png")
    (run / "samples" / "iteration-000021.png").write_bytes(b"torn")
    html, _ = finished.page_of(run)
    shown = [int(n) for n in re.findall(r"<figcaption>Iteration (\d+)", html)]
    assert shown == [1, 3, 9, 12, 18, 24, 30, 33, 39, 42]
    assert 'max="9" value="9"' in html and html.count("<figure hidden>") == 9


@pytest.mark.long
def test_the_page_of_a_long_run_of_large_pictures_is_small(run):
    """Noise is what compresses worst."""
    finished.keep(run / "samples", 16, 512, judged=([0] * 16, [1] * 16))
    rng = np.random.default_rng(0)
    sheet = Image.fromarray(rng.integers(0, 256, (1100, 1096, 3), np.uint8))
    sheet.save(sheets := io.BytesIO(), "PNG", compress_level=0)
    for i in range(0, 201, 20):
        (run / "samples" / f"iteration-{i or 1:06d}.png").write_bytes(sheets.getvalue())
    lines = []
    for i in range(1, 201):
        line = {f"{part}/m{k}": i * k + math.sin(i) for part in CHARTED for k in range(15)}
        lines.append(json.dumps(line | {"iteration": i}))
    (run / "metrics.jsonl").write_text("\n".join(lines))
    html, page = finished.page_of(run)
    assert len(page.src) == 16 * 2 + 11 and html.count("<svg") == 60
    assert len(html.encode()) < 3e6


def test_a_page_that_is_made_again_encodes_only_the_new_sheet(run, monkeypatch):
    encoded, webp = [], pictures._webp
    monkeypatch.setattr(pictures, "_webp", lambda *own: encoded.append(own[1]) or webp(*own))
    for count, i in enumerate((10, 20, 30), 1):
        Image.new("RGB", (200, 100)).save(run / "samples" / f"iteration-{i:06d}.png")
        pictures.of_run(run / "samples")
        assert encoded.count(1120) == count
