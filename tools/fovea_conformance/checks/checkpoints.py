"""Section G: checkpoints and the REST calls about them."""

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import tinker
from tinker import types

from fovea_conformance.check import check, expect, may_refuse, user_error
from fovea_conformance.gradients import Arrays, largest_difference, logprobs_of, warmed_up
from fovea_conformance.target import Target, unique_name

_SAME = 1e-5
_QUICK_S = 20.0
"""Seconds. A later refusal came only after retries of the SDK."""
_HOUR_S = 3600


def look(training: tinker.TrainingClient, data: Sequence[types.Datum]) -> Arrays:
    """Returns the current log-probabilities."""
    return logprobs_of(training.forward(list(data), "cross_entropy").result(120))


def take_step(training: tinker.TrainingClient, data: Sequence[types.Datum], adam: types.AdamParams) -> None:
    """Takes one step of cross-entropy on the datums."""
    training.forward_backward(list(data), "cross_entropy")
    training.optim_step(adam).result(120)


def checkpoint_of(rest: tinker.RestClient, path: str) -> types.Checkpoint | None:
    """Returns the entry of a path in its run's listing, as the CLI finds it; None if it is not listed."""
    run = types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    listed = rest.list_checkpoints(run).result(60).checkpoints
    return next((one for one in listed if one.tinker_path == path), None)


def known(rest: tinker.RestClient, path: str) -> types.Checkpoint:
    """Returns the entry of a path. Raises Failed if the run does not list it."""
    entry = checkpoint_of(rest, path)
    expect(entry is not None, f"{path} is not listed by its run")
    assert entry is not None
    return entry


def expect_no_load(service: tinker.ServiceClient, path: str, why: str) -> None:
    """Expects that loading ends in an error within seconds."""
    begun = time.monotonic()
    try:
        service.create_training_client_from_state(path).result(60)
    except (tinker.RequestFailedError, tinker.APIStatusError):
        took = time.monotonic() - begun
        expect(took < _QUICK_S, f"loading a checkpoint that {why} failed only after {took:.0f} s")
        return
    expect(False, f"a checkpoint that {why} still loads")


@check("C106", "save_state then create_training_client_from_state: same logprobs, fresh optimizer")
def c106_load(target: Target) -> str:
    """Compares logprobs before and after loading.

    Then two loaded models take one step with different betas. The first step of Adam depends on the betas only if
    moments or step count are not zero.
    """
    service = target.service()
    data = [target.datum(12, seed) for seed in range(2)]
    training = warmed_up(target.training(service), data)
    saved = look(training, data)
    path = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    loaded = [service.create_training_client_from_state(path).result(120) for _ in range(2)]
    difference = largest_difference(saved, look(loaded[0], data))
    expect(difference <= _SAME, f"logprobs differ by {difference:.3g} after loading")
    for client, betas in zip(loaded, ((0.9, 0.95), (0.3, 0.5)), strict=True):
        adam = types.AdamParams(learning_rate=5e-3, beta1=betas[0], beta2=betas[1], eps=1e-3)
        take_step(client, data, adam)
    first, second = (look(client, data) for client in loaded)
    move, apart = largest_difference(saved, first), largest_difference(first, second)
    expect(move > 1e-3, f"a step after loading moves logprobs only by {move:.3g}")
    expect(
        apart <= 0.01 * move, f"the optimizer is not fresh: betas change its first step by {apart:.3g} of {move:.3g}"
    )
    return f"logprobs within {difference:.1e}; first steps with other betas within {apart / move:.1e} of a step"


