"""Each check of losses, steps and checkpoints fails on a server with the fault that it looks for."""

import numpy as np
import pytest

from fovea_conformance.check import Status
from tests.e2e.conformance import disorder, misreadings
from tests.e2e.conformance.corruption import Wrong, answer, loss, request, without
from tests.e2e.conformance.judging import judged
from tests.e2e.conformance.misreadings import adam, inputs, lora, reading
from tests.e2e.stack import Stack

WRONG: dict[str, dict[str, Wrong]] = {
    "C78": {"ignores zstd": disorder.header("content-encoding", None), "a bomb": Wrong(before=misreadings.takes_bombs)},
    "C79": {"normalises weights": inputs("weights", misreadings.normalised), "a mean": loss(misreadings.mean_loss)},
    "C80": {
        "scales advantages": inputs("advantages", lambda given: given * 1.1),
        "a mean": loss(misreadings.mean_loss),
    },
    "C81": {
        "never clips": misreadings.renamed("ppo", "importance_sampling"),
        "clips as ppo": misreadings.renamed("cispo", "ppo"),
    },
    "C82": {"ignores the mask": inputs("sequence_ratio_mask", np.ones_like)},
    "C83": {"the legacy config wins": reading(misreadings.legacy_config)},
    "C84": {"flat": loss(misreadings.flat)},
    "C85": {"no token 0": reading(misreadings.no_token_zero)},
    "C86": {
        "clamps weights": inputs("weights", lambda given: np.clip(given, -10, 10)),
        "no negative weights": inputs("weights", lambda given: np.maximum(given, 0)),
    },
    "C87": {"no loss": loss(misreadings.no_loss), "a key without colon": loss(misreadings.plain_key)},
    "C88": {"a mean": loss(misreadings.mean_loss)},
    "C89": {"only the first counts": Wrong(before=misreadings.OnlyFirst())},
    "C90": {"forward trains": reading(misreadings.always_trains)},
    "C91": {"no negative weights": inputs("weights", lambda given: np.maximum(given, 0))},
    "C92": {"halves an input": inputs("old", lambda given: given / 2)},
    "C93": {"no weight decay": adam(weight_decay=0.0), "its own beta2": adam(beta2=0.95)},
    "C94": {"never clips": adam(grad_clip_norm=0.0), "always clips": adam(grad_clip_norm=1.0)},
    "C95": {"takes all for Adam": request("optim_step", misreadings.any_family)},
    "C96": {"ignores the seed": request("create_model", misreadings.OtherSeeds())},
    "C97": {
        "blames itself": disorder.final(200, misreadings.blames_itself),
        "absent weights are zeros": reading(misreadings.zero_weights),
    },
    "C98": {"blames itself": disorder.final(200, misreadings.blames_itself)},
    "C99": {"takes 100 kB": misreadings.short_bodies(100_000)},
    "C106": {"restores the optimizer": request("load_weights", lambda body: body.update(optimizer=True))},
    "C107": {"forgets the optimizer": request("load_weights", lambda body: body.update(optimizer=False))},
    "C108": {
        "overwrites": request("save_weights", lambda body: body.update(overwrite=True)),
        "ignores metadata": without("save_weights", "user_metadata"),
    },
    "C109": {"lives for ever": without("save_weights", "ttl_seconds")},
    "C110": {"keeps what is deleted": Wrong(before=misreadings.keeps_deleted)},
    "C111": {
        "ignores metadata": without("create_model", "user_metadata"),
        "counts the page": answer("training_runs", misreadings.count_page),
    },
    "C124": {"reads no provenance": misreadings.renamed("stable_reinforce", "importance_sampling")},
    "C125": {
        "believes the client": misreadings.renamed("stable_reinforce", "importance_sampling"),
        "records nothing": request("asample", lambda body: body.update(record_stability_info=False)),
    },
    "C126": {"forgets after one use": reading(misreadings.OneUse())},
    "C127": {"takes any sequence": misreadings.renamed("stable_reinforce", "importance_sampling")},
    "C128": {
        "drops settings that are text": reading(misreadings.no_text),
        "ignores kl_coeff": reading(misreadings.no_penalty),
    },
    "C112": {"adapts all": lora(train_unembed=True), "its own rank": lora(rank=8)},
}


@pytest.mark.parametrize(("check_id", "wrong"), [(check_id, wrong) for check_id in WRONG for wrong in WRONG[check_id]])
def test_fails_on_a_wrong_server(stack: Stack, check_id: str, wrong: str) -> None:
    verdict = judged(stack, check_id, WRONG[check_id][wrong])
    assert verdict.status is Status.FAILED, verdict.detail
