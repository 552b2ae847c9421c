"""Each promise holds for a good history, and a history that breaks it is reported."""

import copy
import json
from collections import Counter
from collections.abc import Callable

import pytest

from chaos import checker
from chaos.checker import SAMPLE_TOLERANCE, Violation
from chaos.history import Answer, Command, History
from chaos.inventory import Finish

LAST_FAULT_S = 50.0


def good() -> History:
    """Returns the history of a client with one model: two batches and two steps, a snapshot after each, a sample and a
    save.
    """
    operations: list[tuple[str, dict[str, object], dict[str, object]]] = [
        ("create_model", {}, {"model_id": "m"}),
        ("forward_backward", {"round": 0}, {"loss": 2.5, "digest": "a"}),
        ("optim_step", {"round": 0}, {"metrics": {"grad_norm:mean": 1.25}}),
        ("snapshot", {"round": 0}, {}),
        ("score", {"snapshot": 0}, {"logprobs": [-1.0, -2.0]}),
        ("forward_backward", {"round": 1}, {"loss": 2.0, "digest": "b"}),
        ("optim_step", {"round": 1}, {"metrics": {"grad_norm:mean": 0.75}}),
        ("snapshot", {"round": 1}, {}),
        ("score", {"snapshot": 1}, {"logprobs": [-1.5, -1.0]}),
        ("sample", {"snapshot": 1}, {"tokens": [7, 8], "logprobs": [-0.5, -0.25]}),
        ("save_state", {"name": "final"}, {"path": "tinker://m/weights/final"}),
    ]
    return History(
        {
            ("c", number): Command("c", number, operation, float(number), arguments, [Answer(number + 0.5, value)])
            for number, (operation, arguments, value) in enumerate(operations)
        }
    )


def finishes() -> list[Finish]:
    """Returns the gateway's finished requests of a history."""
    kinds = [one.operation for one in good().of("c") if one.operation in checker.TRAINING]
    return [Finish("m", seq_id, kind, "done", 10 + seq_id) for seq_id, kind in enumerate(kinds)]


def check(history: History) -> list[Violation]:
    """Checks all promises about histories."""
    return [
        *checker.answered_once(history),
        *checker.in_order(history, finishes()),
        *checker.same_results(history, good()),
        *checker.named_snapshot(history, good()),
        *checker.in_time(history, LAST_FAULT_S),
    ]


def at(number: int) -> tuple[str, int]:
    return ("c", number)


def lose_answer(history: History) -> None:
    history.commands[at(1)].answers.clear()


def answer_twice(history: History) -> None:
    history.commands[at(1)].answers *= 2


def answer_with_error(history: History) -> None:
    history.commands[at(6)].answers[0] = Answer(7.0, {}, "RequestFailedError: the trainer was started again")


def answer_the_unasked(history: History) -> None:
    history.add({"client": "c", "number": 99, "at_s": 1.0, "value": {}})


def answer_too_early(history: History) -> None:
    history.commands[at(2)].answers[0] = Answer(1.0, history.commands[at(2)].answers[0].value)


def forget_command(history: History) -> None:
    del history.commands[at(10)]


def set_value(number: int, **value: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.commands[at(number)].answers[0].value.update(value)

    return change


def answer_late(history: History) -> None:
    late_s = LAST_FAULT_S + checker.ANSWERED_WITHIN_S + 1.0
    history.commands[at(9)].answers[0] = Answer(late_s, history.commands[at(9)].answers[0].value)


def test_a_good_history_keeps_every_promise() -> None:
    assert check(good()) == []


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        (lose_answer, "answered once"),
        (answer_twice, "answered once"),
        (answer_with_error, "answered once"),
        (answer_the_unasked, "answered once"),
        (answer_too_early, "answered once"),
        (forget_command, "same results"),
        (forget_command, "in order"),
        (set_value(5, loss=2.0000000000000004), "same results"),
        (set_value(5, digest="other"), "same results"),
        (set_value(6, metrics={"grad_norm:mean": 0.7500001}), "same results"),
        (set_value(9, tokens=[7, 9]), "named snapshot"),
        (set_value(9, logprobs=[-0.5, -0.25 + 2 * SAMPLE_TOLERANCE]), "named snapshot"),
        (set_value(9, logprobs=[-0.5]), "named snapshot"),
        (set_value(8, logprobs=[-1.0, -2.0]), "named snapshot"),  # the snapshot before it
        (answer_late, "in time"),
    ],
)
def test_a_history_that_breaks_a_promise_is_found(change: Callable[[History], None], promise: str) -> None:
    history = copy.deepcopy(good())
    change(history)
    assert promise in {one.promise for one in check(history)}