@check("C107", "..._with_optimizer: the next two steps equal an uninterrupted run bit-close")
def c107_resume(target: Target) -> str:
    """Compares two further steps with two steps after loading. Loading without the optimizer must give a difference."""
    service = target.service()
    data = [target.datum(12, seed) for seed in range(2)]
    adam = types.AdamParams(learning_rate=5e-3)
    training = target.training(service)
    for _ in range(2):
        take_step(training, data, adam)
    path = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    resumed = service.create_training_client_from_state_with_optimizer(path).result(120)
    forgetful = service.create_training_client_from_state(path).result(120)
    clients = (training, resumed, forgetful)
    for client in clients:
        for _ in range(2):
            take_step(client, data, adam)
    through, after, fresh = (look(client, data) for client in clients)
    difference, control = largest_difference(through, after), largest_difference(through, fresh)
    expect(difference <= _SAME, f"two steps after loading differ from the uninterrupted run by {difference:.3g}")
    expect(control > 10 * _SAME, f"a fresh optimizer makes no difference ({control:.3g}): the check proves nothing")
    return f"within {difference:.1e}; with a fresh optimizer {control:.1e} apart"


@check("C108", "save_state name clash: quick clear error without overwrite, replacement with overwrite")
def c108_clash(target: Target) -> str:
    """Expects a user error within seconds that leaves the model working. Overwriting replaces weights and metadata."""
    service = target.service()
    rest = target.rest()
    data = [target.datum(12)]
    training, name = warmed_up(target.training(service), data), unique_name("state")
    first = training.save_state(name, user_metadata={"kept": "no", "step": "1"}).result(120).path
    old = look(training, data)
    take_step(training, data, types.AdamParams(learning_rate=5e-3))
    new = look(training, data)
    begun = time.monotonic()
    with user_error(name):
        training.save_state(name).result(360)
    took = time.monotonic() - begun
    expect(took < _QUICK_S, f"the clash was answered only after {took:.0f} s")
    second = training.save_state(name, overwrite=True, user_metadata={"step": "2"}).result(120).path
    expect(first == second, f"overwrite went to {second} instead of {first}")
    metadata = known(rest, second).user_metadata
    expect(metadata == {"step": "2"}, f"user_metadata after overwrite is {metadata}")
    loaded = look(service.create_training_client_from_state(second).result(120), data)
    stale, difference = largest_difference(loaded, old), largest_difference(loaded, new)
    expect(difference <= _SAME < stale, f"loads weights {difference:.3g} off the new and {stale:.3g} off the old ones")
    rest.delete_checkpoint_from_tinker_path(second).result(60)
    return f"clash refused after {took:.2f} s; overwrite replaced weights and metadata"


@check("C109", "ttl below 3600 refused; expired checkpoint vanishes and no longer loads; null removes the expiry")
def c109_ttl(target: Target) -> str:
    """Checks the limits at saving and with PUT, and compares expires_at with the clock.

    The shortest life in the contract is an hour, so the check does not wait for the end, but only reads it in the
    listing.
    """
    service = target.service()
    rest, training = target.rest(), target.training(service)
    with user_error("ttl"):
        training.save_state(unique_name("state"), ttl_seconds=60).result(60)
    path = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    at_saving = _life(known(rest, path))
    expect(abs(at_saving - _HOUR_S) < 120, f"saved with an hour to live, expires in {at_saving:.0f} s")
    for seconds in (60, 3599, 11 * 365 * 24 * 3600):
        answer = target.http.put(_route(path, "ttl"), json={"ttl_seconds": seconds})
        refused = 400 <= answer.status_code < 500 and answer.status_code not in (404, 408, 409, 429)
        expect(refused and bool(answer.content), f"ttl_seconds {seconds} was answered {answer.status_code}")
    rest.set_checkpoint_ttl_from_tinker_path(path, 2 * _HOUR_S).result(60)
    by_put = _life(known(rest, path))
    expect(abs(by_put - 2 * _HOUR_S) < 120, f"set to two hours, expires in {by_put:.0f} s")
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(60)
    kept = known(rest, path).expires_at
    expect(kept is None, f"null did not remove the expiry: {kept}")
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    return f"60, 3599 and 11 years refused; expiry in {at_saving:.0f} s, then {by_put:.0f} s, then never (none awaited)"


