"""What rewards hold on a card is told without loading them, and is what they then hold."""

from pathlib import Path

import open_clip
import pytest
import torch
import transformers as hf
import yaml
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from torch import nn

from flowrl.config.load import load_config
from flowrl.rewards import Reward, deqa, imagereward, load, mps, reward_class
from flowrl.rewards.core.features import features_bytes, load_features
from flowrl.rewards.core.reward_set import sizes
from flowrl.rewards.core.sizes import of_open_clip
from flowrl.rewards.networks.blip import Blip
from flowrl.runtime import registry
from flowrl.training.budget.planner import scorers

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = {"inverse_dynamics"}  # whose network is the user's


def count(module):
    return sum(p.numel() for p in module.parameters())


def size(name, **settings):
    return sizes({name: {"weight": 1.0, **settings}})[name]


@pytest.mark.parametrize("name", registry.shipped("flowrl.rewards"))
def test_every_reward_says_what_its_networks_take(name):
    cls = reward_class(name)
    own = cls.network_bytes.__func__ is not Reward.network_bytes.__func__
    told = own or cls.networks is not True
    assert told != (name in UNKNOWN)


@pytest.mark.parametrize(
    "name", ["jpeg", "saturation", "sharpness", "tiling", "shapes", "motion_smoothness"]
)
def test_rewards_that_hold_nothing_have_no_networks(name):
    held = [value for value in vars(load(name)).values() if isinstance(value, nn.Module)]
    assert not held and size(name) == 0


def test_what_is_told_is_what_a_loaded_reward_holds():
    clip = load("clip", preset="shapes")
    assert size("clip", preset="shapes") == 4 * count(clip.towers)
    assert size("preference") == 4 * count(load("preference").backbone.towers)
    assert features_bytes("shapes") == 4 * count(load_features("shapes").network.towers)


VIT_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
MIMO = {  # its report, arXiv:2506.03569
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151680,
}
OWL = {  # configuration_mplug_owl2.py
    "vocab_size": 32000,
    "visual_config": {
        "visual_model": {**VIT_L, "image_size": 448, "layer_norm_eps": 1e-6},
        "visual_abstractor": {
            "num_learnable_queries": 64,
            "hidden_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "intermediate_size": 2816,
            "encoder_hidden_size": 1024,
            "layer_norm_eps": 1e-6,
        },
    },
}
SWIN = {
    "image_size": 384,
    "embed_dim": 96,
    "depths": [2, 2, 18, 2],
    "num_heads": [3, 6, 12, 24],
    "window_size": 7,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
BERT = {"vocab_size": 30524, "max_position_embeddings": 512, "pad_token_id": 0}
BERT |= {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
BERT |= {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def picture_tower(side=224):
    config = hf.CLIPVisionConfig(**VIT_L, projection_dim=768, image_size=side)
    return (hf.CLIPVisionModelWithProjection if side == 224 else hf.CLIPVisionModel)(config)


def clip_h():
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {**VIT_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024)
    return hf.CLIPModel(config)


def qwen25(**text):
    """Qwen2.5-VL-7B, which Qwen-Image has for its text encoder, or one with another text model."""
    parts = yaml.safe_load((ROOT / "configs/architecture/qwen-image.yaml").read_text())
    own = {k: v for k, v in parts["text_encoder"].items() if not k.startswith("_")}
    own["text_config"] |= text
    own["vision_config"]["out_hidden_size"] = own["text_config"]["hidden_size"]
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(**own))


def qwen2(width, inner, heads, groups, vocabulary):
    """Qwen2-VL with 28 layers."""
    text = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 28}
    text |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary}
    config = hf.Qwen2VLConfig(text_config=text, vision_config={"hidden_size": width})
    return hf.Qwen2VLForConditionalGeneration(config)


