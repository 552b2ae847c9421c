"""The runs in order; some start from the checkpoint of an earlier one."""

from typing import Any

from cookbook.criterion import Falls, Reaches, Rises, Stays
from cookbook.recipe import LOCAL, SIZES, Recipe, Replaced
from cookbook.workplace import GUESSES_FILE, PROMPT_DISTILLATION_FILE

_HOME = "tinker_cookbook.recipes"
_DELETE, _RESUME = ({"behavior_if_log_dir_exists": does} for does in ("delete", "resume"))
# Sampler and trainer compute the same sums in a different order, in float32.
_AGREEMENT = 1e-6

_CLASSIFIER_SEEDS = range(3)
_SL_LOOP = {"batch_size": 32, "learning_rate": 3e-3, "max_steps": 12, "save_every": 6}
_MATHS = {
    "env": "gsm8k",
    "groups_per_batch": 8,
    "group_size": 8,
    "max_tokens": 16,
    "eval_every": 0,
    "save_every": 0,
    **_DELETE,
}
_MATH_RUN: dict[str, Any] = {
    "module": f"{_HOME}.math_rl.train",
    "after": "sl_loop_start",
    "start_option": "load_checkpoint_path",
    "renderer_option": "renderer_name",
}
_STREAMED = "minibatches train while the rest of the batch is sampled"
_VERSIONS = ("0.5.8", "0.6.1")


def _vlm_classifier(seed: int) -> Recipe:
    """Returns the few-shot classifier. Its evaluator samples greedily and compares class names as text."""
    return Recipe(
        name=f"vlm_classifier_seed_{seed}" if seed else "vlm_classifier",
        checks=("C117", "C100"),
        module=f"{_HOME}.vlm_classifier.train",
        options={
            "examples_per_class": 32,
            "subset_seed": seed,
            "batch_size": 16,
            "learning_rate": 3e-3,
            "num_epochs": 5,
            "eval_every": 33,  # the last evaluation is at the last step
            "n_eval": 100,
            "max_tokens": 16,
            **_DELETE,
        },
        criteria=(Reaches("accuracy", bar=0.9), Falls("test/nll", to=0.6)),
        log_option="experiment_dir",
        renderer_option="renderer_name",
    )


