"""The reward server: what travels, what is scored, what is refused and how."""

import base64
import io
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl import rewards
from flowrl.data.media import to_pil
from flowrl.rewards.server import wire
from flowrl.rewards.server.app import Server
from flowrl.shapes.prompts import all_prompts
from flowrl.types import MediaContext

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]


def brightness(media, prompts, context=None):
    """Reads every bit of the pixels."""
    return media.mean((1, 2, 3))


def picky(media, prompts, context=None):
    if "a dog" in prompts:
        raise OSError("no dogs")
    return brightness(media, prompts)


def question(media, prompts=PROMPTS, **more):
    return {"id": "q", "prompts": list(prompts), "media": media, **more}


def post(server, body, **options):
    """A request: bytes, JSON, or JSON among which are tensors."""
    kind = "application/json"
    if isinstance(body, dict):
        tensors = {name: value for name, value in body.items() if isinstance(value, torch.Tensor)}
        if tensors:
            rest = {name: value for name, value in body.items() if name not in tensors}
            body, kind = wire.pack(rest, tensors), wire.WITH_TENSORS
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": kind, **options.pop("headers", {})}
    return httpx.post(f"{server.url}/score", content=content, headers=headers, **options)


def png(image):
    """base64 of a PNG, as any program writes it; image: (3, H, W), or of PIL."""
    buffer = io.BytesIO()
    (to_pil(image[None])[0] if isinstance(image, torch.Tensor) else image).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


@pytest.fixture(scope="module")
def server():
    with Server(
        {"jpeg": 1.0, "light": {"reward": brightness, "weight": 0.5}},
        port=0,
        max_mb=1.0,
        device="cpu",
    ) as server:
        yield server


# --- scores


def test_a_png_of_any_program_is_a_picture(server):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    asked = {"prompts": ["a cat"], "media": {"png": [png(Image.fromarray(pixels))]}}
    answer = post(server, asked | {"reward": "light"}).json()
    expected = brightness(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].float().contiguous() / 255, ["a cat"]
    )
    assert answer["scores"] == expected.tolist()


def test_scores_equal_local_ones_bit_for_bit(server, media):
    local = rewards.score(
        media, PROMPTS, {"jpeg": 1.0, "light": {"reward": brightness, "weight": 0.5}}
    )
    answer = post(server, question(media)).json()
    assert answer["id"] == "q" and answer["scores"] == local.total.tolist()
    assert answer["parts"] == {label: column.tolist() for label, column in local.raw.items()}
    assert answer["errors"] == [None] * 4
    assert post(server, question(media, reward="light")).json()["parts"] == {
        "light": local.raw["light"].tolist()
    }


def test_version_says_what_a_client_must_know(server):
    about = httpx.get(f"{server.url}/version").json()
    assert about["rewards"]["jpeg"]["scale"] == "minus kilobytes at JPEG quality 95, divided by 500"
    assert about["total"]["scale"].startswith("1 x jpeg (minus kilobytes")
    assert about["rewards"]["light"]["weight"] == 0.5
    assert (about["protocol"], about["max_mb"], about["max_samples"]) == (2, 1.0, 1024)
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    assert [
        httpx.get(f"{server.url}/{page}").status_code for page in ("docs", "openapi.json", "")
    ] == [404] * 3


def test_a_sample_that_fails_is_null_with_its_own_message(media):
    media[3, 0, 0, 0] = math.nan
    with Server({"picky": picky}, port=0, device="cpu") as server:
        answer = post(server, question(media)).json()
    assert [score is None for score in answer["scores"]] == [False, True, False, True]
    assert "OSError: no dogs" in answer["errors"][1]
    assert "hold NaN or inf pixels" in answer["errors"][3]
    assert answer["errors"][0] is None and answer["errors"][2] is None
    assert answer["scores"][0] == brightness(media[:1], PROMPTS[:1]).item()


