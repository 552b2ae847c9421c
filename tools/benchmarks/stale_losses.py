"""Losses under a lag of the sampler: `python -m benchmarks.stale_losses`; on a GPU with `--model DIR --device cuda`.

A policy learns two tasks over a few symbols with the trainer's own loss functions. Samples come from the weights of
`lag` steps ago, rounded to bfloat16 as a sampler's are. Sampler and trainer compute in `--dtype`; the trained weights
are float32. Figures: the mean reward of the last quarter of the steps, by seed. The first task, `reverse`, rewards each
correct token; the second, `recall`, only a whole answer. `--read FILE` prints the table of such figures instead, and
draws them with `--draw PNG`.
"""

import argparse
import copy
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from benchmarks.figure import emit
from fovea.api.v1 import trainer_pb2
from fovea_trainer.losses import loss_of

SYMBOLS, PROMPT, ANSWER, PROMPTS, GROUP = 8, 3, 3, 8, 8
LAGS = (0, 1, 4, 8)
LOSSES: dict[str, tuple[str, dict[str, float]]] = {
    "importance_sampling": ("importance_sampling", {}),
    "ppo": ("ppo", {}),
    "cispo": ("cispo", {}),
    "stable_reinforce": ("stable_reinforce", {}),
    "stable_reinforce_no_penalty": ("stable_reinforce", {"kl_coeff": 0.0}),
    "stable_reinforce_narrow": ("stable_reinforce", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25}),
}
"""Losses and settings by the name of their figure."""
Reward = Callable[[Tensor, Tensor], Tensor]


def reverse(prompts: Tensor, answers: Tensor) -> Tensor:
    """Returns the share of tokens that repeat the prompt backwards, float [B]."""
    return (answers == prompts.flip(1)).float().mean(1)


def recall(prompts: Tensor, answers: Tensor) -> Tensor:
    """Returns 1 if the first two tokens are the prompt's, else 0, float [B]."""
    return (answers[:, :2] == prompts[:, :2]).all(1).float()


TASKS: dict[str, Reward] = {"reverse": reverse, "recall": recall}


class Small(nn.Module):
    """A causal network of one hidden layer over the embeddings of the last `PROMPT + ANSWER` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 16)
        self.layers = nn.Sequential(nn.Linear(16 * (PROMPT + ANSWER), 64), nn.Tanh(), nn.Linear(64, SYMBOLS))

    def forward(self, tokens: Tensor) -> CausalLMOutput:
        """Returns logits [B, L, SYMBOLS] for tokens int64 [B, L]."""
        padded = functional.pad(self.embedding(tokens), (0, 0, PROMPT + ANSWER - 1, 0))
        windows = padded.unfold(1, PROMPT + ANSWER, 1).flatten(2)
        return CausalLMOutput(logits=self.layers(windows))


class Policy:
    """A causal model over the first `SYMBOLS` ids of its vocabulary, with a sampler's copies of its weights."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32) if options.model else Small()
        self.model: Any = model.to(options.device).eval()
        self.sampler: Any = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, weight_decay=0.0)
        self._device, self._dtype = options.device, getattr(torch, options.dtype)
        self._history: deque[list[Tensor]] = deque()

    def publish(self, lag: int) -> None:
        """Lets the sampler use the weights of `lag` steps ago, rounded to bfloat16."""
        self._history.append([weight.detach().to(torch.bfloat16) for weight in self.model.parameters()])
        while len(self._history) > lag + 1:
            self._history.popleft()
        for own, weight in zip(self.sampler.parameters(), self._history[0], strict=True):
            own.copy_(weight)

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns answers [B, ANSWER] and their log-probabilities by the sampler, float32 [B, ANSWER]."""
        tokens, found = prompts, []
        for _ in range(ANSWER):
            logprobs = functional.log_softmax(self._logits(self.sampler, tokens)[:, -1], -1)
            drawn = torch.multinomial(logprobs.exp(), 1)
            found.append(logprobs.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
        return tokens[:, prompts.shape[1] :], torch.cat(found, 1)

    def logprobs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Returns the log-probabilities of answers by the trained weights, float32 [B, ANSWER] with gradient."""
        logits = self._logits(self.model, torch.cat([prompts, answers], 1))[:, PROMPT - 1 : -1]
        return functional.log_softmax(logits, -1).gather(2, answers[..., None])[..., 0]

    def _logits(self, model: Any, tokens: Tensor) -> Tensor:
        with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
            logits: Tensor = model(tokens).logits
        return logits[..., :SYMBOLS].float()


