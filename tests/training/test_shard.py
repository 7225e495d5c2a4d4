"""Networks whose weights are split over processes: the same numbers, a share of the bytes, and the
same calls on all processes, whatever rows they have."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import long
import processes
import pytest
import small
import tiny
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.policy.weights.blocks import blocks
from flowrl.policy.weights.recompute import recompute
from flowrl.runtime.processes import shares
from flowrl.runtime.processes import world as distributed
from flowrl.training.loop import Trainer
from flowrl.training.split import shard

FOUND = {
    "sd15": {"BasicTransformerBlock", "ResnetBlock2D"},
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "wan21": {"WanTransformerBlock"},
}
# what each of two processes calls: noise levels, and whether with a gradient
CALLS = [[(0.95, True), (0.3, False), (0.95, True), (0.2, True)], [(0.2, True), (0.9, False)]]


@pytest.mark.parametrize("name", FOUND)
def test_blocks_of_unets_and_transformers_are_found(name):
    pipe = tiny.pipeline(name)
    network = getattr(pipe, "unet", None) or pipe.transformer
    found = blocks(network)
    assert {type(block).__name__ for block in found} == FOUND[name]
    inside = {id(p) for block in found for p in block.parameters()}
    assert len(inside) == sum(len(list(block.parameters())) for block in found)  # none twice


def test_blocks_of_a_plain_module_are_the_members_of_its_outermost_lists():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    body = nn.ModuleDict({"first": nn.Linear(2, 2), "rest": nn.ModuleList([Block(), Block()])})
    assert blocks(body) == list(body["rest"])
    assert blocks(nn.Linear(2, 2)) == []


def test_a_network_without_blocks_or_of_quantised_weights_is_refused():
    policy = load_policy(tiny.ToyFlow(), shape=(2,), cond=tiny.toy_cond, lora={"rank": 2})
    policy.networks = {"module": nn.Linear(2, 2)}
    with pytest.raises(ValueError, match="no repeated blocks"):
        shard.check_policy(policy)
    two = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    two["blocks"][0].weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    policy.networks = {"module": two}
    with pytest.raises(ValueError, match="torch.uint8, and only whole floating-point weights"):
        shard.check_policy(policy)


def called(policy, calls, backward):
    """Make these calls and add up the gradient of their squares."""
    cond = policy.encode(tiny.PROMPTS[:1])
    rows = torch.zeros(1, dtype=torch.int64)
    for number, (sigma, gradient) in enumerate(calls):
        x = torch.randn((1, *policy.latent_shape), generator=torch.Generator().manual_seed(number))
        with torch.set_grad_enabled(gradient):
            v = policy.velocity(x, sigma, cond, rows, guidance="none")
        if gradient:
            backward(v.square().sum())


@pytest.mark.long
def test_processes_that_call_other_networks_a_different_number_of_times_stay_in_step(tmp_path):
    """A UNet, a transformer with checkpointing, and a video model of two networks, of which a call
    takes the one for its noise level. Their gradients are those of all calls in one process."""
    policies = {name: tiny.policy(name, lora={"rank": 2}) for name in ("sd15", "sd3", "wan22")}
    recompute(policies["sd3"].networks.values(), True)

    def alone():
        out = {}
        for name, policy in policies.items():
            for calls in CALLS:
                called(policy, calls, torch.Tensor.backward)
            out[name] = torch.cat([p.grad.flatten() for p in policy.trainable.named().values()])
        return out

    def divided():
        accelerator = distributed.start("no", 60)
        world, out = distributed.World(accelerator, 60), {}
        for name, policy in policies.items():
            prompts = [{"prompt": tiny.PROMPTS[0]}]
            whole = sum(map(shard.size_of, policy.networks.values()))
            shard.shard(policy, world, prompts, guidance="none", autocast=nullcontext)
            share = sum(map(shard.size_of, policy.networks.values()))
            called(policy, CALLS[world.rank], world.backward)
            trained = policy.trainable.named().values()
            world.sum_gradients(trained)
            out[name] = torch.cat([p.grad.flatten() for p in trained])
            sizes = [share, whole, policy.calls, world.in_step.followed]
            out[f"{name} sizes"] = torch.tensor(sizes)
        return out

    (expected,) = processes.on(1, alone)
    found = processes.on(2, divided)
    for name in policies:
        for rank in (0, 1):
            apart = torch.from_numpy(found[rank][name] - expected[name]).norm()
            assert apart < 1e-5 * torch.from_numpy(expected[name]).norm()
        held, whole, *_ = found[0][f"{name} sizes"]
        assert held < 0.75 * whole  # adapters stay whole
        assert [found[rank][f"{name} sizes"][2] for rank in (0, 1)] == [4, 2]
        assert found[1][f"{name} sizes"][3] >= 4  # calls and backwards that were not its own


def test_a_sharded_run_in_which_a_process_has_nothing_to_train_equals_one_process(tmp_path):
    """Rank 1's prompts score alike, so that it has no row. The other's are drawn again in rounds,
    and the run ends with an evaluation of three images and an exported LoRA."""
    policy = tiny.policy("sd3", lora={"rank": 2, "alpha": 2})

    def uneven(media, prompts, context):
        even = torch.tensor(["red" in prompt for prompt in prompts])
        return torch.where(even, 0.0, media.flatten(1).std(1))

    texts = ["a red circle", "a blue square"]

    def run(name, *words):
        asked = processes.words("flow_grpo", name, tmp_path / name, *words, "batch.prompts=2")
        asked = [w for w in asked if not w.startswith("data.eval")]
        live = {"train": texts, "eval": ["a green star"]}
        trainer = Trainer(
            load_config(None, asked), policy=policy, rewards={"r": uneven}, prompts=live
        )
        trainer.run()
        read = small.values(trainer.path, "after") if trainer.world.main else {}
        seen = {name: torch.tensor(values) for name, values in read.items()}
        return {**policy.state(), **seen}

    more = ["batch.micro=1", "batch.updates=1", "draw.mode=balance", "draw.rounds=1"]
    more += ["eval.images=3", "eval.steps=2", "eval.baseline_guidance=null"]
    (one,) = processes.on(1, lambda: run("replicated", *more))
    found = processes.on(2, lambda: run("sharded", *more))
    for name, value in one.items():
        close = {"rtol": 1e-4, "atol": 1e-7}
        torch.testing.assert_close(*map(torch.from_numpy, (found[0][name], value)), **close)
    assert "r" in one and len(one["r"]) == 3  # images of the evaluation, dealt to two
    folder = tmp_path / "sharded" / "lora"
    assert (folder / "pytorch_lora_weights.safetensors").is_file()


@long.mark
def test_all_weights_in_shares_are_trained_averaged_and_saved_as_by_one_process(tmp_path):
    """An update of NFT, which keeps an old copy: weights, averages, moments and copies are those of
    one process, and each of two holds half of them. One process and two read what the others
    saved."""
    policy = load_policy("shapes-sd3", lora=None)
    more = ["train.mode=full", "batch.prompts=2", "batch.micro=4", "batch.updates=1"]
    more += ["batch.group=2", "sampler.steps=3"]

    def run(name, base, resume=False):
        cfg = load_config(None, processes.words("nft", base, tmp_path / name, *more))
        resumed = tmp_path / name if resume else None
        spread = {"spread": processes.spread}
        trainer = Trainer(
            cfg, resume=resumed, policy=policy, rewards=spread, prompts="shapes:train"
        )
        list(trainer)
        weights = trainer.parts.weights
        moments = [weights.adamw.state[p]["exp_avg"] for p in weights.parameters.values()]
        kept = [*weights.parameters.values(), *weights.ema.average.values(), *moments]
        kept += policy.trainable.tensors("old").values()
        held = sum(shares.held(t).numel() for t in kept)
        read = [shares.whole(t).flatten() for t in kept]
        return {"held": torch.tensor(held / sum(t.numel() for t in kept)), "read": torch.cat(read)}

    (one,) = processes.on(1, lambda: run("one", "replicated"))
    both = processes.on(2, lambda: run("two", "sharded"))
    assert one["held"] == 1 and all(0.45 < part["held"] < 0.55 for part in both)
    expected, found = small.weights(tmp_path / "one"), small.weights(tmp_path / "two")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
    (fewer,) = processes.on(1, lambda: run("two", "sharded", resume=True))
    assert (fewer["read"] == both[0]["read"]).all()
    wider = processes.on(2, lambda: run("one", "sharded", resume=True))
    assert all((part["read"] == one["read"]).all() for part in wider)


@pytest.mark.parametrize("mode", long.but(["full", "lora"], {"lora"}))
def test_a_network_that_is_split_was_never_whole_on_a_device(mode, tmp_path, monkeypatch):
    """A block at a time comes from the host, and nobody keeps the weights whole, which were made
    fp32 where all are trained."""
    split, whole = shard.split, []

    def followed(network, mesh):
        own = [p for name, p in network.named_parameters() if "lora_" not in name]
        assert {p.dtype for p in own} == {torch.float32 if mode == "full" else torch.bfloat16}
        refs = [weakref.ref(p) for p in own]
        del own
        made = split(network, mesh)
        gc.collect()
        whole.append(sum(ref() is not None for ref in refs))
        return made

    monkeypatch.setattr(shard, "split", followed)
    more = [f"train.mode={mode}", "model.dtype=bf16", "train.precision=bf16", "batch.prompts=2"]

    def work():
        cfg = load_config(None, processes.words("nft", "sharded", tmp_path / "run", *more))
        made = Trainer(cfg, rewards={"spread": processes.spread})
        turns = made.policy.turns
        return {"whole": torch.tensor(whole), "waits": torch.tensor(turns.waiting is not None)}

    for part in processes.on(2, work):
        assert part["whole"].tolist() == [0] and not part["waits"]


def test_a_network_that_waits_is_split_where_it_computes(monkeypatch):
    """Its first weights may lie in a block, on the host."""
    policy = load_policy(tiny.pipeline("sd3"), lora={"rank": 2}, device="cpu", split=True)
    policy.turns.device = torch.device("meta")
    asked = []
    monkeypatch.setattr(shard, "one_row", lambda *call: {"transformer": None})
    monkeypatch.setattr(shard, "init_device_mesh", lambda kind, size: asked.append((kind, size)))
    monkeypatch.setattr(shard, "split", lambda network, mesh: network)
    monkeypatch.setattr(shard, "_call", lambda *call: None)
    world = SimpleNamespace(size=2, keep_in_step=lambda rows: None)
    monkeypatch.setattr(shard, "Together", lambda *call: None)
    shard.shard(policy, world, [], guidance="none", autocast=nullcontext)
    assert asked == [("meta", (2,))] and not policy.turns.used


def test_a_gradient_in_shares_is_clipped_by_the_norm_of_all(tmp_path):
    """Rows of a split matrix and a whole vector: (3, 0), (0, 4) and 12 have the norm 13."""

    def work():
        world = distributed.World(distributed.start("no", 60), 60)
        net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        root = shard.split(nn.ModuleDict({"blocks": net}), init_device_mesh("cpu", (world.size,)))
        split = list(root.parameters())
        for p, rows in zip(split, ([[3.0, 0.0], [0.0, 4.0]], [[0.0, 0.0]] * 2), strict=True):
            p.grad = torch.zeros_like(p)
            shares.held(p.grad).copy_(shares.share_of(torch.tensor(rows), p))
        own = nn.Parameter(torch.zeros(1))
        own.grad = torch.tensor([12.0])
        norm = world.clip_gradients([*split, own], 1.0)
        return {"norm": torch.tensor(norm), "a": shares.whole(split[0].grad), "own": own.grad}

    for part in processes.on(2, work):
        assert part["norm"] == 13
        assert part["a"].flatten().tolist() == pytest.approx([3 / 13, 0, 0, 4 / 13])
        assert part["own"].tolist() == pytest.approx([12 / 13])