def test_a_sample_that_a_judge_does_not_answer_is_null_if_others_were_answered_and_else_a_503(
    media,
):
    def judge(media, prompts, context=None):
        if set(prompts) == {"a dog"}:
            raise rewards.RewardUnavailable("the judge answered none of 1 questions")
        return torch.tensor([math.nan if prompt == "a dog" else 1.0 for prompt in prompts])

    with Server({"judge": judge}, port=0, device="cpu") as server:
        answer = post(server, question(media)).json()
        alone = post(server, question(media[:1], ["a dog"]))
    assert answer["scores"] == [1.0, None, 1.0, 1.0]
    assert answer["errors"][1].startswith("judge: NaN or inf for 1 of 4 samples")
    assert alone.status_code == 503
    assert alone.json()["detail"] == "the judge answered none of 1 questions"


def test_a_broken_reward_is_a_500_with_its_sentence_and_the_server_lives_on(media):
    with Server(
        {"light": brightness, "liar": lambda m, p, c: torch.zeros(7)}, port=0, device="cpu"
    ) as server:
        answer = post(server, question(media))
        assert answer.status_code == 500
        assert 'reward "liar" returned a float32 tensor of shape (7,)' in answer.json()["detail"]
        assert post(server, question(media, reward="light")).status_code == 200


# --- batches across requests


def slow_log(seen):
    def reward(media, prompts, context=None):
        seen.append(
            (
                len(prompts),
                None if context is None or context.group is None else context.group.tolist(),
            )
        )
        time.sleep(0.1)
        return media.mean((1, 2, 3))

    return reward


def ask_together(server, bodies):
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [answer.json() for answer in pool.map(lambda body: post(server, body), bodies)]


def test_requests_that_wait_are_scored_together_up_to_the_limit(media):
    seen, bodies = (
        [],
        [question(torch.rand(2, 3, 16, 16), PROMPTS[:2], id=str(i)) for i in range(9)],
    )
    with Server({"slow": slow_log(seen)}, port=0, max_batch=6, device="cpu") as server:
        answers = ask_together(server, bodies)
    sizes = [size for size, _ in seen]
    assert sum(sizes) == 18 and max(sizes) == 6 and len(sizes) < 9
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["id"] == body["id"]
        assert answer["scores"] == body["media"].mean((1, 2, 3)).tolist()


def test_other_sizes_and_groups_are_not_mixed(media):
    seen = []
    bodies = [question(torch.rand(2, 3, 8, side), PROMPTS[:2]) for side in (8, 8, 10, 10)]
    bodies += [question(torch.rand(2, 3, 8, 8), PROMPTS[:2], group=[0, 0]) for _ in range(3)]
    with Server({"slow": slow_log(seen)}, port=0, device="cpu") as server:
        answers = ask_together(server, bodies)
    assert [size for size, group in seen if group is not None] == [2, 2, 2]
    assert sum(size for size, _ in seen) == 14
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["scores"] == body["media"].mean((1, 2, 3)).tolist()


def test_context_columns_arrive_row_by_row():
    def read(media, prompts, context):
        return (
            torch.tensor([row["n"] for row in context.meta])
            + context.source.mean((1, 2, 3))
            + context.actions.sum(1)
        )

    read.needs = {"meta", "source", "actions"}
    media, actions = torch.rand(4, 3, 8, 8), torch.randn(4, 5)
    meta = [{"n": 0.1 * i, "nested": {"list": [1, None, "x"]}} for i in range(4)]
    local = rewards.score(
        media, PROMPTS, {"read": read}, MediaContext(meta=meta, source=1 - media, actions=actions)
    )
    with Server({"read": read}, port=0, device="cpu") as server:
        body = question(media, meta=meta, source=1 - media, actions=actions)
        assert post(server, body).json()["scores"] == local.total.tolist()
        missing = post(server, question(media, meta=meta))
        assert missing.status_code == 422
        assert 'needs the context column "actions"' in missing.json()["detail"]


