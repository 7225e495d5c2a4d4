"""The reference reward: PSNR by hand, SSIM against scikit-image, LPIPS against its package, files
and sizes, gradients."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flowrl import rewards
from flowrl.data import media as files
from flowrl.rewards.reference import psnr, ssim
from flowrl.types import MediaContext


def smooth(*shape):
    """Random pictures without pixel noise, (…, 3, H, W) in [0, 1], exactly as a PNG holds them."""
    height, width = shape[-2:]
    coarse = torch.rand(math.prod(shape[:-3]), 3, max(2, height // 8), max(2, width // 8))
    return (
        torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").view(*shape) * 255
    ).round() / 255


def noisy(x, by=0.1):
    return ((x + by * torch.randn_like(x)).clamp(0, 1) * 255).round() / 255


def meta(*paths):
    return MediaContext(meta=[{"ground_truth": str(path)} for path in paths])


# --- metrics


def test_psnr_is_ten_log10_of_one_over_the_squared_error():
    a = torch.full((3, 3, 16, 16), 0.5)
    b = a + torch.tensor([0.1, 0.01, 0.0]).view(3, 1, 1, 1)
    assert psnr(a, b).tolist() == pytest.approx([20, 40, 60], abs=1e-3)  # equal: the cap
    half = a.clone()
    half[:, :, :8] += 0.1  # half of the pixels: 3.01 dB more
    assert psnr(a, half)[0].item() == pytest.approx(20 + 10 * math.log10(2), abs=1e-3)


def test_rounding_to_bytes_alone_leaves_59_db():
    x = torch.rand(1, 3, 64, 64)
    assert psnr((x * 255).round() / 255, x).item() == pytest.approx(
        10 * math.log10(12 * 255**2), abs=0.1
    )


def test_ssim_and_psnr_equal_scikit_images():
    metrics = pytest.importorskip("skimage.metrics")
    a = smooth(4, 3, 40, 56)
    b = noisy(a) * torch.tensor([1.0, 0.9, 0.5, 1.0]).view(4, 1, 1, 1)
    for i, value in enumerate(ssim(a, b).tolist()):
        x, y = (t[i].permute(1, 2, 0).double().numpy() for t in (a, b))
        theirs = metrics.structural_similarity(
            x,
            y,
            data_range=1.0,
            channel_axis=2,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        assert value == pytest.approx(theirs, abs=1e-5) and value < 0.95
        assert psnr(a, b)[i].item() == pytest.approx(
            metrics.peak_signal_noise_ratio(x, y, data_range=1.0), abs=1e-4
        )


def test_ssim_of_bright_pictures_is_exact_where_convolutions_keep_11_bits_of_fp32(monkeypatch):
    """Second statement in fp64, one window at a time; 1 in place of 0.99 is what rounded squares
    would make of pictures of 0.9 to 0.92."""
    plain = torch.nn.functional.conv2d

    def tf32(x):
        if x.dtype != torch.float32:
            return x
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def conv2d(x, weight):
        return plain(tf32(x), tf32(weight))

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    a = 0.9 + 0.02 * smooth(2, 3, 16, 14)
    b = a + 0.003 * torch.randn_like(a)
    line = (-((torch.arange(11).double() - 5) ** 2) / (2 * 1.5**2)).exp()
    window = line[:, None] * line / line.sum() ** 2
    expected = []
    for x, y in zip(a.double(), b.double(), strict=True):
        values = [
            similarity(x[c, i : i + 11, j : j + 11], y[c, i : i + 11, j : j + 11], window)
            for c in range(3)
            for i in range(6)
            for j in range(4)
        ]
        expected.append(torch.stack(values).mean())
    out = ssim(a, b)
    assert out.dtype == torch.float32 and float(out.max()) < 0.995
    assert torch.allclose(out.double(), torch.stack(expected), atol=1e-6)


def similarity(p, q, window):
    """SSIM of one window, (11, 11) each."""
    mp, mq = (window * p).sum(), (window * q).sum()
    p, q = p - mp, q - mq
    vp, vq, both = ((window * u * v).sum() for u, v in ((p, p), (q, q), (p, q)))
    above = (2 * mp * mq + 1e-4) * (2 * both + 9e-4)
    return above / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))


def test_ssim_of_equal_pictures_is_one_and_of_inverted_ones_negative():
    a = smooth(2, 3, 32, 32)
    assert ssim(a, a).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert bool((ssim(a, 1 - a) < 0).all())
    with pytest.raises(ValueError, match="at least 11 x 11 px; these are 16 x 8"):
        ssim(torch.rand(1, 3, 8, 16), torch.rand(1, 3, 8, 16))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A random AlexNet as torchvision saves it."""
    from torchvision.models import alexnet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("lpips") / "alexnet.pth"
    torch.save(alexnet().state_dict(), path)
    return path