def test_rounding_in_a_sampler_breaks_no_promise() -> None:
    history = copy.deepcopy(good())
    set_value(9, logprobs=[-0.5, -0.25 + SAMPLE_TOLERANCE / 2])(history)
    assert check(history) == []


def test_snapshots_that_cannot_be_told_apart_prove_nothing() -> None:
    alike = copy.deepcopy(good())
    set_value(8, logprobs=[-1.0, -2.0 + SAMPLE_TOLERANCE])(alike)
    assert any("indistinguishable" in one.what for one in checker.named_snapshot(alike, alike))


@pytest.mark.parametrize(
    "change",
    [
        lambda finishes: finishes.pop(),  # lost
        lambda finishes: finishes.append(finishes[-1]),  # run twice
        lambda finishes: finishes.__setitem__(2, Finish("m", 2, "optim_step", "done", 99)),  # after the next one
        lambda finishes: finishes.__setitem__(2, Finish("m", 2, "optim_step", "running", None)),  # never ended
    ],
)
def test_the_gateways_own_order_is_checked(change: Callable[[list[Finish]], object]) -> None:
    disordered = finishes()
    change(disordered)
    assert {one.promise for one in checker.in_order(good(), disordered)} == {"in order"}


def test_saved_weights_are_compared_tensor_by_tensor() -> None:
    saved = {"c final": {"adapter:a": "1", "adapter:b": "2"}}
    assert checker.same_weights(saved, copy.deepcopy(saved)) == []
    for other in ({"adapter:a": "1", "adapter:b": "3"}, {"adapter:a": "1"}, {}):
        assert checker.same_weights({"c final": other}, saved)
    assert checker.same_weights({}, saved)
    assert checker.same_weights({"c final": {}}, {"c final": {}}), "something must have been compared"


def test_what_an_undisturbed_run_leaves_may_be_left_and_no_more() -> None:
    usual = Counter({"rows of futures": 40, "files state/checkpoints/a": 2})
    assert checker.nothing_left(Counter(usual), usual) == []
    for more in ({"rows of journal": 1}, {"processes fovea_trainer rank 0": 1}, {"files state/recovery/#": 3}):
        assert checker.nothing_left(usual + Counter(more), usual)
    assert checker.nothing_left(Counter({"rows of futures": 39, "files state/checkpoints/a": 2}), usual), "lost"
    assert checker.nothing_left(Counter(usual), usual, ["port 4711"])


def test_a_sample_that_failed_breaks_one_promise_alone() -> None:
    history = good()
    command = history.commands[at(9)]
    command.answers = [Answer(9.5, {}, "no sampler answers")]
    assert checker.answered_once(history) == [Violation("answered once", f"{command.name} failed: no sampler answers")]
    assert checker.named_snapshot(history, good()) == []


def test_an_alarm_of_the_gateway_breaks_a_promise() -> None:
    # The message of gateway/fovea_gateway/training/trainer_queue.py.
    alarm = "ERROR gateway: request 4 (optim_step) of model m gave another answer when it ran again than the one"
    assert checker.no_alarm("INFO ready\nERROR the disk of /state is full\n") == []
    assert checker.no_alarm(f"INFO ready\n{alarm}\n") == [Violation("same results", alarm)]


def test_a_history_is_read_as_it_was_written() -> None:
    lines = [
        {"client": "c", "number": 0, "operation": "sample", "invoked_s": 1.0, "arguments": {"round": 4}},
        {"client": "c", "number": 0, "at_s": 2.0, "value": {"tokens": [1]}},
        {"client": "c", "number": 1, "operation": "sample", "invoked_s": 3.0, "arguments": {"round": 5}},
        {"client": "c", "number": 1, "at_s": 4.0, "error": "gone"},
    ]
    history = History()
    for line in lines:
        history.add(json.loads(json.dumps(line)))
    assert history.commands[at(0)].answers == [Answer(2.0, {"tokens": [1]})]
    assert history.commands[at(1)].answers == [Answer(4.0, {}, "gone")]
    assert history.rounds("c") == 6