def run(options: argparse.Namespace, name: str, lag: int, reward_of: Reward, seed: int) -> float:
    """Trains one policy; returns the mean reward of the last quarter of the steps."""
    loss_name, settings = LOSSES[name]
    loss = loss_of(trainer_pb2.ForwardBackwardHeader(loss_function=loss_name, loss_config=settings))
    policy, rewards = Policy(options, seed), []
    for _ in range(options.steps):
        policy.publish(lag)
        prompts = torch.randint(0, SYMBOLS, (PROMPTS, PROMPT), device=options.device).repeat_interleave(GROUP, 0)
        answers, recorded = policy.sample(prompts)
        reward = reward_of(prompts, answers)
        rewards.append(float(reward.mean()))
        grouped = reward.view(PROMPTS, GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1).expand_as(recorded)
        given = {"logprobs": recorded, "advantages": advantages}
        value = loss.compute(policy.logprobs(prompts, answers).flatten(), _inputs(loss.inputs, given))
        policy.optimizer.zero_grad()
        torch.autograd.backward([value.loss])
        policy.optimizer.step()
    last = rewards[-max(1, options.steps // 4) :]
    return sum(last) / len(last)


def _inputs(wanted: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns all inputs of a loss, flat, with its defaults; all positions are sampled."""
    like = given["logprobs"].flatten()
    return {
        each.name: given[each.name].flatten() if each.name in given else torch.full_like(like, each.default)
        for each in wanted
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of figures: median, lowest and highest seed of each loss, by task and lag."""
    found = {(row["sizes"]["task"], row["sizes"]["lag"], row["sizes"]["loss"]): row for row in rows}
    losses = list(dict.fromkeys(loss for _, _, loss in found))
    lines = ["| task, lag | " + " | ".join(f"`{loss}`" for loss in losses) + " |", "|---" * (len(losses) + 1) + "|"]
    for task, lag in dict.fromkeys((task, lag) for task, lag, _ in found):
        own = [found[task, lag, loss] for loss in losses]
        best = max(f"{row['value']:.2f}" for row in own)
        values = [f"**{value}**" if value == best else value for row in own for value in [f"{row['value']:.2f}"]]
        cells = [
            f"{value} ({row['spread'][0]:.2f} to {row['spread'][1]:.2f})"
            for value, row in zip(values, own, strict=True)
        ]
        lines.append(f"| {task}, {lag} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the rewards over the lag, a panel for each task: lines for medians, bars from lowest to highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(9, 3.2), layout="constrained", squeeze=False)
    for panel, task in zip(panels.flat, TASKS, strict=True):
        for place, loss in enumerate(LOSSES):
            own = [row for row in rows if (row["sizes"]["task"], row["sizes"]["loss"]) == (task, loss)]
            lags = [row["sizes"]["lag"] + 0.07 * (place - len(LOSSES) / 2) for row in own]
            values = [row["value"] for row in own]
            ends = [[max(0.0, at - row["spread"][0]) for at, row in zip(values, own, strict=True)]]
            ends += [[max(0.0, row["spread"][1] - at) for at, row in zip(values, own, strict=True)]]
            width = 2.2 if loss == "stable_reinforce" else 1.0
            panel.errorbar(lags, values, ends, label=loss, linewidth=width, capsize=2)
        panel.set_title(task, fontsize=10)
        panel.set_xticks(LAGS)
        panel.spines[["top", "right"]].set_visible(False)
    panels.flat[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("age of the sampling weights in steps", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="folder of a causal model; default: a random network of one hidden layer"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--read", type=Path, metavar="FILE", help="prints the table of these figures; measures nothing")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draws the figures of --read")
    options = parser.parse_args()
    if options.read:
        rows = [json.loads(line) for line in options.read.read_text().splitlines()]
        print(table(rows), end="")
        if options.draw:
            draw(rows, options.draw)
        return
    for task in options.tasks.split(","):
        reward_of = TASKS[task]
        for lag in LAGS:
            for name in options.losses.split(","):
                found = [run(options, name, lag, reward_of, seed) for seed in range(options.seeds)]
                sizes = {"loss": name, "task": task, "lag": lag, "steps": options.steps, "rate": options.rate}
                sizes["dtype"] = options.dtype
                emit("stale_losses.reward", found, "reward", **sizes, model=str(options.model or "one hidden layer"))


if __name__ == "__main__":
    main()