def test_lpips_is_minus_the_packages_distance_on_the_backbone_of_the_file(backbone, tmp_path):
    lpips = pytest.importorskip("lpips")
    from torchvision.models import alexnet

    theirs = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    trunk = alexnet()
    trunk.load_state_dict(torch.load(backbone, weights_only=True))
    for piece in (
        theirs.net.slice1,
        theirs.net.slice2,
        theirs.net.slice3,
        theirs.net.slice4,
        theirs.net.slice5,
    ):
        for number, layer in piece.named_children():
            layer.load_state_dict(trunk.features[int(number)].state_dict())
    a = smooth(2, 3, 64, 64)
    b = noisy(a)
    for i in range(2):
        files.save(a[i], tmp_path / f"{i}.png")
    reward = rewards.load("reference", metric="lpips", backbone=str(backbone))
    values = reward(b, ["", ""], meta(tmp_path / "0.png", tmp_path / "1.png"))
    with torch.no_grad():
        assert values.tolist() == pytest.approx(
            (-theirs(b * 2 - 1, a * 2 - 1)).flatten().tolist(), abs=1e-6
        )
    assert bool((values < 0).all()) and reward.scale.startswith("minus LPIPS")
    assert reward(a, ["", ""], meta(tmp_path / "0.png", tmp_path / "1.png")).tolist() == [0, 0]


