"""The check detects a sampler that ignores an adapter of one kind of module."""

import numpy as np
import pytest

from fovea_parity.adapter_kinds import LEAST_MOVED, MOST_NAT, AdapterEffect, differ

BASE = [np.array([-1.0, -2.0]), np.array([-3.0])]
TRAINED = [np.array([-1.0, -2.1]), np.array([-3.0])]


def test_a_sampler_that_applies_an_adapter() -> None:
    sampled = [scores + 1e-6 for scores in TRAINED]
    assert not AdapterEffect(differ(sampled, TRAINED), differ(TRAINED, BASE)).problem


def test_a_sampler_that_ignores_an_adapter() -> None:
    found = AdapterEffect(differ(BASE, TRAINED), differ(TRAINED, BASE))
    assert found.problem == "differs by 1.0e-01 nat between sampler and trainer; it changes 1.0e-01 nat"


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_an_adapter_with_an_effect_too_small_to_prove(share: float) -> None:
    assert "too little to prove" in AdapterEffect(0.0, share * LEAST_MOVED).problem
    assert LEAST_MOVED > MOST_NAT
