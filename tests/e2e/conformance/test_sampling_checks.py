"""Checks of sampling and images fail on servers with the fault that they look for; test_all_checks verifies that they
pass otherwise.
"""

from collections.abc import Callable, Iterator

import pytest

from fovea_conformance.check import Status
from fovea_conformance.runner import Verdict
from tests.e2e.conformance import mistakes
from tests.e2e.conformance.corruption import Wrong, answer, loss, params, request, sample, without
from tests.e2e.conformance.judging import judging
from tests.e2e.stack import Stack

WRONG: dict[str, dict[str, Wrong]] = {
    "C51": {"names another model": answer("samplers/", mistakes.another_base_model)},
    "C52": {"ignores model_path": without("create_sampling_session", "model_path")},
    "C53": {"one id for all": answer("asample", mistakes.same_ids)},
    "C54": {"one sample eight times": sample(mistakes.repeat_first)},
    "C55": {
        "a log-probability too few": sample(mistakes.drop_last_logprob),
        "other scores": sample(mistakes.scale_sampled),
    },
    "C56": {"ignores the temperature": params(temperature=1.0), "scaled twice": sample(mistakes.scale_sampled)},
    "C57": {"ignores the temperature": params(temperature=1.0)},
    "C58": {"ignores the seed": params(seed=None)},
    "C59": {"ignores top_k": params(top_k=-1), "ignores top_p": params(top_p=1.0)},
    "C60": {"ignores stop": params(stop=[]), "drops the stop token": sample(mistakes.drop_last_token)},
    "C61": {"ignores stop": params(stop=[]), "drops the stop token": sample(mistakes.drop_last_token)},
    "C62": {"never ends at EOS": params(stop=[]), "always ends at EOS": params(stop=None)},
    "C63": {"other reasons": sample(mistakes.flip_reason)},
    "C64": {"scores the first": sample(mistakes.score_first)},
    "C65": {"one position off": sample(mistakes.shift_prompt)},
    "C66": {
        "ignores last_n": without("asample", "prompt_logprobs_last_n"),
        "one position off": sample(mistakes.shift_prompt),
    },
    "C67": {"worst first": sample(mistakes.ascend)},
    "C68": {"a row too few": sample(mistakes.fewer_rows)},
    "C69": {"one row off": sample(mistakes.roll_targets), "ignores them": without("asample", "target_prompt_logprobs")},
    "C70": {"other columns": sample(mistakes.move_columns)},
    "C71": {"scaled scores": sample(mistakes.scale_drawn), "ignores the temperature": params(temperature=1.0)},
    "C72": {"another error": request("asample", mistakes.no_tokens)},
    "C73": {"no deduplication": request("asample", mistakes.NewSequence())},
    "C74": {"counts each sample": sample(mistakes.count_hits_by_sample)},
    "C75": {"the newest weights": mistakes.Sessions(-1).wrong(), "the oldest weights": mistakes.Sessions(0).wrong()},
    "C76": {
        "never follows": without("save_weights_for_sampler", "kind"),
        "the oldest weights": mistakes.Sessions(0, snapshots=True).wrong(),
    },
    "C77": {"one number for all": answer("join_sampling_session", mistakes.one_counter)},
    "C100": {"another loss": loss(mistakes.double_loss)},
    "C101": {"never counts": request("asample", mistakes.forget_expected)},
    "C102": {"no images": request("asample", mistakes.only_text)},
    "C103": {
        "one position off": sample(mistakes.shift_prompt),
        "a cache with a bad key": request("asample", mistakes.FirstImage()),
    },
    "C104": {"no images": request("asample", mistakes.only_text)},
    "C105": {"leaves out what it does not know": request("asample", mistakes.only_text)},
}


@pytest.fixture(scope="module")
def judge(stack: Stack) -> Iterator[Callable[[str, str], Verdict]]:
    """Runs a check on a faulty server."""
    with judging(stack, WRONG) as judge:
        yield judge


@pytest.mark.parametrize(("check_id", "wrong"), [(check_id, wrong) for check_id in WRONG for wrong in WRONG[check_id]])
def test_fails_on_a_wrong_server(judge: Callable[[str, str], Verdict], check_id: str, wrong: str) -> None:
    verdict = judge(check_id, wrong)
    assert verdict.status is Status.FAILED, verdict.detail
