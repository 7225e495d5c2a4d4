"""What travels between a reward server and its clients arrives bit for bit.

What is served has a name of its own.
"""

import base64
import json
import math
import zlib

import pytest
import torch

from flowrl import rewards
from flowrl.rewards.server import wire
from flowrl.types import MediaContext


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 5, 7),
        torch.rand(2, 4, 3, 5, 7),
        torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
        torch.randn(3, 2, dtype=torch.float64),
        torch.randint(-(2**62), 2**62, (4, 2)),
        torch.arange(5, dtype=torch.int32),
        torch.arange(256, dtype=torch.uint8),
        torch.rand(4, 6).t(),
    ],
)
def test_a_tensor_arrives_bit_for_bit(tensor):
    text, file = wire.split(wire.pack({"id": "q"}, {"actions": tensor}))
    out = wire.tensors_of(file)["actions"]
    assert json.loads(text) == {"id": "q"}
    assert out.dtype == tensor.dtype and out.shape == tensor.shape
    assert out.numpy().tobytes() == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 4, 3, 5, 7)])
def test_pixels_with_eight_bits_travel_as_bytes_and_arrive_bit_for_bit(shape):
    media = torch.randint(0, 256, shape, dtype=torch.uint8).float() / 255
    sent = wire.as_bytes(media)
    assert sent.dtype == torch.uint8
    request = wire.ScoreRequest(prompts=[""], media=sent)
    assert torch.equal(wire.unpack_media(request.media), media) and request.nbytes == media.nbytes


def test_other_pixels_travel_as_floats_unless_the_reader_rounds():
    media = torch.rand(4, 3, 16, 16)
    assert wire.as_bytes(media) is media
    rounded = wire.unpack_media(wire.as_bytes(media, rounds=True))
    assert torch.equal(rounded, (media * 255).round() / 255)


def test_a_head_of_tensors_without_end_is_refused_before_it_is_parsed():
    head = json.dumps({"__metadata__": {"x": "x" * wire.MOST_HEAD}}).encode()
    with pytest.raises(ValueError, match="head of the safetensors file is longer than 65,536"):
        wire.tensors_of(len(head).to_bytes(8, "little") + head)


def chunk(kind, data):
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


@pytest.mark.parametrize(("colour", "mode"), [(b"\x08\x02", "RGB"), (b"\x08\x00", "L")])
def test_a_png_with_a_second_head_is_refused_before_its_pixels_are_unpacked(colour, mode):
    """Declared as 4 x 4, 192 bytes; its second head, which Pillow believes, says 2000 x 2000."""
    heads = [
        side.to_bytes(4) * 2 + kind + bytes(3) for side, kind in ((4, b"\x08\x02"), (2000, colour))
    ]
    rows = zlib.compress(bytes(2000 * (1 + 2000 * len(mode))))
    file = (
        b"\x89PNG\r\n\x1a\n"
        + b"".join(chunk(b"IHDR", head) for head in heads)
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )
    record = wire.Pngs(png=[base64.b64encode(file).decode()])
    assert len(file) < 13_000 and record.nbytes == 192
    with pytest.raises(
        ValueError,
        match=(
            rf"png 0 cannot be read: .*head says \(4, 4\) RGB, its pixels are \(2000, 2000\) {mode}"
        ),
    ):
        wire.unpack(record)


def test_the_version_changes_with_settings_weights_and_source(tmp_path):
    file = tmp_path / "mine.py"

    def version(spec):
        loaded = rewards.load_set(spec)
        return wire.about(loaded.rewards, loaded.weights, flowrl="1", max_mb=1).version

    def mine(scale):
        file.write_text(
            "from flowrl.rewards import Reward\nclass R(Reward):\n    name, scale = 'mine',"
            f" '{scale}'\n"
        )
        return version({"mine": {"name": f"{file}:R"}})

    specs = [
        {"jpeg": 1.0},
        {"jpeg": 2.0},
        {"jpeg": {"quality": 80}},
        {"x": {"name": "jpeg"}},
        {"jpeg": 1.0, "shapes": 1.0},
    ]
    versions = [version(spec) for spec in specs] + [mine("one"), mine("two")]
    assert len(set(versions)) == 7
    assert versions == [version(spec) for spec in specs] + [mine("one"), mine("two")]


def test_columns_are_those_that_a_reward_needs_and_must_be_there():
    context = MediaContext(meta=[{}], group=torch.tensor([3]))
    assert list(wire.columns_of(context, frozenset({"group"}))) == ["group"]
    with pytest.raises(
        ValueError, match="needs the context columns actions, source, which were not given"
    ):
        wire.columns_of(context, frozenset({"source", "actions", "meta"}))
