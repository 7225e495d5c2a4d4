"""Media: one rounding rule, lossless round trips, readable grids, files by their suffix."""

import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flowrl
from flowrl.data import media
from flowrl.report import grids
from flowrl.scenes import shapes


def test_rounding_goes_to_the_nearest_byte_and_clamps():
    x = torch.tensor([-0.5, 0.0, 0.4999 / 255, 0.5001 / 255, 0.5, 254.6 / 255, 1.0, 1.7])
    x = x.view(1, 1, 8).expand(3, 1, 8)
    assert media.to_uint8(x)[0, 0].tolist() == [0, 0, 0, 1, 128, 255, 255, 255]


def test_every_byte_survives_the_round_trip():
    x = (torch.arange(256).float() / 255).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    assert torch.equal(media.from_pil(media.to_pil(x)), x)


def test_channels_and_axes_stay_where_they_are():
    x = torch.zeros(3, 2, 5)
    x[0, 0, 4], x[2, 1, 0] = 1.0, 1.0
    (image,) = media.to_pil(x)
    assert image.size == (5, 2)
    assert image.getpixel((4, 0)) == (255, 0, 0)
    assert image.getpixel((0, 1)) == (0, 0, 255)
    assert torch.equal(media.from_pil(image)[0], x)


def test_images_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match=r"sizes \[\(4, 4\), \(4, 5\)\]"):
        media.from_pil([Image.new("RGB", (4, 4)), Image.new("RGB", (4, 5))])


def test_a_png_holds_exactly_the_rounded_pixels(tmp_path):
    x = torch.rand(3, 8, 6)
    path = media.save(x, tmp_path / "new" / "folder" / "x.png")
    assert torch.equal(media.from_pil(Image.open(path))[0], media.to_uint8(x).float() / 255)


def test_a_gif_keeps_every_frame_and_the_speed(tmp_path):
    video = torch.stack([torch.full((3, 8, 8), level) for level in (0.0, 0.5, 1.0)])
    with Image.open(media.save(video, tmp_path / "x.gif", fps=10)) as file:
        assert file.n_frames == 3 and file.info["duration"] == 100
        file.seek(2)
        assert file.convert("RGB").getpixel((3, 3)) == (255, 255, 255)


def test_mp4_without_its_extra_names_the_extra_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"pip install -e '\S*\[video\]'"):
        media.save(torch.rand(2, 3, 8, 8), tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.parametrize("text", ["a purple square appears", "a blue circle moves left"])
def test_small_shapes_keep_their_colour_in_an_mp4(tmp_path, text):
    pytest.importorskip("av")
    drawn = torch.stack([shapes.render(scene) for scene in shapes.MOTIONS.frames(text, 0)])
    read = media.read_media(media.save(drawn, tmp_path / "x.mp4"), frames=len(drawn))
    total = flowrl.score(torch.stack([drawn, read]), [text] * 2, {"shapes_motion": 1.0}).total
    assert total.min() > 0.95


def test_mp4_is_written_where_the_extra_is_installed(tmp_path):
    video = torch.stack([torch.full((3, 32, 48), level) for level in (0.1, 0.5, 0.9)])
    av = pytest.importorskip("av")
    with av.open(str(media.save(video, tmp_path / "x.mp4", fps=8))) as file:
        frames = [
            torch.from_numpy(frame.to_ndarray(format="rgb24")).float() / 255
            for frame in file.decode(video=0)
        ]
        assert file.streams.video[0].average_rate == 8
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 3
    levels = torch.stack(frames).mean((1, 2, 3))
    assert torch.allclose(levels, torch.tensor([0.1, 0.5, 0.9]), atol=0.02)


@pytest.mark.parametrize(
    ("shape", "name", "said"),
    [
        ((3, 8, 8), "x.mp4", r"an image is saved as \.png"),
        ((2, 3, 8, 8), "x.png", r"a video is saved as \.mp4, \.gif"),
        ((3, 8, 8), "x", 'the suffix is ""'),
        ((1, 8, 8), "x.png", r"shape \(1, 8, 8\)"),
    ],
)
def test_a_suffix_that_does_not_fit_the_media_is_refused(tmp_path, shape, name, said):
    with pytest.raises(ValueError, match=said):
        media.save(torch.rand(shape), tmp_path / name)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (1, 8, 8), (5, 2)])