def _life(checkpoint: types.Checkpoint) -> float:
    expect(checkpoint.expires_at is not None, f"{checkpoint.tinker_path} has no expires_at")
    assert checkpoint.expires_at is not None
    expect(checkpoint.expires_at.tzinfo is not None, f"expires_at {checkpoint.expires_at} has no offset")
    return (checkpoint.expires_at - datetime.now(UTC)).total_seconds()


def _route(path: str, action: str) -> str:
    run, segment, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{segment}/{name}/{action}"


@check("C110", "list, get, delete, publish, unpublish, ttl work with `weights/x` ids and colon run ids")
def c110_rest(target: Target) -> str:
    """Calls RestClient for both types. Publishing twice is not an error. Deleted weights neither load nor sample."""
    service = target.service()
    rest, training = target.rest(), target.training(service)
    state = training.save_state(unique_name("state")).result(120).path
    weights = training.save_weights_for_sampler(unique_name("weights")).result(120).path
    run = rest.get_training_run_by_tinker_path(state).result(60)
    expect(run.training_run_id == training.model_id, f"run {run.training_run_id}, expected {training.model_id}")
    listed = {one.tinker_path for one in rest.list_user_checkpoints(limit=1000).result(60).checkpoints}
    for path, kind, segment in ((state, "training", "weights"), (weights, "sampler", "sampler_weights")):
        entry = known(rest, path)
        expect(entry.checkpoint_type == kind, f"{path} has type {entry.checkpoint_type}, expected {kind}")
        wanted = f"{segment}/{path.rsplit('/', 1)[1]}"
        expect(entry.checkpoint_id == wanted, f"checkpoint_id {entry.checkpoint_id}, expected {wanted}")
        expect(entry.time.tzinfo is not None, f"time {entry.time} has no offset")
        expect(path in listed, f"{path} is not among the user's checkpoints")
        _publish_and_back(rest, path)
        rest.set_checkpoint_ttl_from_tinker_path(path, _HOUR_S).result(60)
        _life(known(rest, path))
        rest.delete_checkpoint_from_tinker_path(path).result(60)
        expect(checkpoint_of(rest, path) is None, f"{path} is still listed after its deletion")
    expect_no_load(service, state, "was deleted")
    _expect_no_sample(target, service, weights)
    return f"both kinds of {run.training_run_id}: listed, published twice and unpublished, ttl, deleted and gone"


