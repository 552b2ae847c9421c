"""The KL penalty, term by term."""

import numpy as np
import pytest

from fovea.wire.errors import InvalidInput
from fovea_rollout.loop.kl_penalty import kl_penalty


def test_terms_are_centred_over_the_batch() -> None:
    logprobs = [np.array([0.0, -1.0, -2.0]), np.array([-0.5, 0.0])]
    base = [np.array([-9.0, -3.0, -1.0]), np.array([-1.5, -9.0])]
    masks = [np.array([False, True, True]), np.array([True, False])]
    penalty = kl_penalty(logprobs, base, masks, 0.1)
    differences = [2.0, -1.0, 1.0]
    assert penalty.kl == pytest.approx(np.mean(differences))
    expected = [0.1 * (np.mean(differences) - d) for d in differences]
    np.testing.assert_allclose(penalty.terms[0], [0.0, expected[0], expected[1]])
    np.testing.assert_allclose(penalty.terms[1], [expected[2], 0.0])
    assert sum(term.sum() for term in penalty.terms) == pytest.approx(0.0)


def test_likelier_than_the_base_loses() -> None:
    penalty = kl_penalty([np.array([-0.1, -2.0])], [np.array([-1.0, -1.0])], [np.array([True, True])], 1.0)
    assert penalty.terms[0][0] < 0 < penalty.terms[0][1]


def test_nothing_sampled_is_nothing_penalised() -> None:
    penalty = kl_penalty([np.array([-1.0])], [np.array([-2.0])], [np.array([False])], 1.0)
    assert (penalty.kl, penalty.terms[0].tolist()) == (0.0, [0.0])
    assert kl_penalty([], [], [], 1.0).terms == []


def test_unequal_counts_are_named() -> None:
    with pytest.raises(InvalidInput, match="have 1, 0 and 1 datums"):
        kl_penalty([np.zeros(1)], [], [np.ones(1, bool)], 1.0)
