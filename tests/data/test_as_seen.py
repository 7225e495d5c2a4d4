"""How a file is meant to be seen: each property, asked of each kind of file that can have it."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from flowrl.data import conditions, media
from flowrl.data.as_seen import as_seen
from flowrl.data.stored import PictureCell
from flowrl.training import identity

RED = (255, 0, 0)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # a quarter to the right


def colours(path):
    """(its size, the colours (R, G, B) at the top left and right, bottom left) of a file."""
    found = media.read_media(path, frames=1)
    pixels = media.to_uint8(found[0] if found.ndim == 4 else found)
    at = [tuple(pixels[:, y, x].tolist()) for y, x in ((2, 2), (2, -3), (-3, 2))]
    return tuple(pixels.shape[1:]), at


def distance(path, colour):
    """How far the colour at the top left is from this one, in bytes."""
    return np.abs(np.array(colours(path)[1][0]) - colour).max()


def corners(height=16, width=32):
    """Red at the top left, green at the top right, blue at the bottom left, black elsewhere."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    return pixels


# ---------------------------------------------------------------------------
# transparency


def see_through(path, **how):
    Image.new("RGBA", (8, 8), (*RED, 51)).save(path, **how)  # a fifth of red
    return path


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(("name", "how"), [("a.png", {}), ("a.webp", {"lossless": True})])
def test_what_is_half_transparent_shows_white_behind_it(tmp_path, name, how, moves):
    if moves:
        how = how | {"save_all": True, "append_images": [Image.new("RGBA", (8, 8))]}
    assert colours(see_through(tmp_path / name, **how))[1] == [(255, 204, 204)] * 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "P", "GIF", "I;16"])
def test_what_is_transparent_in_any_kind_of_pixel_is_white(tmp_path, mode):
    """Grey, bilevel, palette and 16-bit pictures name a colour that is none, or hold an alpha."""
    path = tmp_path / ("a.gif" if mode == "GIF" else "a.png")
    values = {"1": 0, "L": 9, "LA": (9, 0), "RGB": (9, 9, 9), "P": 1, "GIF": 1, "I;16": 40000}
    image = Image.new("P" if mode == "GIF" else mode, (8, 8), values[mode])
    if image.mode == "P":
        image.putpalette([0, 0, 0, 10, 20, 30])
    how = {} if mode == "LA" else {"transparency": values[mode]}
    image.save(path, **how)
    assert colours(path)[1] == [(255, 255, 255)] * 3 and media.depends_on_reader(path)


@pytest.mark.parametrize(
    ("codec", "kind", "name", "options"),
    [
        ("qtrle", "argb", "a.mov", {}),
        ("libvpx-vp9", "yuva420p", "a.webm", {}),
        ("libvpx", "yuva420p", "a.webm", {"auto-alt-ref": "0"}),
        ("ffv1", "bgra", "a.mkv", {}),
    ],
)
def test_a_transparent_video_shows_white_behind_it(tmp_path, codec, kind, name, options):
    pixels = np.zeros((16, 32, 4), np.uint8)
    pixels[:, 16:] = (*RED, 255)
    film(tmp_path / name, pixels, codec, kind, options=options)
    left, right, _ = colours(tmp_path / name)[1]
    assert left == (255, 255, 255) and max(abs(a - b) for a, b in zip(right, RED, strict=True)) < 4


def test_masks_keep_their_transparency_and_pictures_do_not(tmp_path, caplog):
    path = see_through(tmp_path / "a.png")
    for name in ("mask_image", "mask", "control_mask"):
        assert conditions.load(name, str(path)).getpixel((2, 2)) == (*RED, 51)
    assert "by its transparency alone" in caplog.text
    assert conditions.load("image", str(path)).getpixel((2, 2)) == (255, 204, 204)
    live = Image.open(path)
    assert conditions.load("mask_image", live).mode == "RGBA"
    assert conditions.load("control_image", [live])[0].getpixel((2, 2)) == (255, 204, 204)
    black_and_white = Image.fromarray(corners()).convert("1")
    assert conditions.load("mask_image", black_and_white).mode == "RGB"


# ---------------------------------------------------------------------------
# orientation


@pytest.mark.parametrize("kind", ["a.jpg", "a.png", "a.webp", "late.png", "apng.png", "moves.webp"])
def test_pictures_stand_upright_whatever_their_kind(tmp_path, kind):
    path, more = tmp_path / kind, {}
    if kind in ("apng.png", "moves.webp"):
        more = {"save_all": True, "append_images": [Image.new("RGB", (32, 16))]}
    Image.fromarray(corners()).save(path, exif=TURNED, **more)
    if kind == "late.png":
        path.write_bytes(exif_behind_the_pixels(path.read_bytes()))
    size, (left, right, below) = colours(path)
    assert size == (32, 16) and np.argmax(right) == 0 and np.argmax(left) == 2
    if not more:
        assert media.image_size(path) == (16, 32)