def test_a_request_whose_client_has_gone_is_not_scored(media):
    seen, busy, leave = [], threading.Event(), threading.Event()

    def held(media, prompts, context=None):
        seen.append(len(prompts))
        busy.set()
        leave.wait(10)
        return media.mean((1, 2, 3))

    with Server({"held": held}, port=0, max_batch=1, device="cpu") as server:
        first = threading.Thread(target=post, args=(server, question(media[:1], PROMPTS[:1])))
        first.start()
        busy.wait(10)
        with pytest.raises(httpx.ReadTimeout):
            post(server, question(media[:2], PROMPTS[:2]), timeout=0.5)
        deadline = time.monotonic() + 10
        while (
            not all(job.future.cancelled() for job in server.service.jobs)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        leave.set()
        first.join()
        assert post(server, question(media)).status_code == 200
    assert seen == [1, 4]


# --- what is refused


BAD = {
    "not JSON": (b"garbage", "the body is not JSON"),
    "cut": (b'{"prompts": ["a"', "the body is not JSON"),
    "bytes": (bytes(range(256)), "the body is not JSON"),
    "a list": ([], "the body: input should be an object"),
    "nested": (b"[" * 1000, "the body is not JSON"),
    "no prompts": ({"media": {"png": ["x"]}}, "prompts: field required"),
    "no media": ({"prompts": ["a"]}, "media should be"),
    "unknown key": (
        {"prompts": ["a"], "media": {"png": ["x"]}, "prompt": 1},
        'unknown key "prompt"; did you mean "prompts"',
    ),
    "a number as prompt": (
        {"prompts": [1], "media": {"png": ["x"]}},
        "prompts.0: input should be a valid string",
    ),
    "no png": (
        {"prompts": ["a"], "media": {"png": ["x" * 40]}},
        "png 0 is not base64 of an RGB PNG with 8 bits a channel",
    ),
    "an object": ({"prompts": ["a"], "media": {"shape": [1], "data": "gASV"}}, "media should be"),
}


@pytest.mark.parametrize("case", BAD)
def test_garbage_is_refused_with_one_sentence(server, case):
    body, said = BAD[case]
    answer = post(server, body)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": PROMPTS[:3]}, "4 media but 3 prompts"),
        ({"media": torch.rand(4, 1, 8, 8)}, "media has shape (4, 1, 8, 8)"),
        ({"media": torch.rand(4, 3, 8, 8) * 255}, "media spans"),
        ({"media": torch.rand(4, 3, 8, 8).double()}, "torch.float64 tensor"),
        ({"meta": [{}]}, '"meta" should have one row for each of the 4 prompts'),
        ({"group": [0, 0]}, '"group" should have one row'),
        ({"group": [2**70] * 4}, "group.0: input should be less than 9223372036854775808"),
        ({"actions": torch.rand(3, 1)}, '"actions" should have one row'),
        ({"reward": "jpg"}, 'reward "jpg" is not served; did you mean "jpeg"'),
        ({"media": torch.rand(0, 3, 8, 8)}, "the tensor 'media' is empty"),
        ({"size": torch.rand(4)}, 'unknown key "size"'),
        ({"prompts": torch.rand(4)}, "prompts: input should be a valid list"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(server, media, change, said):
    answer = post(server, question(media) | change)
    assert answer.status_code == 422 and said in answer.json()["detail"]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "I;16"])
def test_a_png_that_is_not_rgb_is_refused(server, mode):
    answer = post(server, {"prompts": ["a"], "media": {"png": [png(Image.new(mode, (4, 4)))]}})
    assert answer.status_code == 422
    assert "png 0 is not base64 of an RGB PNG" in answer.json()["detail"]


def test_a_torn_png_and_pngs_of_two_sizes_are_refused(server, media):
    whole = [png(image) for image in media]
    torn = base64.b64encode(base64.b64decode(whole[1])[:-40]).decode()
    assert (
        "png 1 cannot be read"
        in post(
            server, {"prompts": PROMPTS, "media": {"png": [whole[0], torn, *whole[2:]]}}
        ).json()["detail"]
    )
    wide = png(torch.rand(3, 4, 8))
    answer = post(server, {"prompts": PROMPTS, "media": {"png": [*whole[:3], wide]}})
    assert answer.status_code == 422
    assert "one size; these have [(8, 4), (16, 16)]" in answer.json()["detail"]