def flant5(width, inner, heads):
    """CLIP-FlanT5; the checkpoints have a language head apart from the embeddings."""
    config = hf.T5Config(
        vocab_size=32128,
        d_model=width,
        d_kv=64,
        d_ff=inner,
        num_layers=24,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
    )
    t5, head = hf.T5ForConditionalGeneration(config), nn.Linear(width, 32128, bias=False)
    projector = nn.Sequential(nn.Linear(1024, width), nn.Linear(width, width))
    return nn.ModuleList([t5, head, projector, picture_tower(336)])


def mask2former():
    config = hf.Mask2FormerConfig(backbone_config=hf.SwinConfig(**SWIN), num_labels=80)
    clip = open_clip.create_model("ViT-L-14", load_weights=False, device="meta")
    return nn.ModuleList([hf.Mask2FormerForUniversalSegmentation(config), clip])


def vjepa(width, heads, layers, ratio):
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
    return hf.VJEPA2Model(hf.VJEPA2Config(**sizes, mlp_ratio=ratio))


def blip_large():
    state = {"visual_encoder.patch_embed.proj.weight": torch.empty(1024, 3, 16, 16)}
    state["visual_encoder.pos_embed"] = torch.empty(1, 197, 1024)
    mlps = {f"visual_encoder.blocks.{i}.mlp.fc1.weight": torch.empty(4096, 1) for i in range(24)}
    return imagereward.ImageRewardNetwork(Blip(state | mlps, BERT))


def clip_h_and_cross_attention():
    names = {"to_q": (1024, 1024), "to_kv": (128, 1024), "ff.2": (1024, 4096)}
    state = {f"attend.{name}.weight": torch.empty(shape) for name, shape in names.items()}
    return nn.ModuleList([clip_h(), *(mps.Layer(state, "") for _ in range(4))])


def checker():
    vision = {**VIT_L, "projection_dim": 768}
    return StableDiffusionSafetyChecker(hf.CLIPConfig(vision_config=vision, projection_dim=768))


HALF = {"dtype": "bfloat16"}
XL = {"weights": "zhiqiulin/clip-flant5-xl", "dtype": "float32"}
H, G = ({"weights": f"facebook/vjepa2-vit{size}"} for size in ("h-fpc64-256", "g-fpc64-384"))
NETWORKS = {  # reward, settings, network, bytes of a number
    "pickscore": ("pickscore", {}, clip_h, 4),
    "aesthetic": ("aesthetic", {}, picture_tower, 4),
    "siglip": (
        "aesthetic_v25",
        HALF,
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SO400M)),
        2,
    ),
    "safety": ("nsfw", {}, checker, 4),
    "imagereward": ("imagereward", {}, blip_large, 4),
    "mps": ("mps", {}, clip_h_and_cross_attention, 4),
    "geneval": ("geneval", {}, mask2former, 4),
    "vjepa l": ("coherence", {}, lambda: vjepa(1024, 16, 24, 4), 4),
    "vjepa h": ("coherence", H, lambda: vjepa(1280, 16, 32, 4), 4),
    "vjepa g": ("coherence", G, lambda: vjepa(1408, 22, 40, 48 / 11), 4),
    "hpsv3": ("hpsv3", {}, lambda: qwen2(3584, 18944, 28, 4, 152064).model, 2),
    "videoalign": ("videoalign", {}, lambda: qwen2(1536, 8960, 12, 2, 151936).model, 2),
    "mimo": ("editreward", {}, lambda: qwen25(**MIMO).model, 2),
    "qwen": ("editreward", {"base": "Qwen/Qwen2.5-VL-7B-Instruct"}, lambda: qwen25().model, 2),
    "deqa": ("deqa", {}, lambda: deqa.Owl(OWL), 2),
    "flant5 xxl": ("vqascore", {}, lambda: flant5(4096, 10240, 64), 2),
    "flant5 xl": ("vqascore", XL, lambda: flant5(2048, 5120, 32), 4),
    "vqa qwen": ("vqascore", {"model": "qwen"}, qwen25, 2),
}


