"""Losses under a lag of the sampler: `python -m benchmarks.stale_losses`; on a GPU with `--model DIR --device cuda`.

A policy learns two tasks over a few symbols with the trainer's own loss functions. Samples come from the weights of
`lag` steps ago, rounded to bfloat16 as a sampler's are. Figures: the mean reward of the last quarter of the steps, by
seed. The first task, `reverse`, rewards each correct token; the second, `recall`, only a whole answer.
"""

import argparse
import copy
from collections import deque
from collections.abc import Callable, Mapping
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
            logprobs = functional.log_softmax(self.sampler(tokens).logits[:, -1, :SYMBOLS].float(), -1)
            drawn = torch.multinomial(logprobs.exp(), 1)
            found.append(logprobs.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
        return tokens[:, prompts.shape[1] :], torch.cat(found, 1)

    def logprobs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Returns the log-probabilities of answers by the trained weights, float32 [B, ANSWER] with gradient."""
        logits = self.model(torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1, :SYMBOLS].float()
        return functional.log_softmax(logits, -1).gather(2, answers[..., None])[..., 0]


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
    options = parser.parse_args()
    for task in options.tasks.split(","):
        reward_of = TASKS[task]
        for lag in LAGS:
            for name in options.losses.split(","):
                found = [run(options, name, lag, reward_of, seed) for seed in range(options.seeds)]
                sizes = {"loss": name, "task": task, "lag": lag, "steps": options.steps, "rate": options.rate}
                emit("stale_losses.reward", found, "reward", **sizes, model=str(options.model or "one hidden layer"))


if __name__ == "__main__":
    main()
