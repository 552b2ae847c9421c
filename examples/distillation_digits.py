"""On-policy distillation with pictures: a student learns to read scans from a teacher on the same server.

First the student clones the teacher's answers, because alone it hardly ever says a digit, and a digit that it never
says is never scored. Then the student answers, and the teacher, another base model of the same server (`fovea up
--also-sample teacher=DIR`), scores each token. The advantage of a token is log p_teacher - log p_student (Agarwal et
al. 2023, arXiv:2306.13649, with the reverse KL). The student's scans have no labels.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
from functools import partial

from examples.experiment import Experiment, read_arguments
from examples.rl_digits import DigitEnvironment
from fovea_data import fine_tune, load_chats
from fovea_demo.digits import QUESTION, Scan, load_scans
from fovea_demo.up import running_fovea
from fovea_rollout import Answer, LoopSettings, RolloutSettings, SamplingSettings, Step, connect, run
from fovea_rollout.stopping import exiting_with_a_line

TEACHER = "teacher"
"""Name of the teacher on the server, unless the variable `FOVEA_TEACHER` names another model."""
BAR = 0.8
"""Share of held-out scans that the student should read correctly; chance gives 0.1."""
_API_KEY = "tml-local"
_LABELLED = 1000


class UnlabelledEnvironment(DigitEnvironment):
    """Shows one scan, and rewards no answer."""

    async def step(self, answer: Answer) -> Step:
        """Ends the episode."""
        return Step(reward=0.0, is_done=True)


def make_teacher(folder: pathlib.Path, student: pathlib.Path) -> pathlib.Path:
    """Fine-tunes a model on labelled scans and exports it merged, once; returns the folder of the merged model."""
    merged = folder / "merged"
    if merged.exists():
        return merged
    shutil.rmtree(folder, ignore_errors=True)
    labelled, held_out = (load_chats([_row(scan) for scan in scans[-_LABELLED:]]) for scans in load_scans())
    with (
        running_fovea(folder / "fovea", student, "--port", "0", "--grpc-port", "0") as up,
        fine_tune(labelled, held_out, out=folder / "run", base_url=up["base_url"], api_key=_API_KEY) as model,
    ):
        return model.export(merged, merged=True)


def _row(scan: Scan) -> dict[str, object]:
    content = [{"type": "image", "image": scan.png}, {"type": "text", "text": QUESTION}]
    return {"prompt": [{"role": "user", "content": content}], "completion": str(scan.digit)}


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rollout = RolloutSettings(SamplingSettings(max_tokens=2, seed=arguments.seed), max_turns=1)
    train, held_out = load_scans()
    unlabelled = [partial(UnlabelledEnvironment, scan) for scan in train[:-_LABELLED]]
    measured = [partial(DigitEnvironment, scan) for scan in held_out[: arguments.held_out]]
    with exiting_with_a_line():
        service = connect(arguments.base_url, arguments.api_key)
    teacher = await service.create_sampling_client(base_model=os.environ.get("FOVEA_TEACHER", TEACHER))
    experiment = await Experiment.begin("distillation_digits", arguments, rollout)
    await experiment.measure("teacher", measured, teacher)
    await experiment.measure("before", measured)
    # The content of the teacher's answers matters, not only their form, so the rate is that of fine-tuning.
    await experiment.warm_up(unlabelled, teacher, learning_rate=3e-3)
    await experiment.measure("cloning", measured)
    settings = LoopSettings(
        steps=arguments.steps,
        groups_per_step=arguments.groups,
        group_size=4,
        learning_rate=2e-3,
        schedule="constant",  # the teacher scores every answer, so every step has a signal
        estimator="dr_grpo",
        kl_coefficient=1.0,
        substeps=1,  # one step already has 256 rollouts
        adam={"eps": 1e-8, "grad_clip_norm": 1.0},
        rollout=rollout,
        seed=arguments.seed,
    )
    await experiment.learn(unlabelled, settings, teacher)
    await experiment.measure("after", measured)
    experiment.write(BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=60, groups=64, warm_up=80)))
