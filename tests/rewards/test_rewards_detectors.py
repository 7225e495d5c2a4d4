"""The watch detectors: sharpness, saturation, tiling. Known orders on a photograph, exact values on
pictures worked out by hand."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import functional as T

from flowrl import rewards
from flowrl.data.media import from_pil, to_pil
from flowrl.rewards import sharpness, tiling

NAMES = ("sharpness", "saturation", "tiling")
READINGS = [
    ("sharpness", "laplacian"),
    ("sharpness", "high_frequency"),
    ("saturation", "saturation"),
    ("saturation", "clipped"),
    ("tiling", "repetition"),
    ("tiling", "pattern"),
    ("tiling", "seams"),
]


@pytest.fixture(scope="module")
def photo():
    """Grace Hopper before a flag: (1, 3, 256, 224)."""
    from matplotlib import cbook

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        return from_pil(Image.open(file).resize((224, 256), Image.Resampling.BICUBIC))


def grey(y):
    """(H, W) -> (1, 3, H, W)."""
    return y.float().expand(1, 3, *y.shape[-2:]).contiguous()


def read(name, media, reading=None):
    """One value of a picture, or the list of a batch."""
    out = rewards.load(name, **({} if reading is None else {"reading": reading}))(
        media, [""] * len(media)
    ).tolist()
    return out[0] if len(media) == 1 else out


def tiled(media, n, grow=False):
    """n x n copies: reduced ones in a picture of the same size, or (grow) whole ones in a larger
    picture."""
    height, width = media.shape[-2:]
    tile = (
        media
        if grow
        else F.interpolate(media, (height // n, width // n), mode="bicubic", antialias=True).clamp(
            0, 1
        )
    )
    return tile.repeat(1, 1, n, n)


def jpeg(media, quality):
    buffer = io.BytesIO()
    to_pil(media)[0].save(buffer, "JPEG", quality=quality)
    return from_pil(Image.open(buffer))


# --- what every detector keeps to


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_a_mirror_image_has_the_same_value(photo, name, reading):
    odd = torch.cat(
        [photo[..., :251, :219], tiled(photo, 3)[..., :251, :219], torch.rand(1, 3, 251, 219)]
    )
    for flipped in (odd.flip(-1), odd.flip(-2)):
        assert read(name, flipped, reading) == pytest.approx(read(name, odd, reading), abs=2e-4)


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_batch_mates_do_not_matter_and_a_video_has_the_mean_of_its_frames(
    photo, name, reading, monkeypatch
):
    for module in ("sharpness", "tiling"):
        monkeypatch.setattr(f"flowrl.rewards.{module}.AT_ONCE", 3)
    batch = torch.cat([photo, torch.rand_like(photo), tiled(photo, 2), torch.zeros_like(photo)])
    reward = rewards.load(name, reading=reading)
    whole = reward(batch, [""] * 4)
    assert whole.dtype == torch.float32 and whole.shape == (4,)
    assert whole.tolist() == pytest.approx(
        [read(name, picture[None], reading) for picture in batch], abs=1e-5
    )
    video = reward(batch.view(2, 2, *batch.shape[1:]), [""] * 2)
    assert video.tolist() == pytest.approx(whole.view(2, 2).mean(1).tolist(), abs=1e-5)
    assert torch.equal(reward.parts(batch, [""] * 4)[reading], whole)


@pytest.mark.parametrize(("name", "reading"), [pair for pair in READINGS if pair[1] != "clipped"])
def test_the_gradient_is_finite_everywhere_and_predicts_a_small_step(photo, name, reading):
    reward, g = rewards.load(name, reading=reading), torch.Generator().manual_seed(0)
    base = tiled(photo, 2) if name == "tiling" else photo
    x = (0.1 + 0.8 * base + 0.02 * torch.rand(base.shape, generator=g)).requires_grad_()
    gradient = torch.autograd.grad(reward(x, [""]).sum(), x)[0]
    step = 5e-5 * gradient / gradient.square().mean().sqrt()
    gain = float(reward(x.detach() + step, [""]) - reward(x.detach() - step, [""])) / 2
    assert reward.differentiable and gain > 1e-7
    assert gain == pytest.approx(float((gradient * step).sum()), rel=0.15)
    flat = torch.zeros(1, 3, 64, 64).requires_grad_()
    assert bool(torch.autograd.grad(reward(flat, [""]).sum(), flat)[0].isfinite().all())


def test_only_clipped_has_no_gradient_and_says_so():
    with pytest.raises(
        ValueError, match="saturation as it is loaded .* load it with reading=saturation"
    ):
        read("saturation", torch.rand(1, 3, 8, 8).requires_grad_(), "clipped")
    assert [rewards.load(name, reading=reading).differentiable for name, reading in READINGS] == [
        r != "clipped" for _, r in READINGS
    ]


@pytest.mark.parametrize("size", [(64, 64), (33, 64), (70, 41), (1024, 40), (130, 700)])
def test_any_size_is_read(size):
    for name in NAMES:
        parts = rewards.load(name).parts(torch.rand(2, 3, *size), ["", ""])
        assert all(
            value.shape == (2,) and bool(value.isfinite().all()) for value in parts.values()
        ), name


def test_pictures_that_are_too_small_and_settings_that_mean_nothing_are_refused():
    with pytest.raises(
        ValueError, match="sharpness needs pictures of at least 3 x 3 pixels; these are 5 x 2"
    ):
        read("sharpness", torch.rand(1, 3, 2, 5))
    with pytest.raises(
        ValueError,
        match=r"tiling needs pictures of at least 32 x 32 pixels \(4 periods\); these are 31 x 40",
    ):
        read("tiling", torch.rand(1, 3, 40, 31))
    for setting in ({"periods": [7]}, {"periods": [2]}, {"periods": []}, {"reading": "grid"}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            rewards.load("tiling", **setting)


def test_the_stated_scale_follows_the_reading():
    assert (
        rewards.load("sharpness").scale.startswith("log10")
        and "Nyquist" in rewards.load("sharpness", reading="high_frequency").scale
    )
    assert (
        "HSV" in rewards.load("saturation").scale
        and "0 or 255" in rewards.load("saturation", reading="clipped").scale
    )


# --- sharpness


@pytest.mark.parametrize("reading", ["laplacian", "high_frequency"])
def test_blurred_is_below_the_photo_and_oversharpened_above(photo, reading):
    blurred = T.gaussian_blur(photo, [9, 9], [1.5, 1.5])
    sharpened = (photo + 2 * (photo - T.gaussian_blur(photo, [9, 9], [1.5, 1.5]))).clamp(0, 1)
    noise = torch.rand_like(photo)
    levels = read(
        "sharpness",
        torch.cat([T.gaussian_blur(photo, [25, 25], [4.0, 4.0]), blurred, photo, sharpened, noise]),
        reading,
    )
    steps = [after - before for before, after in zip(levels, levels[1:], strict=False)]
    assert min(steps) > (0.3 if reading == "laplacian" else 1e-5)


def test_the_laplacian_of_one_bright_pixel_has_the_variance_worked_out_by_hand():
    """5 x 5, the middle pixel 1: over the 3 x 3 interior the Laplacian is -4 once, 1 four times, 0
    four times; mean 0, variance 20 / 9."""
    y = torch.zeros(5, 5)
    y[2, 2] = 1
    assert read("sharpness", grey(y)) == pytest.approx(math.log10(1 + 255**2 * 20 / 9), abs=1e-5)


def test_flat_and_evenly_rising_pictures_have_sharpness_0_and_a_checkerboard_the_most():
    """Of a checkerboard every interior pixel has Laplacian +-4: variance (4 * 255)^2."""
    ramp = torch.linspace(0, 1, 65)[None] * torch.ones(65, 1)
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2
    assert read("sharpness", torch.full((1, 3, 64, 64), 0.3)) == pytest.approx(0, abs=1e-6)
    assert read("sharpness", grey(ramp)) == pytest.approx(0, abs=1e-6)
    assert read("sharpness", grey(board)) == pytest.approx(math.log10(1 + 1020**2), abs=1e-5)
    assert read("sharpness", grey(board), "high_frequency") == pytest.approx(1, abs=1e-4)
    assert read("sharpness", grey(ramp), "high_frequency") == pytest.approx(0, abs=1e-6)


def test_uniform_noise_has_the_sharpness_of_its_variance():
    """Independent channels of variance 255^2 / 12, weights .299 .587 .114, and the Laplacian's 16 +
    4 * 1."""
    variance = 20 * (255**2 / 12) * (0.299**2 + 0.587**2 + 0.114**2)
    assert read("sharpness", torch.rand(1, 3, 256, 256)) == pytest.approx(
        math.log10(1 + variance), abs=0.02
    )


@pytest.mark.parametrize(("cycles", "share"), [(8, 0.0), (15, 0.0), (17, 1.0), (24, 1.0)])
def test_a_wave_counts_as_high_from_a_quarter_cycle_a_pixel(cycles, share):
    wave = 0.5 + 0.4 * torch.cos(2 * torch.pi * torch.arange(512) * cycles / 64)
    assert read("sharpness", grey(wave[None].expand(512, 512)), "high_frequency") == pytest.approx(
        share, abs=0.01
    )


def test_luma_weighs_the_channels_as_pil():
    image = torch.rand(1, 3, 8, 8)
    levels = torch.tensor(list(to_pil(image)[0].convert("L").tobytes())).view(8, 8)
    assert (sharpness.luma(image)[0] * 255 - levels).abs().max() < 1.01


# --- saturation


def test_grey_is_below_the_photo_and_neon_above(photo):
    levels = read(
        "saturation",
        torch.cat([T.rgb_to_grayscale(photo, 3), photo, T.adjust_saturation(photo, 3.0)]),
    )
    assert levels[0] == pytest.approx(0, abs=1e-6) and levels[0] + 0.2 < levels[1] < levels[2] - 0.2
    burnt = read(
        "saturation",
        torch.cat([photo, T.adjust_saturation(photo, 3.0), T.adjust_brightness(photo, 3.0)]),
        "clipped",
    )
    assert burnt[0] < 0.2 < burnt[1] and burnt[0] + 0.2 < burnt[2]


def test_saturation_is_the_mean_of_max_less_min_over_max():
    """Red 1, brick (.8, .4, .2) 3/4, grey 0, black 0: mean 7 / 16. A channel at 0 or 255: red and
    black, 1/2."""
    colours = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.4, 0.2], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]])
    picture = colours.T.reshape(1, 3, 2, 2)
    assert read("saturation", picture) == pytest.approx(7 / 16, abs=1e-6)
    assert read("saturation", picture, "clipped") == 0.5


def test_saturation_is_that_of_pils_hsv(photo):
    hue = torch.tensor(list(to_pil(photo)[0].convert("HSV").getchannel("S").tobytes())).float()
    assert read("saturation", photo) == pytest.approx(float(hue.mean()) / 255, abs=3e-3)


def test_a_channel_is_clipped_where_a_saved_picture_would_hold_0_or_255():
    levels = torch.tensor([0.0, 0.4, 0.6, 254.4, 254.6, 255.0]) / 255
    picture = torch.full((1, 3, 1, 6), 0.5)
    picture[0, 1, 0] = levels
    assert read("saturation", picture, "clipped") == pytest.approx(4 / 6)


# --- tiling: repetition


def test_a_photo_is_below_its_tilings(photo):
    values = read("tiling", torch.cat([photo, tiled(photo, 2), tiled(photo, 4)]), "repetition")
    assert values[0] < 0.2 and min(values[1:]) > 0.95
    larger = [read("tiling", tiled(photo, n, grow=True)) for n in (2, 3, 4)]
    assert min(larger) > 0.9


@pytest.mark.parametrize(
    ("down", "right", "cosine"),
    [(0, 45, 2**-0.5), (58, 0, 1.0), (37, 43, 1.0), (40, -41, 1.0), (0, 20, 0.5)],
)
def test_two_copies_on_an_empty_ground_have_the_cosine_of_what_overlaps(down, right, cosine):
    """A patch of noise twice in 120 x 120, apart by a vector: 1 over the root of how many copies
    each of the two windows holds.

    (0, 20): the patch at columns 42 to 58 and its copy at 62 to 78 both lie in columns 0 to 100 and
    20 to 120: 1 / sqrt(2 * 2).
    """
    top, left, side = (10, 42, 16) if right == 20 else (10, 48, 24)
    patch, picture = torch.rand(side, side), torch.full((120, 120), 0.5)
    picture[top : top + side, left : left + side] = patch
    second = (slice(top + down, top + side + down), slice(left + right, left + side + right))
    picture[second] = patch
    r = tiling.autocorrelation(tiling._band(picture[None]))[0]
    assert float(r[down, right]) == pytest.approx(cosine, abs=0.02)
    assert read("tiling", grey(picture), "repetition") > cosine - 0.06
    picture[second] = torch.rand(side, side)
    assert read("tiling", grey(picture), "repetition") < 0.4


def test_edges_stripes_ramps_and_noise_are_no_repetition():
    edge = (torch.arange(200) > 90).expand(200, 200)
    stripes = (torch.arange(200) // 25 % 2).expand(200, 200)
    diagonal = torch.arange(200)[:, None] + torch.arange(200) > 190
    pictures = [
        grey(x)
        for x in (
            edge,
            stripes,
            diagonal,
            torch.linspace(0, 1, 200).expand(200, 200),
            torch.ones(200, 200),
        )
    ]
    assert (
        max(read("tiling", torch.cat([*pictures, torch.rand(1, 3, 200, 200)]), "repetition")) < 0.15
    )


def test_one_object_pasted_again_and_again_stands_out(photo):
    """Nine copies of a reduced photo, up to 3 pixels off an even grid, on a ground of noise;
    against nine different crops."""
    g, ground = torch.Generator().manual_seed(0), 0.4 + 0.2 * torch.rand(1, 3, 256, 256)
    same, other = ground.clone(), ground.clone()
    copy = F.interpolate(photo, (40, 36), mode="bilinear", antialias=True)
    for i in range(9):
        top, left = (80 * k + 20 + int(torch.randint(-3, 4, (), generator=g)) for k in divmod(i, 3))
        same[..., top : top + 40, left : left + 36] = copy
        other[..., top : top + 40, left : left + 36] = photo[
            ..., 22 * i : 22 * i + 40, 20 * i : 20 * i + 36
        ]
    found = read("tiling", torch.cat([same, other]), "repetition")
    assert found[0] > 0.3 and found[1] < 0.2


def test_the_autocorrelation_is_the_cosine_of_the_overlap():
    """Against a loop over lags, in exact sums."""
    x = torch.rand(1, 5, 6) - 0.5
    r = tiling.autocorrelation(x)
    assert r.shape == (1, 10, 12)
    for down in range(-3, 4):
        for right in range(-4, 5):
            a = x[0, max(0, -down) : 5 - max(0, down), max(0, -right) : 6 - max(0, right)]
            b = x[0, max(0, down) : 5 + min(0, down), max(0, right) : 6 + min(0, right)]
            floor = a.numel() * (0.5 / 255) ** 2
            expected = (a * b).sum() / (
                (a.square().sum() + floor) * (b.square().sum() + floor)
            ).sqrt()
            assert float(r[0, -down % 10, -right % 12]) == pytest.approx(
                float(expected), abs=1e-4
            ), (down, right)


# --- tiling: grids


@pytest.mark.parametrize("period", [8, 16])
def test_a_grid_too_faint_to_see_at_once_is_found(photo, period):
    """Lines of 5 levels at any offset are seams; lines of 10, or a wave of 8, a pattern."""
    height, width = photo.shape[-2:]
    grid = torch.zeros(height, width)
    grid[3::period] += 1 / 255
    grid[:, 5::period] += 1 / 255
    wave = torch.sin(2 * torch.pi * torch.arange(height) / period + 1)[:, None] * torch.sin(
        2 * torch.pi * torch.arange(width) / period
    )
    pictures = torch.cat(
        [photo, photo + 5 * grid, photo + 10 * grid, photo + 8 / 255 * wave]
    ).clamp(0, 1)
    found = rewards.load("tiling").parts(pictures, [""] * 4)
    assert found["seams"][0] < 0.15 and found["seams"][1] > 0.6
    assert found["pattern"][0] < 0.003 and found["pattern"][2:].min() > 0.006


def test_the_borders_of_jpeg_blocks_are_seams_but_no_pattern(photo):
    found = rewards.load("tiling").parts(
        torch.cat([photo, jpeg(photo, 80), jpeg(photo, 30)]), [""] * 3
    )
    assert found["seams"][0] < 0.15 and found["seams"][1:].min() > 0.5
    assert found["pattern"].max() < 0.003


def test_a_repeated_block_is_all_pattern_and_noise_has_none():
    block = torch.rand(8, 8)
    found = read(
        "tiling", torch.cat([grey(block.repeat(16, 16)), torch.rand(1, 3, 128, 128)]), "pattern"
    )
    assert found[0] == pytest.approx(1, abs=1e-3) and found[1] < 0.01


def test_half_a_pattern_in_noise_has_half_the_variance():
    """A block and noise of one variance, over 256 x 256 pixels: the share that repeats is 1/2."""
    g = torch.Generator().manual_seed(0)
    block, noise = torch.randn(8, 8, generator=g), torch.randn(256, 256, generator=g)
    block = (block - block.mean()) / block.std(correction=0)
    y = 0.5 + 0.1 * (block.repeat(32, 32) + noise)
    # the moving average takes less than 2% of the noise's variance, nothing of the block's
    assert float(tiling.pattern(y[None], 8)) == pytest.approx(0.5, abs=0.02)


def test_a_pattern_is_found_by_its_own_period_only():
    block = torch.rand(12, 12)
    picture = grey(block.repeat(16, 16))
    assert (
        float(tiling.pattern(sharpness.luma(picture), 12)) > 0.99
        and float(tiling.pattern(sharpness.luma(picture), 8)) < 0.2
    )
    assert rewards.load("tiling", periods=[12], reading="pattern")(picture, [""]) > 0.99


def test_detrending_leaves_a_repeated_block_less_its_mean_and_nothing_of_a_ramp():
    """A centred moving average over one whole period is the block's mean everywhere, and a plane's
    own value."""
    block = torch.rand(8, 8)
    ramp = torch.arange(40.0)[:, None] * 0.01 + torch.arange(48.0) * 0.02
    detail = tiling._detrended((block.repeat(5, 6) + ramp)[None], 8)[0]
    assert detail.shape == (32, 40)
    torch.testing.assert_close(
        detail, (block - block.mean()).roll((-4, -4), (0, 1)).repeat(4, 5), atol=1e-5, rtol=0
    )


def test_ramps_are_no_grid_whatever_their_slope():
    ramp = grey(torch.linspace(0, 1, 128)[None] * torch.linspace(0.2, 1, 128)[:, None])
    parts = rewards.load("tiling").parts(ramp, [""])
    assert parts["pattern"] < 1e-3 and parts["seams"] < 0.1


def test_the_score_is_the_largest_of_the_three_readings(photo):
    batch = torch.cat([photo, tiled(photo, 2), jpeg(photo, 30)])
    reward = rewards.load("tiling")
    parts = reward.parts(batch, [""] * 3)
    assert list(parts) == ["repetition", "pattern", "seams"]
    assert torch.equal(reward(batch, [""] * 3), torch.stack(list(parts.values())).amax(0))
    assert bool((torch.stack(list(parts.values())) >= 0).all()) and bool(
        (reward(batch, [""] * 3) <= 1).all()
    )
