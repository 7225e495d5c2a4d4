"""What the words of a command line decide is answered before torch is imported, in a second or
so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "helpers" / "without_torch.py"
SECONDS = 1.5  # most processor seconds of a command that only reads words

# command line -> its sentence. Words are split at spaces; _ stands for a space in a word.
MISTAKES = {
    # keys, and what other trainers call them
    "train batch.promts=4": 'unknown key "batch.promts"; did you mean "batch.prompts"',
    "train learning_rate=1e-4": "here it is optimizer.lr",
    "train algorithm=flow_grpo algorithm.beta=0.1": "here it is algorithm.kl_weight",
    "train train.lora.network_dim=4": "here it is train.lora.rank",
    "train --lr 1e-4": "a setting is written without dashes, optimizer.lr=VALUE",
    "train --train.resolution=512": "there is no option --train.resolution; here it is model.pipel",
    "train --learning-rate 1e-4": "there is no option --learning-rate; here it is optimizer.lr",
    "train --optimizer.lr=1e-4": "a setting is written without dashes, optimizer.lr=VALUE",
    "train --seed 1": "a setting is written without dashes, seed=VALUE",
    "train --model sd1.5": "a setting is written without dashes, model=VALUE",
    "train --resum nowhere": "there is no option --resum; did you mean",
    "show batch.grup=3": 'unknown key "batch.grup"; did you mean "batch.group"',
    "budget batch.grup=3": 'unknown key "batch.grup"; did you mean "batch.group"',
    "train reward.jpeg.qualty=80": 'unknown setting "qualty"; did you mean "quality"',
    # names
    "train model=sd35-medium": 'unknown model "sd35-medium"; did you mean "sd3.5-medium"',
    "train model.source=shapes-sd4": '"shapes-sd4"; did you mean "shapes-sd" or "shapes-sd3"',
    "train algorithm=nfd": 'unknown algorithm "nfd"; did you mean "nft"',
    "train algorithm.name=grppo": 'unknown algorithm "grppo"; did you mean "grpo"',
    "train algorithm=flow_grpo algorithm.sde=flow_sdf": 'unknown sde "flow_sdf"; did you mean',
    "train reward=shape": 'unknown reward "shape"; did you mean "shapes"',
    "train reward.pikscore=1": 'unknown reward "pikscore"; did you mean "pickscore"',
    "train experiment=quikstart": 'unknown experiment "quikstart"; did you mean "quickstart"',
    "train quikstart": '"quikstart" is not a YAML file, experiment or key=value; did you mean',
    "train nowhere.yaml": "nowhere.yaml",
    "train output=own.py": "output=own.py: own.py is a file; name a folder",
    "train output=own.py/run": "own.py is a file; name a folder",
    "train diversity.features=clib": '"clib" is not known; choose clip, dino, shapes',
    "budget --device h1000": 'unknown device "h1000"; did you mean "h100"',
    "budget --gpus 7": "does not divide by 7 processes x 1 update; try",
    "budget --gpus 0": "--gpus 0 should be a whole number from 1",
    "budget --machines 2": "from 1 that divides --gpus 1, the processes of all machines together",
    "budget train.parts=[text_encoder]": "does not know what training the text encoder costs",
    "export nowhere": '"nowhere" is not a folder; give the folder of a run',
    "trian quickstart": "No such command 'trian'",
    "list algoritms": 'unknown list "algoritms"; did you mean "algorithms"',
    "train algorithm=grpo": 'unknown algorithm "grpo"; did you mean "flow_grpo"?',
    "train algorithm.name=flow_grpo": "flow_grpo is a set of options: write algorithm=flow_grpo",
    "show flow_grpo": '"flow_grpo" is not a YAML file, experiment or key=value; write algorithm=fl',
    "train sdxl algorithm=mine/x.py": "a file needs a name in it: algorithm=mine/x.py:NAME",
    "train reward=redness.py": "a file needs a name in it: reward=redness.py:NAME",
    "train reward=mine.py:red": "reward=mine.py:red: there is no file mine.py",
    "train my.yaml": "there is no file my.yaml",
    "train noise_offset=0.1": "here it is without a counterpart",
    "train --resume": "--resume needs a value: flowrl train --resume runs/mine",
    "env --json": "--json needs a value: flowrl env --json -",
    "generate a_cat": 'which model? flowrl generate shapes-sd3 "a cat"',
    "generate --prompt a_cat": "here it is a word without dashes",
    # values
    "train train.mode=lorra": "should be 'lora' or 'full'; did you mean \"lora\"?",
    "train batch.prompts=0": "batch.prompts=0 should be greater than 0",
    "train seed=-1": "seed=-1 should be greater than or equal to 0",
    "train eval.images=many": "eval.images='many' should be a whole number",
    "train checkpoint.keep=null": "should be a whole number; a large one, as 1000000, keeps all",
    "train optimizer.betas=0.9": "optimizer.betas=0.9 should be values in brackets",
    "train algorithm=flow_grpo algorithm.clip=1e-3": "should be values in brackets",
    "train reward.jpeg.quality=high": "quality='high' should be a whole number",
    "train reward.jpeg.weight=heavy": "reward.jpeg='heavy' should be its weight",
    "train reward.shapes.mode=fast": "mode='fast' should be pg, which enters advantages, or grad",
    "train reward=remote reward.remote.url=nowhere": "nowhere",
    "train output=": '"output=" has no value; was a shell variable unset?',
    "train optimizer.lr=0,0001": "write optimizer.lr=0.0001",
    # several runs
    "train seeds=3": "here it is `flowrl train ... --seeds 0,1,2`",
    "train seed=[0,1]": "several seeds are several runs: flowrl train ... --seeds 0,1",
    "train optimizer.lr=1e-4,1e-5": "for v in 1e-4 1e-5; do flowrl train ... optimizer.lr=$v",
    "train -m seed=0,1": "a command makes one run; several seeds are several runs: flowrl train",
    "train quickstart --seeds 0,x": '"x" is not a whole number; write --seeds 0,1,2',
    "train quickstart output=a --seeds 0,0": "--seeds names 0 twice",
    "train seed=3 output=a --seeds 0,1": "seed=3 and --seeds both choose the seed",
    # the grammar of words
    "train batch.group": '"batch.group" is not a YAML file, experiment or key=value',
    "train seed=0 batch.group": "nor +key=value, which adds a key that is not there, or ~key",
    "train +batch.group=4": "batch.group is there already; leave out the +",
    "train ~reward.jpg": '"~reward.jpg": no such reward or setting was chosen',
    "train ~batch.group=7": '"~batch.group=7": the value is',
    "train model.pipeline.sizes=[1,": "is not key=value",
    "train defaults=[nft]": "here it is a list in a YAML file; on the command line GROUP=NAME",
    # rules over words
    "train reward.shapes=0": "every reward has weight 0 (shapes), so nothing would be trained",
    "train train.init_lora=nowhere": "train.init_lora=nowhere does not exist",
    "train algorithm=flow_grpo batch.prompts=50 batch.updates=4": "try 48 or 52",
    "train algorithm=nft algorithm.keep=4 draw.mode=balance": "both choose what is trained",
    "train algorithm=branch_grpo algorithm.ratio=sequence": "share steps; use ratio=ppo",
    "train train.shard=[denoiser] train.compile=blocks": "leave one of the two out",
    "budget model.quantize=int8 train.mode=full": "use train.mode=lora, or leave one of the two",
    "train data.train=shapes:trian": 'unknown data "shapes:trian"; did you mean "shapes:train"',
    "train data.eval=nowhere.txt reward=jpeg": "prompt file nowhere.txt does not exist",
    "generate shapes-sd3 a_cat --lora nowhere": "there is no nowhere; give a finished run",
    "train --accept-changes": "--accept-changes is about a run that goes on; add --resume RUN",
    "train --resume nowhere": "nowhere is not a run folder: it has no config.yaml",
    # generate
    "generate shapes-sd4 a_cat": '"shapes-sd4"; did you mean "shapes-sd" or "shapes-sd3"',
    "generate runs/mine a_cat": 'model "runs/mine" does not exist; there is no folder runs; give',
    "generate ./a/folder a_cat": 'model "./a/folder" does not exist; there is no folder a; give',
    "train model=/no/folder reward=jpeg data=ocr": 'model "/no/folder" does not exist',
    "train model.source=pony.safetensors": 'unknown model "pony.safetensors"',
    "train model=sdxl reward=PickScor data=ocr": 'unknown reward "PickScor"; did you mean "picks',
    "train data.train=. reward=jpeg": ". is a folder; make one file: cat ./*.txt > prompts.txt",
    "train algorithm=Flow-GRPO": 'unknown algorithm "Flow-GRPO"; did you mean "flow_grpo"',
    "train model=SDXL": 'unknown model "SDXL"; did you mean "sdxl"',
    "generate shapes-sd3": "which prompt? flowrl generate shapes-sd3 PROMPT",
    "generate shapes-sd3 a_cat --steps ten": "Invalid value for '--steps'",
    "generate shapes-sd3 a_cat --guidance much": '--guidance=much should be a number, "none" or',
    "generate shapes-sd3 a_cat --guidance_scale 4": "no option --guidance_scale; here it is --guid",
    "generate shapes-sd3 a_cat --colunms x=y": "there is no option --colunms; did you mean",
    "generate shapes-sd3 a_cat --rlg 1.5": "--rlg compares the LoRA with the base model",
    "generate shapes-sd3 a_cat --best-of 2": "best_of=2 needs best_of >= 1 and, above 1, a reward",
    "generate shapes-sd3 a_cat --best-of 2 --reward shapez": 'unknown reward "shapez"; did you',
    "generate shapes-sd3 a_cat --calls 10": "--calls 10 is read with --search",
    "generate shapes-sd3 a_cat --search random": "--search needs one way",
    "generate shapes-sd3 a_cat --search tree --calls 9 --search raduis=1": "no such setting",
    "generate shapes-sd3 a_cat --enough 0.5": "--enough 0.5 is read with --refine",
    "generate shapes-sd3 a_cat --pipeline 64": "--pipeline 64 should be NAME=VALUE",
    "generate shapes-sd3 a_cat --batch 0": "Invalid value for '--batch'",
    "generate shapes-sd3 a_cat --seeds 0,1,0": "--seeds names 0 twice",
    "generate shapes-sd3 a_cat --seed ten": '"ten" is not a whole number; write --seeds 0,1,2',
    "generate shapes-sd3 a_cat --seed 9223372036854775808": "is above 9223372036854775807, the la",
    "generate shapes-sd3 a_cat --with-base -o out/": "--with-base compares the LoRA with the base",
    "generate shapes-sd3 a_cat --format jpg": "--format is about a folder of files; give one, -o o",
    "generate shapes-sd3 a_cat --format tiff": "Invalid value for '--format'",
    "generate shapes-sd3 a_cat --grid a.gif": "--grid a.gif: a contact sheet is a picture, such as",
    "generate shapes-sd3 a_cat -o own.py/": "-o own.py/ is a file; give another folder",
    "generate shapes-sd3 a_cat --batch_size 2": "here it is --batch, and of score --chunk",
    "generate shapes-sd3 a_cat -o out.mp3": '"out.mp3": media are saved as .png',
    # the other commands
    "score x.png": "Missing option '--reward'",
    "score x.png --reward shape": 'unknown reward "shape"; did you mean "shapes"',
    "score x.png --reward jpeg=heavy": 'reward "jpeg=heavy" should be NAME, NAME=WEIGHT',
    "score x.png --reward jpeg --reward jpeg": '"jpeg" is given twice',
    "score x.png --reward jpeg.qualty=8": 'unknown setting "qualty"; did you mean "quality"',
    "score x.png --reward jpeg --keep-top most": "most",
    "check": "give a model, or --reward NAME",
    "check shapes-sd4": '"shapes-sd4"; did you mean "shapes-sd" or "shapes-sd3"',
    "check --reward shape": 'unknown reward "shape"; did you mean "shapes"',
    "train trackers=[tensorbord]": 'unknown tracker "tensorbord"; did you mean "tensorboard"',
    "train trackers=[trakio]": 'unknown tracker "trakio"; did you mean "trackio"',
    "train trackers=wandb": "trackers='wandb' should be values in brackets, as [wandb]",
    "train tracking.entity=me": "tracking.entity=me is read by wandb and swanlab alone, and",
    "train tracking.project=a/b": "tracking.project: 'a/b' should be one line of text without /",
    "train tracking.tags=paper": "tracking.tags='paper' should be values in brackets",
    "train tracking.nmae=a": 'unknown key "tracking.nmae"; did you mean "tracking.name"',
    "serve jpeg --host 0.0.0.0": "host=0.0.0.0 can be reached from other machines",
    "serve jpgg": 'unknown reward "jpgg"; did you mean "jpeg"',
    "serve jpeg --port 99999": "should be less than or equal to 65535",
    "report nowhere": "nowhere",
    "report nowhere elsewhere": "nowhere is not a run folder",
    "report a b --table table.xlsx": "a table ends in .md, .tex, .csv",
    "report a b --group": "--group needs a value",
    "report a --compare b": "runs are compared by `flowrl report A B --table",
    "live a --output_dir b": "there is no option --output_dir; did you mean",
    "live nowhere": "nowhere",
    "live nowhere elsewhere": "nowhere is not a run folder",
    "live": "Missing argument",
    "live . --port 99999": "should be less than or equal to 65535",
    "live . --port http": "--port",
    "live . --prot 1": "there is no option --prot; did you mean",
    "evaluate nowhere": "nowhere is not a run folder",
    "evaluate nowhere --suite shapes": "nowhere is not a run folder",
    "evaluate nowhere --suite shape": 'unknown suite "shape"; did you mean "shapes"',
    "evaluate nowhere --best-of 4": "need a suite; add --suite shapes",
}
ANSWERS = {  # without a mistake
    "list": "mix_grpo_flash",
    "list rewards": "pickscore",
    "list samplers": "flow_sde",
    "show": "algorithm:",
    "show quickstart optimizer.lr=5e-4": "lr: 0.0005",
    "show model=sd3.5-medium algorithm=mix_grpo reward=hpsv3 data=ocr memory=24gb": "quantize: nf4",
    "show reward=remote reward.remote.url=http://127.0.0.1:8321": "url: http://127.0.0.1:8321",
    "show algorithm=reinflow diversity.features=clip": "features: clip",
}
# plugins of one's own, whose files import torch: the same answer in a process that had not
OWN = {
    "show algorithm=flow_grpo algorithm.sde=own.py:transition": "own.py:transition",
    "show algorithm=own.py:Soft algorithm.sde=own.py:transition": "own.py:Soft",
    "show algorithm=flow_grpo algorithm.name=own.py:Soft": "kl_weight: 0.04",
    "show reward=own.py:red": "own.py:red",
}
OWN_FILE = """
import flowrl
from flowrl.algorithms.grpo import GRPO
from flowrl.types import Transition

