"""Pictures on their way to a network: every resize against its reference, and how far apart they
are on a photograph."""

import io

import pytest
import tiny_clip
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from flowrl.rewards.core import pictures

SIZES = [
    (224, 224),
    (512, 512),
    (600, 512),
    (100, 57),
    (337, 224),
    (224, 339),
    (333, 500),
    (64, 300),
]


def psnr(a, b):
    """Peak signal-to-noise ratio in dB of pictures in [0, 1]."""
    return float(-10 * (a - b).square().mean().log10())


def smooth(*size):
    return torch.nn.functional.interpolate(torch.rand(1, 3, 9, 9), size, mode="bicubic").clamp(0, 1)


# --- the ways and their references


@pytest.mark.parametrize("size", SIZES)
def test_pil_cropped_is_the_processor_of_clip_to_the_bit(size):
    frames = torch.rand(2, 3, *size)
    theirs = tiny_clip.processor("clip", 224)(tiny_clip.pil(frames), return_tensors="pt")[
        "pixel_values"
    ]
    assert torch.allclose(
        pictures.normalized(pictures.pil_cropped(frames, 224, floor=True)),
        torch.as_tensor(theirs),
        atol=1e-6,
    )


@pytest.mark.parametrize("size", SIZES)
def test_pil_cropped_is_the_transform_of_open_clip_and_openai_to_the_bit(size):
    from open_clip.transform import image_transform

    frames = torch.rand(2, 3, *size)
    theirs = torch.stack(
        [image_transform(224, is_train=False)(image) for image in tiny_clip.pil(frames)]
    )
    assert torch.allclose(pictures.normalized(pictures.pil_cropped(frames, 224)), theirs, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_pil_stretched_is_the_processor_of_siglip_to_the_bit(size):
    frames = torch.rand(2, 3, *size)
    theirs = tiny_clip.processor("siglip", 384)(tiny_clip.pil(frames), return_tensors="pt")[
        "pixel_values"
    ]
    ours = pictures.normalized(pictures.pil_stretched(frames, 384), pictures.HALF, pictures.HALF)
    assert torch.allclose(ours, torch.as_tensor(theirs), atol=1e-6)


def test_where_an_odd_number_of_pixels_is_cut_processors_round_down_and_torchvision_to_even():
    """115 columns go: 57.5 is 57 for a processor and 58 for torchvision; of 113, 56.5 is 56 for
    both."""
    ramp = torch.arange(339.0).div(339).expand(1, 3, 224, 339)
    down, even = pictures.cropped(ramp, 224, floor=True), pictures.cropped(ramp, 224)
    assert [round(float(x[0, 0, 0, 0] * 339)) for x in (down, even)] == [57, 58]
    assert torch.equal(
        pictures.cropped(ramp[..., :337], 224, floor=True), pictures.cropped(ramp[..., :337], 224)
    )


def test_fitted_keeps_the_whole_picture_in_the_middle_of_zeros():
    """300 x 100 -> 224 x 75 (74.67 rounds up); 149 columns of zeros, 74 left and 75 right."""
    out = pictures.fitted(torch.ones(1, 3, 300, 100), 224)
    assert out.shape == (1, 3, 224, 224)
    assert torch.allclose(out[..., 74:149], torch.ones(1, 3, 224, 75), atol=1e-6)
    assert out[..., :74].abs().sum() == 0 and out[..., 149:].abs().sum() == 0


def test_fitted_leaves_a_picture_of_the_right_length_untouched():
    frames = torch.rand(1, 3, 100, 224)
    assert torch.equal(pictures.fitted(frames, 224)[:, :, 62:162], frames)
    square = torch.rand(1, 3, 224, 224)
    assert torch.equal(pictures.fitted(square, 224), square)


def test_fitted_is_not_clamped_and_the_others_are():
    edges = (
        (torch.rand(1, 3, 32, 32) > 0.5).float().repeat_interleave(16, -1).repeat_interleave(16, -2)
    )
    assert pictures.fitted(edges, 224).min() < -0.01 and pictures.fitted(edges, 224).max() > 1.01
    for resize in (pictures.cropped, pictures.stretched):
        assert resize(edges, 224).min() == 0 and resize(edges, 224).max() == 1


# --- how far apart they are


def test_the_resizes_are_as_far_apart_on_a_photograph_as_published_scores_make_believe():
    """dB from PIL's bicubic at 224 on one photograph; measured 39.1, 56.7, 57.5, 30.7, 44.9 (on
    another one: 40.0, 55.6, -, 32.4, 45.3)."""
    photo = tiny_clip.photo()
    pil = pictures.pil_cropped(photo, 224)

    def torchvision(mode, antialias):
        return F.center_crop(F.resize(photo, [224], mode, antialias=antialias), [224, 224])

    file = io.BytesIO()
    tiny_clip.pil(photo)[0].save(file, "JPEG", quality=75)
    with Image.open(file) as image:
        jpeg = pictures.pil_cropped(F.to_tensor(image)[None], 224)
    assert psnr(torchvision(InterpolationMode.BILINEAR, True), pil) == pytest.approx(39.1, abs=0.5)
    assert psnr(torchvision(InterpolationMode.BICUBIC, True), pil) == pytest.approx(56.7, abs=0.5)
    assert psnr(pictures.cropped(photo, 224), pil) == pytest.approx(57.5, abs=0.5)
    assert psnr(torchvision(InterpolationMode.BICUBIC, False), pil) == pytest.approx(30.7, abs=0.5)
    assert psnr(jpeg, pil) == pytest.approx(44.9, abs=0.5)


def test_stretching_floats_is_57_db_from_stretching_bytes():
    photo = tiny_clip.photo()
    assert psnr(
        pictures.stretched(photo, 384), pictures.pil_stretched(photo, 384)
    ) == pytest.approx(57.0, abs=0.5)


# --- frames, rounding, batches


def test_frames_of_a_video_lie_next_to_each_other_and_are_averaged_back():
    video = (
        torch.arange(2.0).view(2, 1, 1, 1, 1)
        + torch.arange(3.0).view(1, 3, 1, 1, 1) * 10
        + torch.zeros(2, 3, 3, 4, 4)
    )
    frames = pictures.frames_of(video)
    assert frames[:, 0, 0, 0].tolist() == [0, 10, 20, 1, 11, 21]
    assert pictures.mean_of_frames(frames[:, 0, 0, 0].double(), video).tolist() == [10, 11]
    assert pictures.mean_of_frames(torch.ones(2), video[:, 0]).dtype == torch.float32


def test_rounded_pixels_are_those_of_a_png(tmp_path):
    frames = torch.rand(1, 3, 8, 8)
    tiny_clip.pil(frames)[0].save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert torch.equal(pictures.rounded(frames), F.to_tensor(image)[None])


@pytest.mark.parametrize("name", ["cropped", "stretched", "fitted", "pil_cropped", "pil_stretched"])
@pytest.mark.parametrize("size", [(16, 16), (40, 57), (300, 90)])
def test_equal_pixels_arrive_equal_in_any_batch(name, size):
    resize, frames = getattr(pictures, name), torch.rand(3, 3, *size)
    whole = resize(frames, 32)
    assert whole.shape == (3, 3, 32, 32)
    assert torch.equal(whole, torch.cat([resize(frame[None], 32) for frame in frames]))


@pytest.mark.parametrize("name", ["cropped", "stretched", "fitted"])
def test_resizes_of_floats_pass_a_gradient_to_every_picture(name):
    frames = smooth(40, 57).expand(2, -1, -1, -1).clone().requires_grad_()
    getattr(pictures, name)(frames, 32).square().sum().backward()
    assert bool((frames.grad.abs().amax((1, 2, 3)) > 0).all())
