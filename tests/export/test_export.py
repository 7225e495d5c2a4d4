"""`flowrl export`: other programs read from its files what the run trained."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
import small
import torch
import yaml
from safetensors.torch import load_file, save_file
from zoo.modular import of

import flowrl
from flowrl.export import weights
from flowrl.policy import load_policy
from flowrl.policy.modular import as_pipeline
from flowrl.runtime.store import checkpoint

NAME = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two iterations whose scale alpha / rank is 1.5 and whose LoRA acts."""
    path = tmp_path_factory.mktemp("export") / "mine"
    changes = {"iterations": "2", "eval__at_start": "true", "train__lora__alpha": "24"}
    made = small.trainer(path, **changes, optimizer__lr="0.05")
    made.run()
    return path


def export(run, *words):
    result = small.invoke("export", run, *words)
    assert result.exit_code == 0, result.output
    return result


def base():
    """The embedded model, as diffusers loads it."""
    return load_policy("shapes-sd3").pipe


@torch.no_grad()
def picture(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    how = {"num_inference_steps": 4, "max_sequence_length": 12, "guidance_scale": 3.0}
    made = pipe("a red circle", generator=generator, output_type="pt", **how)
    return made.images if hasattr(made, "images") else made[0]


def code_of(folder):
    return re.search(r"```python\n(.+?)```", (folder / "README.md").read_text(), re.S)[1]


def test_diffusers_makes_the_same_pictures_of_the_lora_and_of_merged_weights(run, tmp_path):
    """And both act; the merged pipeline is loaded by plain diffusers."""
    export(run, "-o", tmp_path / "lora")
    export(run, "--format", "merged", "-o", tmp_path / "merged")
    assert (tmp_path / "lora" / NAME).read_bytes() == (run / "lora" / NAME).read_bytes()
    pipe = base()
    plain = picture(pipe)
    pipe.load_lora_weights(str(tmp_path / "lora"))
    added = picture(pipe)
    code = code_of(tmp_path / "merged").replace('"merged"', f'"{tmp_path / "merged"}"')
    names = {}
    exec(code.partition("out = ")[0], names)  # the example of the card
    merged = picture(names["pipe"])
    assert (added - plain).abs().max() > 1e-3
    assert (added - merged).abs().max() < 1e-5
    assert not any(
        "lora" in key
        for key in load_file(
            tmp_path / "merged" / "transformer" / "diffusion_pytorch_model.safetensors"
        )
    )


def test_an_iteration_and_the_peak_are_exported_in_the_type_that_is_asked_for(run, tmp_path):
    """Iteration 2 is the last one, so that its file equals the run's own."""
    export(run, "--checkpoint", "2", "-o", tmp_path / "two")
    assert (tmp_path / "two" / NAME).read_bytes() == (run / "lora" / NAME).read_bytes()
    peak = {"held_out": "jpeg", "iteration": 1.0, "value": 0.4, "last": 0.1, "lora": None}
    (run / "peak.json").write_text(json.dumps(peak | {"checkpoint": "step-000001"}))
    try:
        export(run, "--checkpoint", "best", "--dtype", "bf16", "-o", tmp_path / "best.safetensors")
    finally:
        (run / "peak.json").unlink()
    first, last = load_file(tmp_path / "best.safetensors"), load_file(run / "lora" / NAME)
    assert {t.dtype for t in first.values()} == {torch.bfloat16}
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[key], last[key].bfloat16()) for key in last)
    assert "iteration 1 of 2" in (tmp_path / "best.md").read_text()