def exif_behind_the_pixels(png):
    """A PNG whose eXIf chunk comes after its pixels, as exiftool writes it."""
    start = png.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(png[start : start + 4])
    rest, last = png[:start] + png[end:], -12
    return rest[:last] + png[start:end] + rest[last:]


@pytest.mark.parametrize(
    ("turn", "flip", "size", "where"),
    [
        (0, False, (16, 32), "RGB"),
        (90, False, (32, 16), "G.R"),  # against the clock: what was at the right is on top
        (-90, False, (32, 16), "BR."),
        (180, False, (16, 32), ".BG"),
        (0, True, (16, 32), "GR."),
        (90, True, (32, 16), ".GB"),
    ],
)
def test_videos_stand_as_their_display_matrix_says(tmp_path, turn, flip, size, where):
    film(tmp_path / "a.mp4", corners(), "libx264", "yuv444p", turn=turn, flip=flip)
    found, at = colours(tmp_path / "a.mp4")
    assert found == size
    assert "".join("RGB"[np.argmax(c)] if max(c) > 99 else "." for c in at) == where


def test_a_video_of_pixels_that_are_not_square_has_its_true_shape(tmp_path):
    film(tmp_path / "a.mp4", corners(), "libx264", "yuv444p", aspect=Fraction(4, 3))
    assert colours(tmp_path / "a.mp4")[0] == (16, 43)


