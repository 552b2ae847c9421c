"""The live page in a real browser: a model is trained through the SDK, and the page updates without a reload."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_demo.digits import Prompter, Scan, load_scans
from fovea_demo.job import Recipe
from tests.e2e.browser import Browser, running_browser, why_no_browser
from tests.e2e.stack import API_KEY, Stack
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
PICTURES = os.environ.get("FOVEA_PAGE_PICTURES", "")
"""A folder for screenshots of the page. If it is set, the training is longer, so that the curves show something."""
STEPS = 138 if PICTURES else 6
_BATCH = 32
_SLIDE = (
    "const step = document.querySelector('#step'); step.value = arguments[0]; step.dispatchEvent(new Event('input'))"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


class _Training:
    """Trains on scans of digits, with occasional samples and evaluations."""

    def __init__(self, service: tinker.ServiceClient, training: tinker.TrainingClient, rest: httpx.Client) -> None:
        self._service, self._training, self._rest = service, training, rest
        self.prompter = Prompter(training.get_tokenizer())
        self._scans, self._held_out = load_scans()

    def run(self, base_model: str) -> None:
        base = self._service.create_sampling_client(base_model=base_model).result()
        recipe = Recipe()
        for step in range(STEPS):
            first = _BATCH * step % (len(self._scans) - _BATCH)
            data = [self.prompter.datum(scan, recipe.image_token_count) for scan in self._scans[first : first + _BATCH]]
            backward = self._training.forward_backward(data, "cross_entropy")
            rate = recipe.learning_rate_at(step, STEPS)
            self._training.optim_step(tinker.AdamParams(learning_rate=rate, eps=1e-8)).result()
            backward.result()
            if (step + 1) % 6 == 0:
                self._sample(base, step)

    def _sample(self, base: tinker.SamplingClient, step: int) -> None:
        sampler = self._training.save_weights_and_get_sampling_client().result()
        scans = [self._held_out[(step + number) % len(self._held_out)] for number in range(4)]
        params = tinker.SamplingParams(max_tokens=4, seed=step, stop=[self.prompter.end_token])
        asked = [sampler.sample(self.prompter.prompt(scan), 4, params) for scan in scans]
        samples, rewards, gaps = [], [], []
        for scan, one in zip(scans, asked, strict=True):
            for sequence in one.result().sequences:
                tokens = list(sequence.tokens)
                rewards.append(float(self.prompter.read(tokens) == str(scan.digit)))
                samples.append({"sequence_id": sequence.sequence_id, "reward": rewards[-1], "truth": str(scan.digit)})
                gaps.append(self._gap(base, scan, tokens, list(sequence.logprobs or [])))
        metrics = {"reward": sum(rewards) / len(rewards), "kl": sum(gaps) / len(gaps)}
        body = {"model_id": self._training.model_id, "metrics": metrics, "samples": samples}
        answer = self._rest.post("live/reports", json=body)
        assert answer.json() == {"step": step + 1, "samples_kept": len(samples)}, answer.text

    def _gap(self, base: tinker.SamplingClient, scan: Scan, tokens: list[int], logprobs: list[float]) -> float:
        """Returns the mean log-ratio of the tokens to the base model in nats per token, an estimate of the KL."""
        whole = [*self.prompter.prompt(scan).chunks, tinker.EncodedTextChunk(tokens=tokens)]
        scores = base.compute_logprobs(tinker.ModelInput(chunks=whole)).result()[-len(tokens) :]
        return sum(own - (other or 0.0) for own, other in zip(logprobs, scores, strict=True)) / len(tokens)


def test_what_happens_appears_without_a_reload(
    stack: Stack, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, browser: Browser
) -> None:
    rest = httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60)
    browser.show(1280, dark=False)
    browser.open(f"{stack.base_url}/")
    browser.wait_text("#link", "live")  # the page tries the published key by itself on this machine
    browser.run("window.isTheSame = true")

    name = "digits" if PICTURES else f"digits {HOSTILE}"
    training = service.create_lora_training_client(stack.model_name, rank=Recipe().rank, user_metadata={"name": name})
    training = training.result()
    browser.click(f"#models button[title='{training.model_id}']")
    browser.wait_text("#run", name, "The first optim_step brings the first curves.")
    learning = _Training(service, training, rest)
    learning.run(stack.model_name)

    browser.wait_text("#run .figures", f"{STEPS}\nsteps", "Reward", "Loss per token", "Learning rate")
    browser.wait("return document.querySelectorAll('#run .curve canvas').length >= 2")
    browser.wait("return [...document.querySelectorAll('#groups img')].some((one) => one.naturalWidth > 0)")
    browser.wait_text("#groups", "Which digit is this?", "right answer:", "reward")
    assert browser.run("return document.querySelectorAll('#groups .token').length") > 0

    sampler = training.save_weights_and_get_sampling_client().result()
    hostile = tinker.ModelInput.from_ints(tokenizer.encode(HOSTILE))
    if not PICTURES:
        sampler.sample(hostile, 1, tinker.SamplingParams(max_tokens=4, seed=0)).result()
        browser.wait_text("#groups", HOSTILE)

    path = training.save_state("kept-by-the-page").result().path
    row = f"[data-path='{path}']"
    browser.wait_text(row, "kept-by-the-page", "training", "Copy resume line")
    with pytest.raises(tinker.TinkerError):
        training.forward_backward([learning.prompter.datum(load_scans()[0][0], 1)], "cross_entropy").result()
    browser.wait_text("#errors", "forward backward")
    browser.wait_text("#services", "Trainer", "Sampler", "memory")
    browser.wait_text("#pushes", "pushes of weights")
    browser.wait_text("#usage", "Trained", "Sampled")
    if PICTURES:
        browser.run(_SLIDE, 2)  # to the third of the sampled steps, where its answers still vary
        browser.wait_text("#step-shown", "18")
        browser.pictures(Path(PICTURES), "page", most_height=6000)
    browser.show(390, dark=True)
    # Charts follow the width with a delay.
    asyncio.run(eventually(lambda: browser.too_wide("#usage .scroll, #queue .scroll, .models, svg") == [], 60))
    browser.show(1280, dark=False)

    browser.click(f"{row} button", "Delete")
    browser.click(f"{row} button", "Delete for good")
    browser.wait("return !document.querySelector(arguments[0])", row)
    listed = rest.get("checkpoints").json()["checkpoints"]
    assert path not in [checkpoint["tinker_path"] for checkpoint in listed]

    assert browser.run("return [window.isTheSame, window.hacked ?? null]") == [True, None]
    assert browser.complaints() == []
    rest.close()


def test_a_wrong_key_shows_one_line_and_the_right_one_opens_the_page(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.base_url}/")
    browser.wait_text("#link", "live")
    browser.click("#forget")
    browser.type("#key", "tml-wrong")
    browser.wait_text("#wrong", "key is unknown")
    assert browser.run("return sessionStorage.length") == 0
    browser.type("#key", API_KEY)
    browser.wait_text("#link", "live")
    assert browser.text("#wrong") == ""
    told = browser.complaints()
    assert [one for one in told if "401" not in one] == []
