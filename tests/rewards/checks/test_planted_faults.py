"""Twelve faults of verifiers: each fails the check that is made for it, and a sound one passes all.

scripts/bench/planted_faults.py plants them in three verifiers and runs whole checks.
"""

import pytest
import small
from planted import FAULTS, ShapesGeneval, faulty, planted, tried

from flowrl import rewards
from flowrl.rewards.checks import check as reward_checks
from flowrl.rewards.checks import contract, examples, order
from flowrl.rewards.checks.attacks import attacked, mirror

CATCHES = {
    "constant": order.right_prompt,
    "prompt ignored": order.right_prompt,
    "batch dependent": contract.batch_mates,
    "uint8 scale": order.right_prompt,
    "mirrored": mirror,
    "sign": order.right_prompt,
    "noise": contract.determinism,
    "NaN on blank": attacked,
    "off by one": contract.batch_mates,
    "first prompt for all": contract.batch_mates,
    "stale cache": order.right_picture,
    "colour channels swapped": order.right_prompt,
}


@pytest.fixture(scope="module")
def pictures():
    return examples.shapes(4)


@pytest.fixture(scope="module")
def verifier():
    return rewards.load("shapes")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_fails_its_check(fault, verifier, pictures):
    assert reward_checks.failed(tried(CATCHES[fault], faulty(verifier, fault), pictures))


def test_a_sound_verifier_passes_these_checks(verifier, pictures):
    for one in dict.fromkeys(CATCHES.values()):
        assert not reward_checks.failed(tried(one, verifier, pictures))


def test_the_stand_in_for_geneval_reads_relations_as_geneval_does():
    verifier, pictures = ShapesGeneval("strict"), ShapesGeneval.examples(4)
    assert not reward_checks.failed(tried(mirror, verifier, pictures))
    assert reward_checks.failed(tried(mirror, faulty(verifier, "mirrored"), pictures))


def test_a_reward_that_verifies_nothing_is_warned_of_what_a_verifier_fails(verifier, pictures):
    learned = faulty(verifier, "mirrored")
    learned.verifies = frozenset()
    assert {f.verdict for f in tried(mirror, learned, pictures)} == {"ok", "warn"}


def test_a_name_that_no_check_knows_is_refused(pictures):
    said = 'verifies="relations" is not known to the checks; did you mean "relation"'
    made = rewards.reward(lambda media, prompts, context=None: 0, verifies=["relations"])
    with pytest.raises(ValueError, match=said):
        rewards.load_set({"made": made})
    with pytest.raises(ValueError, match=said):
        reward_checks.check(planted(lambda m, p, c: 0, verifies=frozenset({"relations"})), pictures)


def test_the_command_ends_with_1_where_a_declared_verifier_ignores_the_prompt(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import flowrl\n\n"
        "@flowrl.reward(verifies=['relation'])\n"
        "def bright(media, prompts, context=None):\n"
        "    return media.flatten(1).mean(1)\n"
    )
    ended = small.invoke("check", "--reward", f"{file}:bright", "--count", "2")
    assert ended.exit_code == 1 and "fail" in ended.output
