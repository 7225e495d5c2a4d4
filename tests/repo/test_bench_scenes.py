"""The command that prints the figures of the stickers verifiers."""

from importlib.resources import files

import pytest
import scenes
import torch
import worlds
from diffusers import AutoencoderKL
from PIL import Image

from flowrl.scenes.stickers.scenes import render
from flowrl.scenes.world import Placed, Scene

SPOILER = scenes.SPOILERS["stickers"]
CAT = Scene((Placed("cat", 20.0, 20.0, 20), Placed("taco", 46.0, 46.0, 22)), "blue")


def table(capsys, *words):
    """Rows of the printed table: name -> figures."""
    scenes.main([*words])
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if len(line) > 1}


def test_what_is_drawn_is_accepted_and_what_is_spoilt_is_refused(capsys):
    rows = table(capsys, "--scenes", "4")
    assert rows[""] == ["pictures", "motions", "edits"]
    assert rows["accepted as drawn"] == ["100.00% of 4"] * 3
    assert {f"refused: {name}" for name in scenes.SPOILERS["stickers"].ways} <= rows.keys()
    refused = [cell for name, row in rows.items() if "refused" in name for cell in row if cell]
    assert all(cell.startswith("100.00%") for cell in refused)
    assert all(float(cell) > 0 for cell in rows["ms a picture"])


def test_the_first_object_alone_is_spoilt():
    for spoilt in (SPOILER.halved(CAT), SPOILER.merged(CAT)):
        changed = (spoilt - render(CAT)).abs().amax(0) > 0
        assert bool(changed[10:30, 20:40].any()) and not bool(changed[35:].any())
    taco = Scene(CAT.objects[1:], "blue")
    assert "cat" in scenes.symmetric("stickers") and SPOILER.mirrored(CAT) is None
    torch.testing.assert_close(
        SPOILER.mirrored(taco)[:, 35:57, 35:57], render(taco)[:, 35:57, 35:57].flip(2)
    )


def test_a_video_reversed_and_a_copy_of_a_source_are_what_they_say():
    still, edit = (next(scenes.drawn("stickers", kind, 1, 0)) for kind in ("motions", "edits"))
    own = still.truth
    assert scenes.orders(own, still)["reversed"] == own[::-1]
    assert set(scenes.orders(edit.truth, edit)) == {"a copy of the source"}


def test_pictures_go_through_the_vae_of_a_folder(tmp_path, capsys):
    """An untrained one, so that nothing is recognised."""
    torch.manual_seed(0)
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=8).save_pretrained(tmp_path / "vae")
    through = scenes.autoencoder(tmp_path)(torch.rand(2, 3, 64, 64))
    assert through.shape == (2, 3, 64, 64) and 0 <= through.min() <= through.max() <= 1
    words = ("--scenes", "2", "--kinds", "edits", "--vae", str(tmp_path))
    assert table(capsys, *words)["accepted through the VAE"] == ["0.00% of 2"]


@pytest.mark.parametrize(
    ("kind", "vae"), [("pictures", "weights"), ("pictures", "masked"), ("motions", "wan")]
)
def test_what_shapes_draw_is_accepted_through_the_autoencoders_that_ship(kind, vae, capsys):
    place = str(files("flowrl.shapes") / vae)
    words = ("--world", "shapes", "--scenes", "6", "--kinds", kind, "--vae", place)
    rows = table(capsys, *words)
    for name in ("accepted as drawn", "accepted through the VAE", "refused: halved"):
        assert rows[name] == ["100.00% of 6"]
    assert rows["refused: another scene"][0].startswith("100.00%")


def test_a_kind_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        scenes.main(["--kinds", "sounds"])
    assert "invalid choice: 'sounds'" in capsys.readouterr().err


def test_both_worlds_are_drawn_on_one_page(tmp_path, capsys):
    worlds.main(tmp_path / "worlds.webp")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == [
        "stickers: 32 objects",
        "shapes: 18 objects",
    ]
    assert Image.open(tmp_path / "worlds.webp").width > worlds.COLUMNS * worlds.CELL
