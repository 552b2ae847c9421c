"""Properties of the plan: each datum exactly once, budgets kept, ranks in step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea_trainer.batches.datum_decoding import Datum, DatumSize, Support
from fovea_trainer.batches.datum_groups import allowed_sizes
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.batches.places import plan

SIZES = st.lists(
    st.builds(DatumSize, st.integers(1, 500), st.sampled_from([0, 0, 4, 256, 1000])), min_size=1, max_size=60
)
RANKS = st.integers(1, 5)
BUDGETS = st.tuples(st.integers(1, 700), st.integers(1, 1500))


@given(SIZES, RANKS, BUDGETS)
def test_every_datum_is_computed_once(sizes: list[DatumSize], ranks: int, budgets: tuple[int, int]) -> None:
    made = plan(sizes, ranks, *budgets)
    computed = [index for rank in range(ranks) for index in made.datums_of(rank)]
    assert sorted(computed) == list(range(len(sizes)))


@given(SIZES, RANKS, BUDGETS)
def test_ranks_stay_in_step(sizes: list[DatumSize], ranks: int, budgets: tuple[int, int]) -> None:
    made = plan(sizes, ranks, *budgets)
    assert made.steps
    for step in made.steps:
        assert len(step.datums) == ranks
        assert any(step.datums), "no step may leave all ranks idle"
        assert step.has_vision == any(sizes[index].patch_count for batch in step.datums for index in batch)


@given(SIZES, RANKS, BUDGETS)
def test_budgets_hold_but_for_single_datums(sizes: list[DatumSize], ranks: int, budgets: tuple[int, int]) -> None:
    for step in plan(sizes, ranks, *budgets).steps:
        for batch in step.datums:
            if len(batch) > 1:
                assert sum(sizes[index].token_count for index in batch) <= budgets[0]
                assert sum(sizes[index].patch_count for index in batch) <= budgets[1]


@given(SIZES, RANKS, BUDGETS)
def test_the_plan_depends_on_sizes_alone(sizes: list[DatumSize], ranks: int, budgets: tuple[int, int]) -> None:
    copies = [DatumSize(size.token_count, size.patch_count) for size in sizes]
    assert plan(sizes, ranks, *budgets) == plan(copies, ranks, *budgets)
    assert 0 < plan(sizes, ranks, *budgets).efficiency <= 1


@given(SIZES, BUDGETS)
def test_equal_lengths_stand_side_by_side(sizes: list[DatumSize], budgets: tuple[int, int]) -> None:
    for step in plan(sizes, 1, *budgets).steps:
        lengths = [sizes[index].token_count for index in step.datums[0]]
        assert lengths == sorted(lengths)


def test_equal_datums_are_spread_evenly_and_fill_the_ranks() -> None:
    made = plan([DatumSize(79, 256)] * 64, 2, 16384, 65536)
    assert [len(batch) for step in made.steps for batch in step.datums] == [32, 32]
    assert made.efficiency == 1.0


def test_a_rank_without_datum_has_an_empty_batch() -> None:
    made = plan([DatumSize(10, 0)], 3, 100, 100)
    assert made.steps[0].datums == ((0,), (), ())


@given(SIZES, st.sampled_from([1, 2, 4, 6, 8]), BUDGETS)
def test_groups_share_the_datums_above_the_token_budget(
    sizes: list[DatumSize], ranks: int, budgets: tuple[int, int]
) -> None:
    groups = allowed_sizes(ranks, 24)
    made = plan(sizes, ranks, *budgets, groups)
    computed = []
    for step in made.steps:
        assert len(step.datums) == ranks
        members = [step.datums[first : first + step.ranks] for first in range(0, ranks, step.ranks)]
        assert all(len(set(group)) == 1 for group in members), "ranks of a group must have different datums"
        computed += [index for group in members for index in group[0]]
        for rank, batch in enumerate(step.datums):
            long = [index for index in batch if sizes[index].token_count > budgets[0]]
            assert (step.ranks > 1) == bool(long and groups) or not batch
            if step.ranks > 1 and batch:
                fits = [size for size in groups if -(-sizes[batch[0]].token_count // size) <= budgets[0]]
                assert step.ranks == min(fits, default=max(groups))
                assert step.tokens_of(sizes, rank) == -(-sizes[batch[0]].token_count // step.ranks)
    assert sorted(computed) == list(range(len(sizes)))
    assert 0 < made.efficiency <= 1
    assert made.shares_datums == any(step.ranks > 1 for step in made.steps)


def test_short_datums_are_planned_as_without_groups() -> None:
    sizes = [DatumSize(40, 0), DatumSize(300, 8), DatumSize(7, 0), DatumSize(60, 4)]
    made, alone = plan(sizes, 2, 100, 100, [2]), plan([sizes[0], DatumSize(1, 0), *sizes[2:]], 2, 100, 100)
    assert made.steps[0].datums == ((1,), (1,))
    short = [[tuple(i for i in batch if i != 1) for batch in step.datums] for step in alone.steps]
    assert [[tuple(batch) for batch in step.datums] for step in made.steps[1:]] == short


def test_a_group_divides_ranks_and_heads() -> None:
    assert allowed_sizes(8, 32) == [2, 4, 8]
    assert allowed_sizes(8, 28) == [2, 4]
    assert allowed_sizes(6, 9) == [3]
    assert allowed_sizes(1, 32) == []


def test_supports_are_packed_in_rows_of_equal_width() -> None:
    layout = BatchLayout(None, torch.device("cpu"))
    supported = replace(Datum.blank(3), support=Support(np.array([4, 9, 77]), np.array([0, 0, 1, 3])))
    full = replace(Datum.blank(1), support=Support(np.array([], np.int64), np.array([0, 0])))
    batch = layout.pack([Datum.blank(2), supported, full], {}, False, None)
    assert batch.support_TM is not None
    assert batch.support_TM.tolist() == [[-1, -1], [-1, -1], [-1, -1], [4, -1], [9, 77], [-1, -1]]
    assert layout.pack([Datum.blank(2), full], {}, False, None).support_TM is None
    with pytest.raises(AssertionError):
        replace(batch, support_TM=None)
