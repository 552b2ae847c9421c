"""Checks every promise against the answers of clients. Each function returns the violations that it found."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.history import Command, History
from chaos.inventory import Finish, Inventory

SAMPLE_TOLERANCE = 2e-5
"""Tolerance between log-probabilities of a sampler that batches other requests and one that does not.

See docs/lab/robustness.md.
"""
ANSWERED_WITHIN_S = 120.0
TRAINING = ("create_model", "forward_backward", "optim_step", "load_state", "save_state", "snapshot")
"""Operations that have a seq_id of their model and are answered in order."""
_EXACT = ("forward_backward", "optim_step")
_LINES, _LONGEST_LINE = 6, 400  # shown per promise
_SAMPLED = ("sample", "score")
_ALARM = "gave another answer when it ran again"


@dataclass(frozen=True)
class Violation:
    """A broken promise, and the evidence."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


def answered_once(history: History) -> list[Violation]:
    """Checks that each command has exactly one answer, that it is not an error, and that it came after the request."""
    found = [f"{name} was answered but never requested" for name in history.unasked]
    for one in history.commands.values():
        if len(one.answers) != 1:
            found.append(f"{one.name} was answered {len(one.answers)} times")
        found += [f"{one.name} failed: {answer.error}" for answer in one.answers if answer.error]
        found += [f"{one.name} was answered before it was sent" for a in one.answers if a.at_s < one.invoked_s]
    return _violations("answered once", found)


def in_order(history: History, ledger: Iterable[Finish]) -> list[Violation]:
    """Checks that the gateway has each training command of a client once, and finished them in order of seq_id."""
    found = []
    by_scope: dict[str, list[Finish]] = {}
    for finish in ledger:
        by_scope.setdefault(finish.scope, []).append(finish)
    for client in history.clients:
        commands = [one for one in history.of(client) if one.operation in TRAINING]
        model = _model(commands)
        finishes = sorted(by_scope.get(model, []), key=lambda one: one.seq_id)
        if len(finishes) != len(commands):
            found.append(f"{client} sent {len(commands)} commands, but the gateway has {len(finishes)} of {model}")
        if repeated := [seq for seq, count in Counter(one.seq_id for one in finishes).items() if count > 1]:
            found.append(f"{client}: {model} has seq_id {repeated} twice")
        for before, after in pairwise(finishes):
            if before.number is None or after.number is None or before.number > after.number:
                found.append(
                    f"{client}: {model} ended {after.seq_id} {after.kind} before {before.seq_id} {before.kind}"
                )
    return _violations("in order", found)


def same_results(history: History, undisturbed: History) -> list[Violation]:
    """Checks that losses, log-probabilities and gradient norms equal those of the undisturbed run bit for bit."""
    found: list[str] = []
    for one, other in _pairs(history, undisturbed, found):
        if one.operation in _EXACT and _value(one) != _value(other):
            found.append(f"{one.name} answered {_value(one)}, undisturbed {_value(other)}")
    return _violations("same results", found)


def no_alarm(log: str) -> list[Violation]:
    """Checks that the gateway logged no repeated command with an answer different from the client's."""
    return _violations("same results", [line.strip() for line in log.splitlines() if _ALARM in line])


def same_weights(saved: dict[str, dict[str, str]], undisturbed: dict[str, dict[str, str]]) -> list[Violation]:
    """Checks that saved tensors equal those of the undisturbed run bit for bit.

    Args:
        saved: Digests of tensors, keyed by save and tensor.
        undisturbed: The same of the undisturbed run.
    """
    found = []
    for name in sorted(saved.keys() | undisturbed.keys()):
        ours, theirs = saved.get(name, {}), undisturbed.get(name, {})
        differing = [tensor for tensor in sorted(ours.keys() | theirs.keys()) if ours.get(tensor) != theirs.get(tensor)]
        if differing or not ours:
            found.append(f"{name}: {len(differing)} of {len(theirs)} tensors differ, {differing[:2]}")
    return _violations("same weights", found)