def transition(v, x, sigma, sigma_next, *, eta):
    dt = (sigma_next - sigma)[:, None]
    return Transition(mean=x + dt * v, std=eta[:, None] * (-dt).sqrt())

@flowrl.reward
def red(media, prompts, context=None):
    return media[:, 0].mean((1, 2))

class Soft(GRPO):
    pass
"""


def words(line):
    return [word.replace("_cat", " cat") for word in line.split()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    lines = [*MISTAKES, *ANSWERS, *OWN]
    folder = tmp_path_factory.mktemp("empty")
    (folder / "own.py").write_text(OWN_FILE)
    done = subprocess.run(
        [sys.executable, HARNESS],
        input=json.dumps([words(line) for line in lines]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", [*MISTAKES, *ANSWERS])
def test_words_are_answered_before_torch_is_imported(answers, line):
    found = answers[line]
    said = " ".join(found["said"].split())
    sentences = [row for row in found["said"].splitlines() if row.startswith("flowrl: ")]
    assert found["code"] == (2 if line in MISTAKES else 0), said
    assert len(sentences) == (line in MISTAKES) and "Traceback" not in said, said
    assert (MISTAKES | ANSWERS)[line] in said, said
    assert not found["torch"], "torch was imported"
    assert found["seconds"] < SECONDS


@pytest.mark.parametrize("line", OWN)
def test_plugins_of_ones_own_are_read_where_torch_was_not_imported(answers, line):
    found = answers[line]
    assert found["code"] == 0 and OWN[line] in found["said"] and found["torch"], found["said"]


def test_a_list_of_rewards_has_a_line_for_each(answers):
    lines = answers["list rewards"]["said"].splitlines()
    assert len(lines) == 41 and max(map(len, lines)) <= 100
    assert "jpeg               minus kilobytes at JPEG quality 95, divided by 500" in lines
