"""Frozen teachers: adapters of any rank on the student's network, and whole models."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from peft import LoraConfig
from torch import nn

from flowrl.algorithms.opd import OPDConfig
from flowrl.policy import load_policy, teachers
from flowrl.policy.weights.parts import standing
from flowrl.runtime.ledger import CountedPolicy, Ledger

STUDENT = {"rank": 2, "alpha": 4, "targets": ["to_q", "to_v"]}
TEACHER = {"rank": 5, "alpha": 3, "targets": ["to_k", "to_v", "to_out.0"]}
PROMPTS = ["a cat", "a dog", "a fish"]
ROWS = torch.tensor([0, 2, 1, 2])
SIGMA = torch.tensor([1.0, 0.9, 0.6, 0.6], dtype=torch.float64)
DOMAINS = [{"domain": name} for name in ("cats", "dogs", "fish")]


def drawn(policy, seed):
    """The policy with drawn weights in its adapter."""
    g = torch.Generator().manual_seed(seed)
    for weight in policy.parts["denoiser"].values():
        weight.data = 0.3 * torch.randn(weight.shape, generator=g)
    return policy


@pytest.fixture(scope="module")
def specialists(tmp_path_factory):
    """(policy, folder of its LoRA) of two specialists of the tiny SD3."""
    found = []
    for seed in (1, 2):
        policy = drawn(tiny.policy("sd3", lora=TEACHER), seed)
        folder = tmp_path_factory.mktemp("lora")
        policy.save_lora(folder)
        found.append((policy, folder))
    return found


@pytest.fixture(scope="module")
def student():
    """A student with drawn weights, which takes new teachers in every test."""
    return drawn(tiny.policy("sd3", lora=STUDENT), 3)


def options(**table):
    return OPDConfig(teachers=table)


def given(adapter=None, model=None, guidance="none", domains=None):
    own = {"adapter": adapter and str(adapter), "model": model, "guidance": guidance}
    return {**own, "domains": domains}


def place(policy):
    """Latents, levels, conditions and rows of a call."""
    x = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    return x, SIGMA, policy.encode(PROMPTS), ROWS


def taught(student, table, at, meta=DOMAINS, load_model=None):
    student.teachers = teachers.load(student, options(**table), 4, load_model)
    student.teachers.begin(meta)
    return CountedPolicy(student, Ledger()).taught(*at)


def test_rows_go_to_the_teacher_of_their_domain_with_its_guidance(student, specialists):
    """Adapters of another rank and other layers than the student's, as where they were trained."""
    (cats, one), (others, two) = specialists
    at = place(student)
    table = {
        "a": given(one, guidance=2.5, domains=["cats"]),
        "b": given(two, guidance="none", domains=["dogs", "fish"]),
    }
    before = student.velocity(*at, guidance="none").detach()
    v = taught(student, table, at)
    assert not v.requires_grad and student.trainable.active == "default"
    for rows, teacher, guidance in (([0], cats, 2.5), ([1, 2, 3], others, "none")):
        x, sigma, _, prompts = (
            value[rows] if isinstance(value, torch.Tensor) else value for value in at
        )
        own = teacher.velocity(x, sigma, teacher.encode(PROMPTS), prompts, guidance=guidance)
        torch.testing.assert_close(v[rows], own.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(student.velocity(*at, guidance="none").detach(), before)


def test_teachers_are_neither_trained_nor_exported_nor_in_the_way(student, specialists, tmp_path):
    before = {name: p.clone() for name, p in student.parts["denoiser"].items()}
    saved = student.save_lora(tmp_path / "before").read_bytes()
    at = place(student)
    first = taught(student, {"a": given(specialists[0][1])}, at)
    after = student.parts["denoiser"]
    assert before.keys() == after.keys() == student.state().keys()
    assert all(torch.equal(before[name], p) and p.requires_grad for name, p in after.items())
    trained = [p for p in student.modules["transformer"].parameters() if p.requires_grad]
    assert len(trained) == len(after)
    assert student.save_lora(tmp_path / "after").read_bytes() == saved
    # another run of the same policy has other teachers
    second = taught(student, {"a": given(specialists[1][1])}, at)
    assert not torch.allclose(first, second)
    names = [name for name in student.modules["transformer"].peft_config if "teacher_a" in name]
    assert names == ["teacher_a"]
    torch.testing.assert_close(taught(student, {"a": given(specialists[0][1])}, at), first)


def test_two_equal_teachers_are_one(student, specialists):
    folder = specialists[0][1]
    at = place(student)
    one = taught(student, {"a": given(folder, guidance=2)}, at)
    table = {
        "a": given(folder, guidance=2, domains=["cats"]),
        "b": given(folder, guidance=2, domains=["dogs", "fish"]),
    }
    torch.testing.assert_close(taught(student, table, at), one, rtol=1e-5, atol=1e-5)


def test_what_a_pipeline_came_with_stays_on_in_every_view(specialists):
    pipe = tiny.pipeline("sd3")
    style = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(style, "style")
    student = load_policy(pipe, lora=STUDENT, **tiny.CALLS["sd3"])
    layers = student.trainable.layers
    taught(student, {"a": given(specialists[0][1])}, place(student))
    came = student.trainable.standing
    assert came and all(names == ["style"] for names in came.values())
    for view, ours in (("default", ["default"]), ("teacher_a", ["teacher_a"]), ("reference", [])):
        with student.view(view):
            for layer in student.trainable.layers:
                assert layer._active_adapter == [*came.get(layer, ()), *ours]
                assert layer.disable_adapters == (not layer._active_adapter)
    assert len(student.trainable.layers) > len(layers) and not standing([nn.Linear(1, 1)])


def test_a_unet_takes_teachers(tmp_path):
    teacher = drawn(tiny.policy("sd15", lora=TEACHER), 1)
    teacher.save_lora(tmp_path)
    student = tiny.policy("sd15", lora=STUDENT)
    x, sigma, cond, rows = place(student)
    at = x, sigma.clamp(max=0.9), cond, rows  # Stable Diffusion knows no more noise
    v = taught(student, {"a": given(tmp_path, guidance=3)}, at)
    own = teacher.velocity(*at[:2], teacher.encode(PROMPTS), ROWS, guidance=3)
    torch.testing.assert_close(v, own.detach(), rtol=1e-4, atol=1e-4)


def test_a_whole_model_encodes_the_prompts_itself_and_is_frozen(student):
    teacher = drawn(tiny.policy("sd3", lora=TEACHER), 1)
    at, met = place(student), []
    encode = teacher.encode
    teacher.encode = lambda *args: met.append(args) or encode(*args)
    teacher.modules["transformer"].train()
    v = taught(student, {"a": given(model="it", guidance=2)}, at, load_model=lambda _: teacher)
    student.teachers.velocity(CountedPolicy(student, Ledger()), *at)
    assert len(met) == 1 and met[0][0] == PROMPTS
    own = teacher.velocity(*at[:2], encode(PROMPTS), ROWS, guidance=2)
    torch.testing.assert_close(v, own)
    network = teacher.modules["transformer"]
    assert not network.training and not any(p.requires_grad for p in network.parameters())


def module(seed=0, shape=(2,), kind="flow", lora=None):
    net = tiny.ToyFlow(shape, seed=seed)
    return load_policy(net, shape=shape, kind=kind, cond=tiny.toy_cond, lora=lora)


def test_a_module_policy_has_modules_as_teachers():
    student, teacher = module(), module(1)
    at = place(student)
    v = taught(student, {"a": given(model="it")}, at, load_model=lambda _: teacher)
    torch.testing.assert_close(v, teacher.velocity(*at).detach())


class Later(SimpleNamespace):
    """A policy's schedule with another first level."""

    def __call__(self, steps):
        known = self.schedule(steps)
        return SimpleNamespace(sigmas=known.sigmas**2, times=known.times)


def squared(policy):
    policy.schedule = Later(schedule=policy.schedule)
    return policy


@pytest.mark.parametrize(
    ("teacher", "guidance", "says"),
    [
        (lambda s: module(1, (3,)), "none", r"teachers.a: it has latents of shape \(3,\), and the"),
        (lambda s: module(1, kind="eps"), "none", "the prediction type epsilon, and the model"),
        (lambda s: squared(module(1)), "none", "it has the noise levels"),
        (lambda s: s, "none", "it is the network that is trained; load a model of its own"),
        (lambda s: module(1), 2.0, "teachers.a: guidance=2.0: this policy has no unconditional"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(teacher, guidance, says):
    student = module()
    table = options(a=given(model="it", guidance=guidance))
    with pytest.raises(ValueError, match=says):
        teachers.load(student, table, 4, lambda _: teacher(student))


def test_adapters_that_do_not_fit_are_refused(student, tmp_path):
    wider = tiny.policy("sd3", lora={**TEACHER, "targets": ["q_proj"]}, parts=["text_encoder"])
    wider.save_lora(tmp_path)
    (run := tmp_path / "run").mkdir()
    (run / "config.yaml").write_text("seed: 0")
    for name, says in (
        (tmp_path, "text_encoder, which is not"),
        (tmp_path / "none", "no LoRA file"),
        (run, "teachers.a: the run .* has written no LoRA; let it end, or give a run that trained"),
    ):
        with pytest.raises(ValueError, match=says):
            teachers.load(student, options(a=given(name)), 4, None)