RECIPES = (
    Recipe(
        name="sl_loop",
        checks=("C117",),
        module=f"{_HOME}.sl_loop",
        options=_SL_LOOP,
        criteria=(Falls("train_mean_nll", to=0.3),),
        in_catalogue=True,
    ),
    Recipe(
        name="sl_loop_start",
        checks=(),
        module=f"{_HOME}.sl_loop",
        options=_SL_LOOP,
        replaces={
            "train_on_what": Replaced(
                "last_assistant_message",
                dict.fromkeys(_VERSIONS, "all_assistant_messages"),
                "the runs that learn by rewards start here: after 12 steps on all messages nothing is rewarded",
            )
        },
        criteria=(Falls("train_mean_nll", to=0.2),),
        in_catalogue=True,
    ),
    Recipe(
        name="rl_loop",
        checks=("C117",),
        module=f"{_HOME}.rl_loop",
        options={
            "batch_size": 8,
            "group_size": 8,
            "learning_rate": 1e-3,
            "max_steps": 6,
            "max_tokens": 16,
            "save_every": 0,
        },
        criteria=(Rises("reward/total", by=0.15),),
        after="sl_loop_start",
        in_catalogue=True,
    ),
    Recipe(
        name="sl_basic",
        checks=(),
        module=f"{_HOME}.sl_basic",
        options={"learning_rate": 3e-3, "eval_every": 0, "save_every": 0},
        criteria=(Falls("train_mean_nll", to=0.7),),
        in_catalogue=True,
    ),
    Recipe(
        name="rl_train",
        checks=("C117", "C119"),
        module=f"{_HOME}.math_rl.train",
        options=_MATHS | {"learning_rate": 1e-3, "max_steps": 4},
        criteria=(Stays("optim/kl_sample_train_v2", below=_AGREEMENT), Rises("env/all/correct", by=0.05)),
        after="sl_loop_start",
        start_option="load_checkpoint_path",
        renderer_option="renderer_name",
    ),
    Recipe(
        name="rl_train_substeps",
        checks=("C118",),
        options=_MATHS | {"learning_rate": 5e-4, "max_steps": 4},
        replaces={"num_substeps": Replaced(2, dict.fromkeys(_VERSIONS, 1), "C118 is about substeps")},
        criteria=(Rises("env/all/correct", by=0.1),),
        **_MATH_RUN,
    ),
    Recipe(
        name="rl_train_async",
        checks=(),
        options=_MATHS | {"learning_rate": 1e-3, "max_steps": 12},
        replaces={
            "max_steps_off_policy": Replaced(4, dict.fromkeys(_VERSIONS, "None"), "the recipe's asynchronous run")
        },
        criteria=(Rises("env/all/correct", by=0.15),),
        **_MATH_RUN,
    ),
    Recipe(
        name="rl_train_streamed",
        checks=(),
        options=_MATHS | {"learning_rate": 1e-3, "max_steps": 4},
        replaces={
            "stream_minibatch_config.groups_per_batch": Replaced(8, dict.fromkeys(_VERSIONS, "None"), _STREAMED),
            "stream_minibatch_config.num_minibatches": Replaced(2, dict.fromkeys(_VERSIONS, "None"), _STREAMED),
        },
        criteria=(Rises("env/all/correct", by=0.05),),
        **_MATH_RUN,
    ),
    Recipe(
        name="code_start",
        checks=(),
        module=None,
        options={},
        program="code_start",
        criteria=(Falls("loss", to=0.3),),
    ),
    Recipe(
        name="code_rl",
        checks=(),
        module=f"{_HOME}.code_rl.train",
        options={
            "groups_per_batch": 8,
            "group_size": 8,
            "learning_rate": 5e-4,
            "max_steps": 5,
            "max_tokens": 24,
            "eval_every": 0,
            "save_every": 0,
            **_DELETE,
        },
        criteria=(Rises("env/all/correct", by=0.15),),
        after="code_start",
        start_option="load_checkpoint_path",
        renderer_option="renderer_name",
    ),
    Recipe(
        name="chat_sl",
        checks=(),
        module=f"{_HOME}.chat_sl.train",
        options={
            "dataset": GUESSES_FILE,
            "batch_size": 16,
            "learning_rate": 3e-3,
            "num_epochs": 4,
            "eval_every": 0,
            **_DELETE,
        },
        criteria=(Falls("train_mean_nll", to=0.25),),
        renderer_option="renderer_name",
    ),
    Recipe(
        name="guess_number",
        checks=(),
        module=f"{_HOME}.multiplayer_rl.guess_number.train",
        options={
            "batch_size": 2,
            "group_size": 4,
            "learning_rate": 1e-3,
            "max_steps": 6,
            "max_tokens": 8,
            "eval_every": 0,
            "save_every": 0,
            **_RESUME,
        },
        criteria=(Rises("env/all/reward/total", by=1.0),),
        after="chat_sl",
        url_option=None,
        renderer_option="renderer_name",
    ),
    Recipe(
        name="pipelined_substeps",
        checks=("C118",),
        module=None,
        options={},
        program="pipelined_substeps",
        criteria=(Stays("difference", below=0.0),),
    ),
    Recipe(
        name="dpo",
        checks=("C117", "C91"),
        module=f"{_HOME}.preference.dpo.train",
        options={"dataset": "hhh", "batch_size": 8, "learning_rate": 5e-4, "max_steps": 5, **_DELETE},
        criteria=(Falls("dpo_loss", to=0.6),),
        renderer_option="renderer_name",
    ),
    Recipe(
        name="prompt_distillation",
        checks=("C117",),
        module=f"{_HOME}.prompt_distillation.train",
        options={
            "file_path": PROMPT_DISTILLATION_FILE,
            "batch_size": 16,
            "learning_rate": 3e-3,
            "num_epochs": 1,
            "max_steps": 10,
            **_DELETE,
        },
        criteria=(Falls("train_mean_nll", to=0.5),),
        renderer_option="renderer_name",
    ),
    Recipe(
        name="sdft_topk",
        checks=("C117",),
        module=f"{_HOME}.sdft.train",
        options={
            "dataset": "toolalpaca",
            "groups_per_batch": 8,
            "max_tokens": 24,
            "learning_rate": 5e-4,
            "max_steps": 4,
            "eval_every": 0,
            "save_every": 1,
            **_DELETE,
        },
        criteria=(Falls("topk_loss", to=0.9),),
        program="topk_loss",
        after="prompt_distillation",
        start_option="load_checkpoint_path",
        renderer_option="renderer_name",
    ),
    Recipe(
        name="sdft_reverse_kl",
        checks=("C117",),
        module=f"{_HOME}.sdft.train",
        options={
            "dataset": "toolalpaca",
            "groups_per_batch": 9,
            "group_size": 4,
            "max_tokens": 24,
            "learning_rate": 1e-3,
            "max_steps": 5,
            "eval_every": 0,
            "save_every": 0,
            **_DELETE,
        },
        replaces={"reverse": Replaced(True, dict.fromkeys(_VERSIONS, False), "the recipe's other loss, run beside it")},
        criteria=(Falls("sdft/reverse_kl_mean", to=0.95),),
        after="prompt_distillation",
        start_option="load_checkpoint_path",
        renderer_option="renderer_name",
    ),
    *(_vlm_classifier(seed) for seed in _CLASSIFIER_SEEDS),
    Recipe(
        name="vlm_datum",
        checks=("C100",),
        module=None,
        options={},
        program="vlm_datum",
        criteria=(Falls("loss", to=0.8),),
    ),
    Recipe(
        name="sampling_training_logprobs",
        checks=("C119",),
        module=None,
        options={},
        program="sampling_training_logprobs",
        criteria=(Stays("mse", below=_AGREEMENT, least_steps=1), Falls("loss", to=0.98)),
    ),
)