def _publish_and_back(rest: tinker.RestClient, path: str) -> None:
    for action, public in ((rest.publish_checkpoint_from_tinker_path, True),) * 2 + (
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        begun = time.monotonic()
        try:
            action(path).result(60)
        except TimeoutError:
            expect(False, f"publishing or unpublishing {path} stalls: answered with a retryable status?")
        expect(time.monotonic() - begun < _QUICK_S, "publishing took too long")
        expect(known(rest, path).public is public, f"public is {not public}, expected {public}")


def _expect_no_sample(target: Target, service: tinker.ServiceClient, path: str) -> None:
    try:
        sampling = service.create_sampling_client(model_path=path).result(60)
        sampling.sample(target.prompt(), 1, types.SamplingParams(max_tokens=2)).result(60)
    except (tinker.RequestFailedError, tinker.APIStatusError):
        return
    expect(False, "deleted sampler weights still sample")


@check("C111", "training run returns user_metadata and last checkpoints; cursor.total_count right with offset")
def c111_run(target: Target) -> str:
    """Reads a run with renderer_name and one checkpoint of each type, and pages at offsets 0, 1 and past the end."""
    service = target.service()
    rest = target.rest()
    metadata = {"renderer_name": "some_renderer", "note": "a b"}
    training = target.training(service, rank=4, user_metadata=metadata)
    target.training(service, rank=4)
    state = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    weights = training.save_weights_for_sampler(unique_name("weights"), ttl_seconds=_HOUR_S).result(120).path
    run = rest.get_training_run(training.model_id).result(60)
    expect(run.user_metadata == metadata, f"user_metadata {run.user_metadata}, expected {metadata}")
    expect(run.is_lora and run.lora_rank == 4, f"is_lora {run.is_lora}, lora_rank {run.lora_rank}")
    expect(run.base_model == target.model, f"base_model {run.base_model}")
    for last, path in ((run.last_checkpoint, state), (run.last_sampler_checkpoint, weights)):
        expect(last is not None and last.tinker_path == path, f"last checkpoint is {last}, expected {path}")
    return f"metadata and both last checkpoints; {_pages(rest)}"


def _pages(rest: tinker.RestClient) -> str:
    # Runs may be made meanwhile, by other checks or users.
    for _ in range(5):
        pages = [rest.list_training_runs(limit=1, offset=offset).result(60) for offset in (0, 1)]
        total = pages[0].cursor.total_count
        past = rest.list_training_runs(limit=1, offset=total + 1000).result(60)
        totals = {page.cursor.total_count for page in (*pages, past)}
        ids = [one.training_run_id for page in pages for one in page.training_runs]
        if len(totals) == 1 and total >= 2 and len(set(ids)) == 2 and not past.training_runs:
            expect([page.cursor.offset for page in pages] == [0, 1], "cursor.offset is not what was asked for")
            return f"total_count {total} at every offset"
    expect(False, f"limit 1 at offsets 0 and 1 gives runs {ids}, totals {sorted(totals)}, past the end {past}")
    return ""


@check("C112", "weights_info returns rank and train_* flags for weights and sampler paths")
def c112_weights_info(target: Target) -> str:
    """Reads both checkpoints of a model with rank 4 and one flag off."""
    service = target.service()
    rest = target.rest()
    training = target.training(service, rank=4, train_unembed=False)
    paths = [
        training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path,
        training.save_weights_for_sampler(unique_name("weights"), ttl_seconds=_HOUR_S).result(120).path,
    ]
    for path in paths:
        info = rest.get_weights_info_by_tinker_path(path).result(60)
        seen = (info.base_model, info.is_lora, info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed)
        wanted = (target.model, True, 4, True, True, False)
        expect(seen == wanted, f"{path}: {seen}, expected {wanted}")
    return "rank 4, attn and mlp on, unembed off, for both paths"


@check("C116", "load_state right after create works; later use gives a clear error or works, never a hang")
def c116_load_state(target: Target) -> str:
    """Makes the deprecated call as a model's first request, and again after a step."""
    service = target.service()
    data = [target.datum(12)]
    saved = warmed_up(target.training(service), data)
    wanted = look(saved, data)
    path = saved.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    fresh = target.training(service, seed=99)
    with may_refuse():
        _load_state(fresh, path)
    difference = largest_difference(wanted, look(fresh, data))
    expect(difference <= _SAME, f"logprobs differ by {difference:.3g} after load_state")
    take_step(fresh, data, types.AdamParams(learning_rate=5e-3))
    said = _attempt(lambda: _load_state(fresh, path))
    if said:
        expect(bool(look(fresh, data)), "the model does not go on after the refusal")
        return f"first: logprobs within {difference:.1e}; later: refused, {said[:120]}"
    again = largest_difference(wanted, look(fresh, data))
    expect(again <= _SAME, f"later: accepted, but logprobs differ by {again:.3g}")
    return f"first: logprobs within {difference:.1e}; later: within {again:.1e}"


def _load_state(training: tinker.TrainingClient, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.load_state(path).result(60)


def _attempt(action: Callable[[], object]) -> str:
    """Returns the message of a user error; empty if the action succeeded."""
    try:
        action()
    except tinker.RequestFailedError as error:
        expect(error.category == tinker.types.RequestErrorCategory.User, f"category {error.category}: {error}")
        return str(error)
    return ""