@pytest.mark.parametrize("key", NETWORKS)
def test_published_numbers_are_those_of_the_architecture(key):
    name, settings, make, width = NETWORKS[key]
    with torch.device("meta"):
        network = make()
    assert size(name, **settings) == width * count(network)


@pytest.mark.filterwarnings("ignore")  # lpips uses old names of torchvision
@pytest.mark.parametrize("net", ["alex", "vgg", "squeeze"])
def test_lpips_is_told_too(net):
    lpips = pytest.importorskip("lpips")
    with torch.device("meta"):
        network = lpips.LPIPS(net=net, pretrained=False, pnet_rand=True, verbose=False)
    assert size("reference", metric="lpips", net=net) == 4 * count(network)


def test_a_clip_of_transformers_is_as_large_as_open_clips():
    """Both libraries hold the same network; open_clip has the configs in its package."""
    assert size("pickscore") == size("hpsv2") == of_open_clip("ViT-H-14") == 4 * 986_109_441
    assert size("clip", preset="nft") == of_open_clip("ViT-L-14")
    assert size("clip") == size("clip", model="openai/clip-vit-base-patch32", pretrained=None)
    base = {"model": "openai/clip-vit-base-patch16", "pretrained": None}
    assert size("clip", **base) == of_open_clip("ViT-B-16")
    assert features_bytes("clip") == of_open_clip("ViT-L-14")


def test_a_folder_is_a_copy_of_the_usual_network_and_another_name_is_not_known():
    usual = size("pickscore")
    for place in ("/data/pickscore", "yuvalkirstain/PickScore_v1@main"):
        assert size("pickscore", weights=place) == usual
    assert size("pickscore", weights="some/other") is None
    assert size("clip", preset="nft", pretrained="/data/clip") == size("clip", preset="nft")
    for model in ("some/other", "hf-hub:some/other", "local-dir:/nowhere"):
        assert size("clip", model=model, pretrained=None) is None
    assert size("clip", model="xlm-roberta-base-ViT-B-32", pretrained=None) is None
    assert features_bytes("dino", "some/other") is features_bytes("a/file.py:own") is None


def test_rewards_around_others_take_what_those_take():
    one, other = size("pickscore"), size("imagereward")
    assert size("rank", reward="pickscore") == size("video", reward="pickscore") == one
    assert size("win_rate", judge="imagereward") == other
    assert size("win_rate", judge="vr_thinker") == 0  # served elsewhere
    assert size("ensemble", members={"pickscore": 1.0, "b": {"name": "imagereward"}}) == one + other
    assert size("ensemble", members={"pickscore": 1.0, "checklist": 1.0}) is None
    assert size("checklist", questions="geneval") == size("geneval")
    assert size("checklist", questions="shapes", answerer="vlm_yesno") == 0
    assert size("reference") == 0 < size("reference", metric="lpips") < 1e7


def test_scorers_are_the_rewards_of_a_config_and_its_features():
    red = f"{ROOT}/docs/examples/red.py:red"
    words = ["model=shapes-sd3", "algorithm=flow_grpo", "data=shapes", f"reward={red}"]
    more = ["reward.pickscore.weight=0", "diversity.features=dino", "diversity.novelty=0.1"]
    found = scorers(load_config(None, [*words, *more]))
    assert found == {
        'reward "red"': None,
        'reward "pickscore"': 4 * 986_109_441,
        "diversity.features": 4 * 86_580_480,
    }


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "rank", "reward": "pikscore"}, 'unknown reward "pikscore"; did you mean'),
        ({"name": "clip", "model": "ViT-B-33"}, 'unknown CLIP model "ViT-B-33"; did you mean'),
        ({"name": "video", "reward": "clip", "reward_settings": {"modl": 1}}, "unknown setting"),
        ({"name": "clip", "preset": "nft", "scale": "hessel"}, "clip.preset=nft fixes"),
    ],
)
def test_bad_settings_are_one_sentence(entry, said):
    with pytest.raises(ValueError, match=said):
        sizes({"own": {"weight": 1.0, **entry}})