def test_the_card_says_what_was_trained_and_how_well(run, tmp_path):
    export(run, "-o", tmp_path / "lora")
    text = (tmp_path / "lora" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["library_name"] == "diffusers" and "lora" in head["tags"]
    for said in (
        "trained by nft",
        "jpeg (weight 1)",
        "LoRA of rank 16, alpha 24",
        "| seed | 0 |",
        "| before |",
        "| after, iteration 2 |",
        "| prompts | shapes:train |",
        "After minus before: jpeg",
        "load_lora_weights",
    ):
        assert said in text, said
    rewards = [row["reward/total"] for row in small.lines(run)]
    bars = {max(rewards): "█" * 20, min(rewards): "█"}
    for i, reward in enumerate(rewards, 1):
        assert f"| {i} | {reward:.4g} | {bars[reward]} |" in text
    compile(code_of(tmp_path / "lora"), "card", "exec")
    assert str(run.parent) not in text


def test_a_card_names_the_base_model_of_the_hub(run, tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.export.card.resolve_source", lambda _: ("owner/model@main", {}))
    export(run, "-o", tmp_path / "lora")
    text = (tmp_path / "lora" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "owner/model" and head["base_model_relation"] == "adapter"
    assert 'base = "owner/model"' in text


MISTAKES = {
    "no folder": (["nowhere"], '"nowhere" is not a folder; give the folder of a run'),
    "no run": ([""], "is not a run folder: it has no config.yaml"),
    "format": (["RUN", "--format", "a1111"], "'--format': 'a1111' is not one of"),
    "dtype": (["RUN", "--dtype", "fp8"], "'fp8' is not one of"),
    "checkpoint": (["RUN", "--checkpoint", "last"], "should be best or an iteration; its"),
    "iteration": (
        ["RUN", "--checkpoint", "7"],
        "keeps no trained weights of iteration 7; its checkpoints are of",
    ),
    "untrained": (["RUN", "--checkpoint", "0"], "keeps no trained weights of iteration 0"),
    "no peak": (["RUN", "--checkpoint", "best"], "has no peak.json, as no peak of a held-out"),
    "pickle": (["RUN", "-o", "mine.ckpt"], ".ckpt is not written; end it in .safetensors"),
    "file of a pipeline": (
        ["RUN", "--format", "merged", "-o", "a.safetensors"],
        "--format merged writes a pipeline; give a folder",
    ),
    "taken": (["RUN", "-o", "RUN"], "exists; remove it, or give another place"),
    "push": (["RUN", "--push", "mine"], "--push mine should be OWNER/NAME"),
    "push of a file": (["RUN", "--push", "a/b", "-o", "a.safetensors"], "--push uploads a folder"),
    "push offline": (["RUN", "--push", "a/b"], "needs a network, and HF_HUB_OFFLINE is set"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(case, run, tmp_path, monkeypatch):
    words, sentence = MISTAKES[case]
    monkeypatch.setattr("flowrl.export.weights.export", pytest.fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    words = [tmp_path if word == "" else run if word == "RUN" else word for word in words]
    result = small.invoke("export", *words)
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and sentence in said and not [*tmp_path.iterdir()]
    assert said.count("flowrl:") == 1


def changed(run, tmp_path, source=None, **train):
    """A run's folder whose config has another model, or other values in `train`."""
    other = tmp_path / "other"
    other.mkdir()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["train"] |= train
    settings["model"]["source"] = source or settings["model"]["source"]
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    return other


def test_the_card_of_a_modular_pipeline_loads_it_as_diffusers_does(run, tmp_path):
    """Without negative_prompt="" it has no guidance."""
    pipe = as_pipeline(of("StableDiffusion3AutoBlocks", base))
    pipe.save_pretrained(tmp_path / "model")
    other, call = changed(run, tmp_path, source=str(tmp_path / "model")), {"negative_prompt": ""}
    settings = yaml.safe_load((other / "config.yaml").read_text())
    settings["model"]["pipeline"] = call | {"max_sequence_length": 12}
    (other / "config.yaml").write_text(yaml.safe_dump(settings))
    shutil.copytree(run / "lora", other / "lora")
    export(other, "-o", tmp_path / "lora")
    text, code = (tmp_path / "lora/README.md").read_text(), code_of(tmp_path / "lora")
    assert "| pipeline | StableDiffusion3AutoBlocks |" in text and "negative_prompt=''," in code
    code = code.replace("path/to/the/base/model", str(tmp_path / "model"))
    names = {}
    exec(code.replace('"lora"', f'"{tmp_path / "lora"}"').partition("out = ")[0], names)
    assert names["pipe"].transformer.peft_config["run"].r == 16
    assert weights.kinds_of(pipe)["blocks"] == "StableDiffusion3AutoBlocks"


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"mode": "full"}, "trained all weights (train.mode=full), which are no LoRA"),
        (
            {"mode": "full", "source": "own.py:policy"},
            "use --format merged, which writes the whole pipeline; a model that is none is loaded",
        ),
        ({"parts": ["initial_noise"]}, "initial_noise alone, a small network beside the model"),
        ({}, "keeps no trained weights of iteration 0; it has no checkpoint of trained weights"),
    ],
)
def test_what_has_no_place_in_a_format_is_named(run, tmp_path, train, sentence):
    result = small.invoke("export", changed(run, tmp_path, **train))
    assert result.exit_code == 2 and sentence in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("kinds", "form", "parts", "sentence"),
    [
        (
            {"": "SanaPipeline", "transformer": "SanaTransformer2DModel"},
            "comfyui",
            ["denoiser"],
            "no comfyui layout of SanaPipeline is known; use --format diffusers, or",
        ),
        (
            {"": "LTXPipeline", "transformer": "LTXVideoTransformer3DModel"},
            "kohya",
            ["denoiser"],
            "no kohya layout of LTX-Video is known",
        ),
        ({"": "PixArtSigmaPipeline"}, "diffusers", ["denoiser"], "reads no LoRA files; use"),
        (
            {"": "WanPipeline"},
            "diffusers",
            ["denoiser", "text_encoder"],
            "trained the text encoder, whose LoRA diffusers' WanPipeline does not read",
        ),
    ],
)
def test_a_model_without_a_layout_is_named(
    run, tmp_path, monkeypatch, kinds, form, parts, sentence
):
    monkeypatch.setattr("flowrl.export.weights._kinds", lambda _: kinds)
    other = changed(run, tmp_path, parts=parts)
    shutil.copytree(run / "lora", other / "lora")
    result = small.invoke("export", other, "--format", form, "-o", tmp_path / "out")
    assert result.exit_code == 2 and sentence in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_two_networks_are_two_files(run, tmp_path):
    """Wan 2.2; a second network has the keys of the first, as diffusers reads it."""
    other, one = changed(run, tmp_path, source="wan2.1-1.3b"), torch.ones(2, 2, 2)
    (other / "lora").mkdir()
    layer = "transformer.blocks.0.attn1.to_q"
    for name in (NAME, "transformer_2_lora_weights.safetensors"):
        save_file(
            {f"{layer}.lora_{h}.weight": w.clone() for h, w in zip("AB", one, strict=True)},
            other / "lora" / name,
        )
    words = ("export", other, "--format", "comfyui", "-o")
    result = small.invoke(*words, tmp_path / "a.safetensors")
    assert result.exit_code == 2 and "is two files" in result.output
    assert small.invoke(*words, tmp_path / "out").exit_code == 0
    for name in ("other.safetensors", "transformer_2_lora_weights.safetensors"):
        assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in load_file(
            tmp_path / "out" / name
        )


@pytest.mark.long
def test_all_weights_are_exported_as_a_pipeline(tmp_path):
    """Iteration 1 of 2, and another type."""
    run, out = tmp_path / "full", tmp_path / "out"
    small.trainer(run, iterations="2", train__mode="full", optimizer__lr="0.01").run()
    export(run, "--format", "merged", "--checkpoint", "1", "--dtype", "bf16", "-o", out)
    made = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    saved = checkpoint.load(checkpoint.folder_of(run, 1))[0]["ema"]
    assert made.pop("pos_embed.pos_embed").dtype == torch.bfloat16  # a buffer, which stays
    for name, weight in made.items():
        assert torch.equal(weight, saved[f"transformer.{name}"].bfloat16()), name
    assert "all weights of denoiser" in (out / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub's API does to the upload of small files; `asked` keeps what came."""

    asked: ClassVar[list] = []
    status = 200

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, self.headers["Authorization"], body))
        address = f"http://{self.headers['Host']}/owner/name"
        answer = {"url": address, "commitUrl": f"{address}/commit/1"}
        answer |= {"commitOid": "1", "hookOutput": "", "success": True}
        if "preupload" in self.path:
            files = json.loads(body)["files"]
            answer = {
                "files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in files]
            }
        text = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, which huggingface_hub asks with a token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    Hub.asked.clear()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {"HF_HUB_OFFLINE": False, "ENDPOINT": address}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", address, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield Hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", [200, 403])