def test_lpips_without_weights_says_where_they_are(monkeypatch, tmp_path):
    pytest.importorskip("lpips")
    from urllib.error import URLError

    def offline(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(
        ValueError,
        match="LPIPS needs torchvision's ImageNet weights of alex.*set reward.reference.backbone=",
    ):
        rewards.load("reference", metric="lpips")
    torch.save({"features.0.weight": torch.zeros(64, 3, 11, 11)}, tmp_path / "half.pth")
    with pytest.raises(ValueError, match="does not fit alexnet: 9 keys missing"):
        rewards.load("reference", metric="lpips", backbone=str(tmp_path / "half.pth"))


# --- files


def test_a_png_that_was_saved_from_the_media_is_infinitely_near_so_the_cap(tmp_path):
    x = torch.rand(1, 3, 20, 24)
    files.save(x[0], tmp_path / "x.png")
    assert rewards.load("reference")(x, [""], meta(tmp_path / "x.png")).tolist() == pytest.approx(
        [60], abs=1e-3
    )
    exact = rewards.load("reference", rounding=False)(x, [""], meta(tmp_path / "x.png"))
    assert exact.item() == pytest.approx(58.9, abs=0.5)


def test_a_photo_is_compared_upright_and_one_of_16_bits_over_its_range(tmp_path):
    x, turned = smooth(1, 3, 24, 20), Image.Exif()
    turned[files.ORIENTATION] = 6  # stored lying, turned by 90 degrees to the right to be seen
    files.to_pil(x[0].rot90(1, (-2, -1)))[0].save(tmp_path / "x.png", exif=turned)
    assert rewards.load("reference")(x, [""], meta(tmp_path / "x.png")).tolist() == pytest.approx(
        [60], abs=1e-3
    )
    Image.new("I;16", (20, 24), 40_000).save(tmp_path / "deep.png")
    grey = torch.full((1, 3, 24, 20), round(40_000 / 257) / 255)
    found = rewards.load("reference")(grey, [""], meta(tmp_path / "deep.png"))
    assert found.tolist() == pytest.approx([60], abs=1e-3)


def test_arrays_are_taken_with_channels_first_or_last_as_bytes_or_floats(tmp_path):
    x = smooth(3, 20, 24)
    last = x.permute(1, 2, 0).contiguous()
    np.save(tmp_path / "a.npy", x.numpy())
    np.save(tmp_path / "b.npy", (last * 255).round().byte().numpy())
    save_file({"picture": last}, tmp_path / "c.safetensors")
    save_file({"frames": (x * 255).round().byte()[None]}, tmp_path / "d.safetensors")
    media = noisy(x).expand(4, -1, -1, -1)
    values = rewards.load("reference", folder=str(tmp_path))(
        media, [""] * 4, meta("a.npy", "b.npy", "c.safetensors", "d.safetensors")
    )
    assert values.tolist() == pytest.approx([psnr(media[:1], x[None]).item()] * 4, abs=1e-4)


def test_of_a_video_the_mean_over_frames_or_the_worst_one(tmp_path):
    x = smooth(2, 3, 3, 16, 16)
    np.save(tmp_path / "v.npy", x[0].numpy())
    media = x[:1].clone()
    media[0, 1] = noisy(x[0, 1], 0.2)
    frame = psnr(media[0], x[0])
    context = meta(tmp_path / "v.npy")
    assert rewards.load("reference")(media, [""], context).item() == pytest.approx(
        frame.mean().item(), abs=1e-4
    )
    worst = rewards.load("reference", over="worst", chunk=2)
    assert (
        worst(media, [""], context).item() == pytest.approx(frame[1].item(), abs=1e-4)
        and "the worst of its frames" in worst.scale
    )
    parts = worst.parts(media, [""], context)
    assert (
        parts["worst"].item() == pytest.approx(frame[1].item(), abs=1e-4)
        and parts["mean"] > parts["worst"]
    )
    assert worst.parts(media[:, 0], [""], context) == {}


def test_gif_and_mp4_are_read_frame_by_frame(tmp_path):
    x = smooth(4, 3, 32, 32)
    files.save(x, tmp_path / "v.gif")
    near = rewards.load("reference")(x[None], [""], meta(tmp_path / "v.gif")).item()
    shuffled = rewards.load("reference")(x[None].flip(1), [""], meta(tmp_path / "v.gif")).item()
    assert near > 25 and shuffled < near - 10
    pytest.importorskip("av")
    files.save(x, tmp_path / "v.mp4")
    assert rewards.load("reference")(x[None], [""], meta(tmp_path / "v.mp4")).item() > 25


def test_the_context_may_hold_the_reference_itself():
    x = smooth(2, 3, 16, 16)
    reward = rewards.load("reference", key=None)
    assert reward.needs == {"reference"} and reward.reads == frozenset()
    assert reward(x, ["", ""], MediaContext(reference=x)).tolist() == pytest.approx(
        [60, 60], abs=1e-3
    )
    with pytest.raises(ValueError, match=r"shape \(2, 3, 8, 16\) and the media \(2, 3, 16, 16\)"):
        reward(x, ["", ""], MediaContext(reference=x[:, :, :8]))
    with pytest.raises(
        ValueError, match="context.reference must be as media are: media is a torch.uint8 tensor"
    ):
        reward(x, ["", ""], MediaContext(reference=(x * 255).byte()))
    with pytest.raises(
        ValueError,
        match=r"context.reference must be as media are: media spans \[.*; rewards take \[0, 1\]",
    ):
        reward(x, ["", ""], MediaContext(reference=x * 2 - 1))
    with pytest.raises(
        ValueError,
        match=(
            r'"truth" needs the context column "reference", .*no data file brings it: set'
            r" key=ground_truth"
        ),
    ):
        rewards.check_needs({"truth": {"reward": reward}}, ["meta", "group"])


def test_every_frame_has_its_value_and_the_score_is_their_mean_or_their_worst():
    """Frames off by 0, 0.1 and 0.2 everywhere: PSNR 60 (the cap), 20 and -20 log10(0.2) = 13.98."""
    truth = torch.full((2, 3, 3, 16, 16), 0.5)
    media = truth + torch.tensor([[0.0, 0.1, 0.2], [0.2, 0.1, 0.0]])[..., None, None, None]
    for over, score in (("mean", (60 + 20 + 13.9794) / 3), ("worst", 13.9794)):
        reward = rewards.load("reference", key=None, over=over, rounding=False)
        assert reward(media, [""] * 2, MediaContext(reference=truth)).tolist() == pytest.approx(
            [score] * 2, abs=1e-3
        )
        frames = [[60, 20, 13.9794], [13.9794, 20, 60]]
        assert (
            torch.allclose(reward.last_frames, torch.tensor(frames), atol=1e-3)
            and not reward.last_frames.requires_grad
        )


def test_scores_do_not_depend_on_batch_mates_or_chunks(tmp_path):
    x = smooth(5, 3, 24, 24)
    for i in range(5):
        files.save(smooth(3, 24, 24), tmp_path / f"{i}.png")
    context = meta(*(tmp_path / f"{i}.png" for i in range(5)))
    for metric in ("psnr", "ssim"):
        whole = rewards.load("reference", metric=metric)(x, [""] * 5, context)
        parts = rewards.load("reference", metric=metric, chunk=2)(x, [""] * 5, context)
        assert torch.allclose(whole, parts, atol=1e-6) and len(set(whole.tolist())) == 5


# --- gradient


@pytest.mark.parametrize("metric", ["psnr", "ssim"])
def test_the_gradient_is_that_of_finite_differences_and_points_at_the_truth(metric):
    x = smooth(2, 3, 16, 16).double()
    y = noisy(x.float()).double().requires_grad_()
    nearness = psnr if metric == "psnr" else ssim
    (slope,) = torch.autograd.grad(nearness(y, x).sum(), y)
    direction, h = torch.randn_like(y), 1e-5
    numeric = (nearness(y + h * direction, x) - nearness(y - h * direction, x)).sum() / (2 * h)
    assert (
        torch.allclose((slope * direction).sum(), numeric, rtol=1e-5)
        and (slope * (x - y)).sum() > 0
    )


def test_without_rounding_the_gradient_reaches_every_sample():
    x = smooth(2, 3, 16, 16)
    media = noisy(x).requires_grad_()
    reward = rewards.load("reference", key=None, rounding=False, metric="ssim")
    assert reward.differentiable
    reward(media, ["", ""], MediaContext(reference=x)).sum().backward()
    assert bool((media.grad.abs().amax((1, 2, 3)) > 0).all())
    with pytest.raises(ValueError, match="rounds pictures and gives no gradient"):
        rewards.load("reference", key=None)(media, ["", ""], MediaContext(reference=x))


# --- bad input


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        (
            "a.npy",
            np.zeros((3, 8, 16), np.float32),
            "is an image of 16 x 8 and what was generated an image of 16 x 16",
        ),
        (
            "a.npy",
            np.zeros((2, 3, 16, 16), np.float32),
            "is 2 frames of 16 x 16 and what was generated an image of",
        ),
        (
            "a.npy",
            np.zeros((4, 16, 16), np.float32),
            r"has shape \(4, 16, 16\); expected \(3, H, W\)",
        ),
        (
            "a.npy",
            np.full((3, 16, 16), 255.0, np.float32),
            "holds torch.float32 from 255 to 255; give bytes, or floats",
        ),
        ("a.npy", np.zeros((3, 16, 16), np.int64), "holds torch.int64"),
    ],
)
def test_a_ground_truth_that_does_not_fit_is_named(tmp_path, name, array, said):
    np.save(tmp_path / name, array)
    with pytest.raises(ValueError, match=said):
        rewards.load("reference", folder=str(tmp_path))(torch.rand(1, 3, 16, 16), [""], meta(name))


def test_files_that_cannot_be_ground_truth_are_named_before_a_run(tmp_path):
    reward = rewards.load("reference", folder=str(tmp_path))
    assert "ground_truth=None, which should be the path" in reward.complaint({})
    assert "there is no file" in reward.complaint({"ground_truth": "x.png"})
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    assert reward.complaint({"ground_truth": "x.png"}) is None and reward.reads == {"ground_truth"}
    (tmp_path / "x.txt").write_text("no picture")
    save_file({"a": torch.zeros(3, 4, 4), "b": torch.zeros(3, 4, 4)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="is not of a kind that can be read; give one of .png"):
        reward(torch.rand(1, 3, 4, 4), [""], meta("x.txt"))
    with pytest.raises(ValueError, match="holds 2 tensors; give a file with one"):
        reward(torch.rand(1, 3, 4, 4), [""], meta("two.safetensors"))
