"""Settings of the loop; tests/e2e/fovea_rollout/test_loop.py tests the loop itself."""

from typing import Any

import pytest

from fovea.wire.errors import InvalidInput
from fovea_data.fine_tuning import FineTuneSettings
from fovea_rollout.loop.loop_settings import LoopSettings
from fovea_rollout.loop.player_cloning import WarmUpSettings
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings

WARM = RolloutSettings(sampling=SamplingSettings(temperature=0.7))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps is 0; it must be 1 or more"),
        ({"group_size": 1}, "group_size is 1; advantages compare the rollouts of a group, so it must be 2 or more"),
        ({"max_lag": 0}, "max_lag is 0"),
        ({"portion": 0}, "portion is 0; it must be 1 or more"),
        ({"replays": -1}, "replays is -1; it must be 0 or more"),
        ({"evaluate_every": 0}, "evaluate_every is 0; it must be 1 or more"),
        ({"schedule": "cosine"}, "schedule is 'cosine'; it must be constant or linear"),
        ({"target_kl": 0.0}, "target_kl is 0; it must be above 0, or None"),
        ({"loss": "importance_sampling"}, "substeps is 4, but loss importance_sampling does not clip: use substeps=1"),
        ({"kl_coefficient": 0.1, "rollout": WARM}, "temperature is 0.7, but kl_coefficient needs 1"),
        ({"rollout": WARM}, "set temperature to 1 or kl_coefficient to 0"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        LoopSettings(**changes)


def test_a_wrong_field_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"^LoopSettings has no field 'stpes'; did you mean 'steps' or 'substeps'\?"):
        LoopSettings(**{"stpes": 5})
    with pytest.raises(InvalidInput, match=r"^FineTuneSettings has no field 'epoch'; did you mean 'epochs'\?"):
        FineTuneSettings(**{"epoch": 5})
    with pytest.raises(InvalidInput, match=r"^SamplingSettings has no field 'xyz'; it has max_tokens, temperature, "):
        SamplingSettings(**{"xyz": 5})
    for kind in (RolloutSettings, WarmUpSettings):
        with pytest.raises(InvalidInput, match=f"^{kind.__name__} has no field 'max_turn'"):
            kind(**{"max_turn": 5})


def test_a_learning_rate_may_fall_with_the_steps() -> None:
    fixed = LoopSettings(1, 1, 2, learning_rate=0.5, schedule="constant", adam={"grad_clip_norm": 1.0})
    assert (fixed.adam_params(3).learning_rate, fixed.adam_params(3).grad_clip_norm) == (0.5, 1.0)
    assert fixed.adam_params(3, 0.25).learning_rate == 0.125, "a share of it"
    falling = LoopSettings(4, 1, 2, learning_rate=0.5)
    assert [falling.adam_params(step).learning_rate for step in range(4)] == [0.5, 0.375, 0.25, 0.125]
    assert falling.adam_params(3, 0.5).learning_rate == 0.0625, "a share of the rest"
    assert (fixed.first_rate(0.1), falling.first_rate(0.1)) == (0.1, 0.2), "the same on average"


def test_evaluations_are_at_an_interval_and_at_the_end() -> None:
    settings = LoopSettings(7, evaluate_every=3, rollout=RolloutSettings(sampling=SamplingSettings(max_tokens=9)))
    assert [step for step in range(7) if settings.is_evaluated(step)] == [2, 5, 6]
    assert settings.greedy.sampling == SamplingSettings(max_tokens=9, temperature=0.0)


def test_a_loss_on_recorded_samples_knows_their_temperature() -> None:
    given = {"rollout": WARM, "kl_coefficient": 0.0}
    assert LoopSettings(**given).whole_loss_config == {"temperature": 0.7}
    recorded = LoopSettings(loss="stable_reinforce", loss_config={"max_weight": 3.0}, **given)
    assert (recorded.is_recorded, recorded.whole_loss_config) == (True, {"max_weight": 3.0})