NOT_RUN = {
    "harbor_rl, distillation of harbor tasks": "each task is a container of Modal's cloud",
    "rubric, prometheus_experimental": "a second model grades in a fixed format, which the tiny model cannot write",
    "multiplayer_rl": "twenty_questions needs a second model that answers, text_arena its package; guess_number runs",
    "audio": "Fovea serves no model that hears, and refuses dmel chunks",
    "search_tool": "needs an index of Wikipedia in Chroma, and Gemini's embeddings",
    "verifiers_rl": "needs an environment of the hub; `make environments` tests verifiers through `fovea_rollout`",
    "distillation, preference/rlhf": "needs a teacher or a trained reward model besides, and data of the hub",
    "forecasting, true_thinking_score, rl_numerics_check": "asks what only a large model answers; no reward otherwise",
    "preference/shorter": "the tiny model's answers are already as short as they can be, two tokens",
    "rl_basic": "calls what math_rl calls, and no option reduces its steps of 2,048 rollouts",
    "decisions": "is a library with a demonstration, not a program with settings",
}
"""Recipes of 0.6.1 that no run covers, with the reason."""


def replaced_table() -> str:
    """Returns a Markdown table of every setting that differs from the recipes' own, with its reason."""
    lines = ["| run | setting | runs with | the recipe's own | why |", "|---|---|---|---|---|"]
    for names, value, own, why in (
        (SIZES, "small values", "large ones", "a tiny model learns in minutes on two cores"),
        (LOCAL, "local ones", "the hub's", "no download"),
    ):
        lines.append(f"| all | {', '.join(f'`{name}`' for name in sorted(names))} | {value} | {own} | {why} |")
    for recipe in RECIPES:
        for name, each in recipe.replaces.items():
            own = ", ".join(str(value) for value in dict.fromkeys(each.own.values()))
            lines.append(f"| {recipe.name} | `{name}` | {each.value} | {own} | {each.why} |")
    return "\n".join(lines) + "\n"


def not_run_table() -> str:
    """Returns a Markdown table of the recipes that do not run, with the reason."""
    lines = [f"| {recipes} | {why} |" for recipes, why in NOT_RUN.items()]
    return "\n".join(["| recipe that does not run here | why |", "|---|---|", *lines]) + "\n"
