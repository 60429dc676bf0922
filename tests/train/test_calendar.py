"""Which steps are recorded, evaluated and saved."""

import pytest

from tied_lm.train.calendar import Schedule


@pytest.fixture
def schedule_of(make_config):
    return lambda *overrides: Schedule.of(make_config("optimizer.warmup_steps=0", *overrides))


def test_lists_of_a_run_whose_gaps_do_not_divide_it(schedule_of):
    schedule = schedule_of(
        "train.steps=50", "train.eval_every=20", "log.scalars_every=15", "log.rows_every=12", "checkpoint.every=25"
    )
    assert schedule.steps == 50
    assert schedule.evaluations == [0, 20, 40, 50]
    assert schedule.scalars == [0, 15, 30, 45, 50]
    assert schedule.rows == [0, 1, 2, 4, 8, 12, 24, 36, 48, 50]
    assert schedule.checkpoints == [25, 50]


def test_rows_double_until_the_gap_is_reached(schedule_of):
    assert schedule_of("train.steps=40", "log.rows_every=8").rows == [0, 1, 2, 4, 8, 16, 24, 32, 40]
    assert schedule_of("train.steps=20", "log.rows_every=64").rows == [0, 1, 2, 4, 8, 16, 20]
    assert schedule_of("train.steps=4", "log.rows_every=1").rows == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("vocab_size", "gap"), [(10_000, 64), (50_257, 512), (262_144, 2048), (2**24, 2**17)])
def test_of_many_rows_all_are_kept_less_often(schedule_of, vocab_size, gap):
    schedule = schedule_of("train.steps=100000", "log.rows_every=64", f"data.vocab_size={vocab_size}")
    thin = schedule.every_row
    assert thin == [0, 1, 2, 4, 8, 16, 32, *range(gap, 100_000, gap), 100_000]
    assert len(schedule.rows) == 7 + 1563
    assert set(thin) <= set(schedule.rows)
    assert (schedule.thinning == "") == (thin == schedule.rows) == (gap == 64)
    assert len(thin) * vocab_size <= 2**24 or gap >= 100_000


def test_probes_are_log_spaced_with_first_and_last(schedule_of):
    probes = schedule_of("train.steps=1024").probes
    assert probes == [0, *(2**i for i in range(11))]
    assert schedule_of("train.steps=3").probes == [0, 1, 2, 3]


def test_one_step_has_a_start_and_an_end(schedule_of):
    schedule = schedule_of("train.steps=1")
    assert schedule.evaluations == schedule.scalars == schedule.rows == schedule.probes == [0, 1]
    assert schedule.checkpoints == [1]


def test_no_gap_is_too_long_for_the_ends(schedule_of):
    schedule = schedule_of("train.steps=10", "train.eval_every=1000", "checkpoint.every=1000")
    assert schedule.evaluations == [0, 10]
    assert schedule.checkpoints == [10]


def test_next_boundary_is_the_first_later_step_of_any_list(schedule_of):
    schedule = schedule_of(
        "train.steps=50", "train.eval_every=20", "log.scalars_every=15", "log.rows_every=3", "checkpoint.every=33"
    )
    assert [step for step in range(8, 50) if step in schedule.probes] == [10, 15, 23, 34]
    expected = {0: 1, 10: 15, 15: 20, 20: 23, 29: 30, 30: 33, 33: 34, 40: 45, 49: 50}
    assert {step: schedule.next_boundary(step) for step in expected} == expected