def named_snapshot(history: History, undisturbed: History) -> list[Violation]:
    """Checks that samples have the tokens and log-probabilities of the undisturbed run.

    Also checks that snapshots are distinguishable. Each client scores the same prompt with each of its snapshots: if
    two of them agreed within the tolerance, a sample from the wrong one would go unnoticed.
    """
    found: list[str] = []
    for one, other in _pairs(history, undisturbed, found):
        if one.operation not in _SAMPLED or not _has_answer(one) or not _has_answer(other):
            continue
        ours, theirs = _value(one), _value(other)
        where = f"{one.name} of snapshot {one.arguments.get('snapshot')}"
        if ours.get("tokens") != theirs.get("tokens"):
            found.append(f"{where} has tokens {ours.get('tokens')}, undisturbed {theirs.get('tokens')}")
        elif (difference := _difference(ours["logprobs"], theirs["logprobs"])) > SAMPLE_TOLERANCE:
            found.append(f"{where} has other log-probabilities, by {difference:.1e}")
    for client in undisturbed.clients:
        scores = [one for one in undisturbed.of(client) if one.operation == "score" and _has_answer(one)]
        for before, after in pairwise(scores):
            difference = _difference(_value(before)["logprobs"], _value(after)["logprobs"])
            if difference < 10 * SAMPLE_TOLERANCE:
                found.append(f"snapshots before {before.name} and {after.name} are indistinguishable: {difference:.1e}")
    return _violations("named snapshot", found)


def in_time(history: History, last_fault_s: float, within_s: float = ANSWERED_WITHIN_S) -> list[Violation]:
    """Checks that after the last fault no command takes longer than a bound, even if it was in flight."""
    found = []
    for one in history.commands.values():
        for answer in one.answers:
            took = answer.at_s - max(last_fault_s, one.invoked_s)
            if took > within_s:
                found.append(f"{one.name} took {took:.0f} s after the last fault; {within_s:.0f} s is the bound")
    return _violations("in time", found)


def nothing_left(growth: Inventory, undisturbed: Inventory, stopped: Sequence[str] = ()) -> list[Violation]:
    """Checks that the run left as much behind as an undisturbed one, and that nothing remains after the stop."""
    found = [
        f"{name}: {growth[name]:+d}, undisturbed {undisturbed[name]:+d}"
        for name in sorted(growth.keys() | undisturbed.keys())
        if growth[name] != undisturbed[name]
    ]
    return _violations("nothing left", [*found, *(f"{what} after the stop" for what in stopped)])


def summary(violations: Sequence[Violation]) -> str:
    """Formats violations for a terminal. Shortens the list, because a run that stopped halfway breaks many promises."""
    lines = []
    for promise, count in Counter(one.promise for one in violations).items():
        lines += [str(one)[:_LONGEST_LINE] for one in violations if one.promise == promise][:_LINES]
        lines += [f"{promise}: {count - _LINES} more in violations.txt"] if count > _LINES else []
    return "\n".join(lines) or "every promise was kept"


def _violations(promise: str, found: Iterable[str]) -> list[Violation]:
    return [Violation(promise, what) for what in found]


def _pairs(history: History, undisturbed: History, found: list[str]) -> list[tuple[Command, Command]]:
    """Yields each command with the same command of the undisturbed run. Adds commands without a partner to `found`."""
    pairs = []
    for key in sorted(history.commands.keys() | undisturbed.commands.keys()):
        one, other = history.commands.get(key), undisturbed.commands.get(key)
        if one is None or other is None or (one.operation, one.arguments) != (other.operation, other.arguments):
            found.append(f"{key[0]} #{key[1]} is {one and one.name}, undisturbed {other and other.name}")
        else:
            pairs.append((one, other))
    return pairs


def _model(commands: Sequence[Command]) -> str:
    return next(
        (str(_value(one)["model_id"]) for one in commands if one.operation == "create_model" and one.answers), ""
    )


def _has_answer(command: Command) -> bool:
    """Returns whether a command has an answer that is not an error. Other answers break another promise."""
    return bool(command.answers) and not command.answers[0].error


def _value(command: Command) -> dict[str, object]:
    return command.answers[0].value if command.answers else {}


def _difference(ours: object, theirs: object) -> float:
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    if len(ours) != len(theirs):
        return float("inf")
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