def film(path, pixels, codec, kind, *, options=None, turn=0, flip=False, aspect=None, curve=None):
    """Write a video of two equal frames (H, W, 3 or 4)."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8, options=options or {})
        stream.height, stream.width = pixels.shape[:2]
        stream.pix_fmt = kind
        if aspect:
            stream.sample_aspect_ratio = aspect
        if turn or flip:
            stream.set_display_rotation(turn, hflip=flip)
        if curve:
            stream.codec_context.color_trc = curve
        for _ in range(2):
            form = "rgba" if pixels.shape[-1] == 4 else "rgb24"
            frame = av.VideoFrame.from_ndarray(pixels, format=form)
            container.mux(stream.encode(frame.reformat(format=kind)))
        container.mux(stream.encode())


# ---------------------------------------------------------------------------
# colour space and depth


def fixed(*values):
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile(primaries=None, gamma=2.2):
    """An ICC profile of a power curve: grey, or of primaries as XYZ under D50, (3, 3)."""
    curve = b"curv" + bytes(4) + struct.pack(">IHxx", 1, round(gamma * 256))
    white = b"XYZ " + bytes(4) + fixed(0.9642, 1, 0.8249)
    tags = {b"wtpt": white, b"desc": b"desc" + bytes(4) + struct.pack(">I", 2) + b"x\0" + bytes(80)}
    if primaries is None:
        tags[b"kTRC"] = curve
    for name, xyz in zip("rgb", primaries or (), strict=False):
        tags[f"{name}XYZ".encode()] = b"XYZ " + bytes(4) + fixed(*xyz)
        tags[f"{name}TRC".encode()] = curve
    table, body, at = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, tag in tags.items():
        table += name + struct.pack(">II", at + len(body), len(tag))
        body += tag + bytes(-len(tag) % 4)
    space = b"GRAY" if primaries is None else b"RGB "
    head = struct.pack(
        ">IxxxxI4s4s4s12x4s", at + len(body), 0x02400000, b"mntr", space, b"XYZ ", b"acsp"
    )
    head += bytes(28) + fixed(0.9642, 1, 0.8249)
    return head.ljust(128, b"\0") + table + body  # fmt: skip


P3 = ((0.5151, 0.2412, -0.0011), (0.2919, 0.6922, 0.0419), (0.1572, 0.0666, 0.7841))
SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7139))


def shown(colour, primaries, gamma):
    """sRGB bytes of a colour (3) of a profile, by the matrices and curves themselves."""
    xyz = np.array(primaries).T @ (np.array(colour) / 255) ** gamma
    linear = (np.linalg.inv(np.array(SRGB).T) @ xyz).clip(0, 1)
    curve = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * curve


@pytest.mark.parametrize(
    ("name", "how"),
    [("a.png", {}), ("a.jpg", {"quality": 100}), ("a.webp", {"lossless": True}), ("p.png", {})],
)
@pytest.mark.parametrize("gamma", [1.0, 2.2])
def test_a_colour_of_display_p3_is_the_srgb_colour_that_a_screen_shows(tmp_path, name, how, gamma):
    colour = (200, 120, 80)
    image = Image.new("RGB", (16, 16), colour)
    image = image.quantize(2) if name == "p.png" else image
    image.save(tmp_path / name, icc_profile=profile(P3, gamma), **how)
    expected = shown(colour, P3, gamma)
    assert distance(tmp_path / name, expected) <= 2
    assert np.abs(expected - colour).max() > 8  # the bytes alone are another colour
    assert media.depends_on_reader(tmp_path / name)


def test_transparent_grey_and_16_bit_pictures_have_profiles_too(tmp_path):
    image = Image.new("RGBA", (8, 8), (200, 120, 80, 255))
    image.save(tmp_path / "a.png", icc_profile=profile(P3, 2.2))
    assert distance(tmp_path / "a.png", shown((200, 120, 80), P3, 2.2)) < 3
    expected = shown((100, 100, 100), SRGB, 1.0)  # a linear grey
    for mode, grey in (("L", 100), ("I;16", 100 * 257)):
        Image.new(mode, (8, 8), grey).save(tmp_path / "b.png", icc_profile=profile(gamma=1.0))
        assert distance(tmp_path / "b.png", expected) <= 2


@pytest.mark.parametrize("own", [b"rubbish", profile(gamma=1.0)])
def test_a_profile_that_is_broken_or_of_other_pixels_says_nothing_as_in_viewers(tmp_path, own):
    Image.fromarray(corners()).save(tmp_path / "a.png", icc_profile=own)
    assert colours(tmp_path / "a.png")[1] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_the_profile_of_srgb_changes_no_byte(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=srgb)
    found = media.to_uint8(media.read_image(tmp_path / "a.png")).permute(1, 2, 0).numpy()
    assert (found == pixels).all()


def test_inks_are_seen_as_colours(tmp_path):
    Image.new("CMYK", (16, 16), (0, 200, 200, 0)).save(tmp_path / "a.jpg", quality=100)
    assert distance(tmp_path / "a.jpg", (255, 55, 55)) <= 2


@pytest.mark.parametrize("level", [0, 128, 40000, 65535])
def test_16_bits_of_grey_are_read_over_their_whole_range(tmp_path, level):
    Image.new("I;16", (8, 8), level).save(tmp_path / "a.png")
    assert colours(tmp_path / "a.png")[1][0] == (round(level / 257),) * 3


def test_pixels_of_unknown_range_and_high_dynamic_range_are_refused(tmp_path):
    for mode in ("F", "I"):
        with pytest.raises(ValueError, match=f"of mode {mode}, whose range is not known"):
            media.from_pil(Image.new(mode, (8, 8)))
    film(tmp_path / "a.mp4", corners(), "libx264", "yuv444p", curve=16)
    said = r"a.mp4 cannot be read: it has a high dynamic range \(PQ\)"
    with pytest.raises(ValueError, match=said):
        media.read_frames(tmp_path / "a.mp4")


# ---------------------------------------------------------------------------
# animation, and every reader


def test_what_moves_is_decided_by_the_file_and_a_video_is_always_frames(tmp_path):
    still, film = Image.fromarray(corners()), [Image.new("RGB", (32, 16), RED)]
    still.save(tmp_path / "still.gif")
    still.save(tmp_path / "moves.webp", save_all=True, append_images=film)
    still.save(tmp_path / "moves.png", save_all=True, append_images=film)
    assert conditions.load("image", str(tmp_path / "still.gif")).size == (32, 16)
    assert media.read_media(tmp_path / "still.gif", frames=9).shape == (3, 16, 32)
    for name in ("still.gif", "moves.webp", "moves.png"):
        frames = conditions.load("video", str(tmp_path / name))
        assert [frame.size for frame in frames] == [(32, 16)] * (1 + (name != "still.gif"))


def test_what_was_seen_once_stays_as_it_is(tmp_path):
    Image.new("LA", (8, 4), (9, 128)).save(tmp_path / "a.png", exif=TURNED, icc_profile=profile())
    once = as_seen(Image.open(tmp_path / "a.png"))
    assert (once.mode, once.size, once.info) == ("RGB", (4, 8), {})
    assert torch.equal(media.from_pil(as_seen(once)), media.from_pil(once))
    assert torch.equal(media.from_pil(once)[0], media.read_image(tmp_path / "a.png"))
    assert torch.equal(media.from_pil(Image.open(tmp_path / "a.png")), media.from_pil(once))


def test_the_version_of_the_reader_is_in_the_identity_where_it_matters(tmp_path, monkeypatch):
    plain, clear = tmp_path / "plain.png", see_through(tmp_path / "clear.png")
    Image.fromarray(corners()).save(plain)
    assert identity.of_reader({}, [plain]) == {} and identity.of_reader({}, []) == {}
    now = {"reader": identity.of_reader({}, [plain, clear])}
    config = {"config": {"algorithm": {"name": "grpo"}}}
    said = identity.differences(config, {**config, **now}, tmp_path)
    assert said == ["the reader of videos, transparency and colour profiles (absent -> 2)"]
    assert identity.differences(config, {**config, "reader": {}}, tmp_path) == []
    assert identity.differences(now, now, tmp_path) == []
    inside = PictureCell("a.parquet, row 1", "image", "1", tmp_path, dict)
    assert identity.of_reader({"prompts": [{"prompt": "x", "image": inside}]}, []) == now["reader"]
    monkeypatch.setattr(identity.as_seen, "READER", "3")
    later = {"reader": identity.of_reader({}, [clear])}
    assert "(2 -> 3)" in identity.differences(now, later, tmp_path)[0]