def test_the_numbers_of_any_media_are_an_array_whose_name_is_kept(tmp_path, shape):
    made = torch.rand(shape).bfloat16()
    for name in ("x.npy", "y.NPY"):
        assert media.fitting(tmp_path / name, made) == tmp_path / name
        found = np.load(media.save(made, tmp_path / name))
        assert found.dtype == np.float32 and np.array_equal(found, made.float().numpy())


@pytest.mark.parametrize(
    ("shape", "given", "suits"),
    [
        ((3, 8, 8), "x.mp4", "x.png"),
        ((3, 8, 8), "x.gif", "x.png"),
        ((2, 3, 9, 8), "x.mp4", "x.gif"),
        ((2, 3, 9, 8), "x.webp", "x.gif"),
        ((4, 2), "x.gif", "x.npy"),
    ],
)
def test_what_was_made_gets_the_usual_suffix_where_its_own_does_not_suit(shape, given, suits):
    assert str(media.fitting(Path(given), torch.rand(shape))) == suits


def even(colours, side):
    """A picture of each colour."""
    return torch.stack([torch.tensor(c).view(3, 1, 1).expand(3, side, side) / 255 for c in colours])


def _find(sheet, colour):
    pixels = (media.from_pil(sheet)[0] * 255).round().long()
    return (pixels == torch.tensor(colour)[:, None, None]).all(0)


def test_a_grid_shows_each_picture_whole_and_enlarged_by_a_whole_number():
    colours = [(200, 10, 10), (10, 200, 10), (10, 10, 200)]
    sheet = grids.grid(even(colours, 20), ["red", "green", "blue"], columns=2, cell=64)
    where = [_find(sheet, c).nonzero() for c in colours]
    assert [len(w) for w in where] == [60 * 60] * 3
    assert where[0].amax(0)[1] < where[1].amin(0)[1] and where[0].amax(0)[0] < where[2].amin(0)[0]


def test_a_grid_reduces_large_pictures_and_shows_the_middle_frame_of_videos():
    video = torch.zeros(1, 3, 3, 200, 100)
    video[:, 1] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    assert int(_find(grids.grid(video, cell=64), (255, 0, 0)).sum()) == 64 * 32


def test_captions_change_the_sheet_and_long_ones_are_shortened():
    x = torch.rand(2, 3, 32, 32)
    bare, named = grids.grid(x), grids.grid(x, ["a", "b"])
    assert named.height > bare.height and named.width == bare.width
    long = grids.grid(x, ["a very long prompt " * 20, "b"])
    assert named.height < long.height < named.height + 40


def test_before_after_puts_pairs_side_by_side_in_order():
    before, after = [(250, 0, 0), (0, 250, 0)], [(0, 0, 250), (250, 0, 250)]
    sides = [even(colours, 16) for colours in (before, after)]
    verdicts = [False, True], [True, True]
    sheet = grids.before_after(*sides, ["one", "two"], verdicts=verdicts, cell=64)
    shown = [before[0], after[0], before[1], after[1]]
    left = [int(_find(sheet, colour).nonzero()[:, 1].min()) for colour in shown]
    assert left == sorted(left) and left[1] - left[0] == left[3] - left[2] == 72
    green, red = _find(sheet, (26, 158, 92)), _find(sheet, (214, 69, 65))
    assert int(green.sum()) == 3 * int(red.sum()) > 0
    assert red.nonzero()[:, 1].max() < left[1]  # of the first picture


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: grids.grid(x, ["one"]), "2 images but 1 captions"),
        (lambda x: grids.grid(x[:0]), "at least one image"),
        (lambda x: grids.before_after(x, x[:1], ["a", "b"]), "2 images but 1 after"),
        (lambda x: grids.before_after(x, x, ["a"]), "2 images but 1 prompts"),
        (
            lambda x: grids.before_after(x, x, ["a", "b"], verdicts=([True], [True, False])),
            "2 images but 1 verdicts",
        ),
    ],
)
def test_lengths_that_do_not_match_are_one_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.rand(2, 3, 8, 8))