BLACK = torch.zeros(1, 3, 300, 300)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b" " * 1_000_001, "a request may have 1 MB, and this one has 1.0 MB in its body; send"),
        ({"prompts": ["a"], "media": BLACK}, "1.1 MB in its body"),
        ({"prompts": ["a"], "media": BLACK.byte()}, "1.1 MB unpacked; send fewer samples"),
        ({"prompts": ["a"], "media": {"png": [png(BLACK[0])]}}, "1.1 MB unpacked"),
        ({"prompts": ["a"] * 1025, "media": {"png": [""]}}, "1024 samples"),
        ({"prompts": ["a"], "media": {"png": [""]}, "meta": [{}] * 9000}, "3.7 MB of JSON in mem"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_unpacked(server, body, said):
    answer = post(server, body)
    assert answer.status_code == 413 and said in answer.json()["detail"]


def with_tensors(server, text, file):
    body = len(text).to_bytes(8, "little") + text + file
    answer = post(server, body, headers={"Content-Type": wire.WITH_TENSORS})
    return answer.status_code, answer.json()["detail"]


def test_tensors_that_cannot_be_are_refused(server):
    """A body that is cut; a file of another kind, with another size, or of a type unknown here."""
    text = json.dumps({"prompts": ["a"]}).encode()
    whole = wire.split(wire.pack({}, {"media": torch.rand(1, 3, 8, 8)}))[1]
    shape, endless = b"[1,3,8,8]", b"[" + b"9" * 400 + b"]"
    files = [b"garbage", whole[:-4], whole + b"0000", whole.replace(b"F32", b"F99")]
    files.append(whole.replace(shape, b"[9,3,8,8]"))
    size = int.from_bytes(whole[:8], "little") + len(endless) - len(shape)
    files.append(size.to_bytes(8, "little") + whole[8:].replace(shape, endless))
    for file in files:
        status, said = with_tensors(server, text, file)
        assert status == 422 and "safetensors file" in said and "\n" not in said
    assert with_tensors(server, text, b"") == (422, said_of_media(server))
    cut = post(server, bytes([9] * 8), headers={"Content-Type": wire.WITH_TENSORS})
    assert cut.status_code == 422 and "the body has 8 bytes" in cut.json()["detail"]


def said_of_media(server):
    return post(server, {"prompts": ["a"]}).json()["detail"]


def test_a_body_without_length_or_of_another_type_is_refused(server, media):
    body = wire.pack(question(None), {"media": media})
    streamed = httpx.post(
        f"{server.url}/score", content=iter([body]), headers={"Content-Type": "application/json"}
    )
    assert streamed.status_code == 411
    form = post(server, body, headers={"Content-Type": "text/plain"})
    assert form.status_code == 415 and "Content-Type: application/json" in form.json()["detail"]


def test_a_token_is_asked_for_everywhere_but_for_health(media, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-20-chars")
    with Server({"jpeg": 1.0}, port=0, token_env="MY_TOKEN", device="cpu") as server:
        for wrong in (
            {},
            {"Authorization": "Bearer a-secret-of-20-char"},
            {"Authorization": "Bearer a-secret-of-20-chars "[:-2]},
            {"Authorization": "a-secret-of-20-chars"},
        ):
            answer = post(server, b"garbage", headers=wrong)
            assert answer.status_code == 401
            assert answer.json()["detail"].startswith("send the server's token")
            assert httpx.get(f"{server.url}/version", headers=wrong).status_code == 401
        right = {"Authorization": "Bearer a-secret-of-20-chars"}
        opened = post(server, question(media), headers=right)
        assert opened.status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_shapes_scores_through_a_server_equal_local_ones():
    prompts = list(all_prompts()[:4])
    media, texts = torch.rand(4, 3, 64, 64), [prompt["prompt"] for prompt in prompts]
    local = rewards.score(media, texts, {"shapes": 1.0}, MediaContext(meta=prompts))
    with Server({"shapes": 1.0}, port=0, device="cpu") as server:
        assert (
            post(server, question(media, texts, meta=prompts)).json()["scores"]
            == local.total.tolist()
        )
        answer = post(server, question(media, texts, meta=[{}] * 4)).json()
    assert answer["scores"] == [None] * 4
    assert "the shapes reward is for data=shapes" in answer["errors"][2]