def test_a_folder_is_uploaded_and_no_output_holds_the_token(
    run, tmp_path, hub, monkeypatch, status
):
    monkeypatch.setattr(hub, "status", status)
    words = ("export", run, "--push", "owner/name", "-o", tmp_path / "lora")
    result = small.invoke(*words)
    said = " ".join(result.output.split())
    assert "hf_secret" not in said and hub.asked[0][1] == "Bearer hf_secret"
    assert hub.asked[0][0] == "/api/repos/create" and b"private" in hub.asked[0][2]
    if status == 200:
        assert result.exit_code == 0, said
        sent = hub.asked[-1]
        assert "/commit/" in sent[0] and b"README.md" in sent[2] and NAME.encode() in sent[2]
    else:
        assert result.exit_code == 1 and "is written, and its upload to owner/name failed" in said
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hf_secret" not in path.read_bytes()


def test_a_push_without_a_token_is_refused(run, tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    result = small.invoke("export", run, "--push", "owner/name", "-o", tmp_path / "lora")
    assert result.exit_code == 2 and "run hf auth login" in " ".join(result.output.split())
    assert not hub.asked


@pytest.mark.parametrize("form", [pytest.param("comfyui", marks=pytest.mark.long), "kohya"])
def test_generate_takes_what_was_exported_and_a_run_starts_from_it(run, tmp_path, form):
    """`generate --lora` of the file gives the picture of the run, and so does a run that starts
    with train.init_lora, before it trains."""
    export(run, "--format", form, "-o", tmp_path / "a.safetensors")
    how = ("a red circle", "--steps", "2", "--guidance", "none")
    made = []
    for words in ((run, *how), ("shapes-sd3", *how, "--lora", tmp_path / "a.safetensors")):
        file = tmp_path / f"{len(made)}.npy"
        result = small.invoke("generate", *words, "-o", file)
        assert result.exit_code == 0, result.output
        made.append(torch.from_numpy(np.load(file)))
    assert (made[0] - made[1]).abs().max() < 1e-5
    first = {"train__init_lora": str(tmp_path / "a.safetensors"), "iterations": "1"}
    trainer = small.trainer(tmp_path / "next", **first)
    began = flowrl.generate(trainer.policy, how[0], steps=2, guidance="none")[0]
    assert (made[0] - began).abs().max() < 1e-5
    trainer.run()
    after = flowrl.generate(trainer.policy, how[0], steps=2, guidance="none")[0]
    assert (after - began).abs().max() > 1e-5 and len(small.lines(tmp_path / "next")) == 1