# ---------------------------------------------------------------------------
# what is opened


def declaring(path, width, height):
    """A PNG of a single pixel whose head says another size."""
    Image.new("RGB", (1, 1)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = width.to_bytes(4) + height.to_bytes(4)
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("side", "size"),
    [
        (8193, "8193 x 8193 pixels"),
        (12000, "144,000,000 pixels"),  # Pillow would warn
        (60000, "3,600,000,000 pixels"),  # Pillow would refuse
    ],
)
def test_a_picture_that_declares_too_many_pixels_is_refused_undecoded(tmp_path, side, size):
    path = declaring(tmp_path / "bomb.png", side, side)
    sentence = f"{path} has {size}, and at most 67,108,864 are decoded; make it smaller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (media.open_image, media.read_image, media.image_size):
            with pytest.raises(ValueError) as caught:
                read(path)
            assert str(caught.value) == sentence
        with pytest.raises(ValueError, match=f"^the picture has {size}, and at most 67,108,864"):
            media.open_image(path.read_bytes())


def test_the_limit_is_the_callers_and_a_picture_at_it_is_read(tmp_path):
    media.save(torch.rand(3, 4, 6), tmp_path / "x.png")
    with media.open_image((tmp_path / "x.png").read_bytes(), max_pixels=24) as image:
        assert image.size == (6, 4)
    with pytest.raises(ValueError, match="6 x 4 pixels, and at most 23 are decoded"):
        media.open_image(tmp_path / "x.png", max_pixels=23)


def test_a_file_of_another_format_is_refused_whatever_its_name(tmp_path):
    """EPS would start Ghostscript."""
    Image.new("RGB", (4, 4)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(ValueError, match="x.png cannot be read: UnidentifiedImageError"):
        media.read_image(tmp_path / "x.png")


def animated(path, count=5, **options):
    frames = [Image.new("RGB", (6, 4), (40 * i, 0, 0)) for i in range(count)]
    options |= {} if path.suffix == ".gif" else {"lossless": True}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, **options)
    return path


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp"])
def test_animated_pictures_are_videos_and_never_a_picture(tmp_path, suffix):
    path = animated(tmp_path / f"x{suffix}")
    for read in (media.read_image, media.image_size):
        with pytest.raises(
            ValueError, match=r"is animated \(5 frames\), and one picture is needed"
        ):
            read(path)
    red = [media.to_uint8(media.read_media(path, frames=most))[:, 0, 0, 0] for most in (9, 3, 1)]
    assert [x.tolist() for x in red] == [[0, 40, 80, 120, 160], [0, 80, 160], [0]]


def test_what_viewers_show_in_place_of_an_animation_is_no_frame_of_it(tmp_path):
    path = animated(tmp_path / "x.png", default_image=True)
    red = media.read_media(path, frames=9)[:, 0, 0, 0].mul(255)
    assert red.round().tolist() == [40, 80, 120, 160]


def test_a_photo_with_previews_of_itself_is_a_picture(tmp_path):
    Image.new("RGB", (6, 4), "red").save(
        tmp_path / "x.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (3, 2))]
    )
    assert media.read_media(tmp_path / "x.jpg", frames=9).shape == (3, 4, 6)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_video_that_declares_too_many_pixels_is_refused(tmp_path, monkeypatch, suffix):
    path = media.save(torch.rand(5, 3, 16, 16), tmp_path / f"x{suffix}")
    assert media.read_frames(path).shape == (5, 3, 16, 16)
    assert media.read_frames(path, most=2).shape == (2, 3, 16, 16)
    monkeypatch.setattr(media, "MAX_VIDEO_PIXELS", 5 * 256 - 1)
    with pytest.raises(ValueError, match=r"5 frames of 16 x 16 pixels, and at most 1,279 are deco"):
        media.read_frames(path, most=2)


def test_a_broken_or_missing_video_is_named(tmp_path):
    (tmp_path / "x.mp4").write_text("no video")
    for name, why in (("x.mp4", "InvalidDataError"), ("gone.mp4", "it does not exist")):
        with pytest.raises(ValueError, match=f"{name} cannot be read: {why}"):
            media.read_frames(tmp_path / name)
