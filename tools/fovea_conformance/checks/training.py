"""Section E: shapes, metrics, chunks, accumulation and errors of forward and forward_backward."""

import time
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from fovea_conformance import raw_training
from fovea_conformance.check import check, expect, expect_close, user_error
from fovea_conformance.formulas import loss_and_gradient
from fovea_conformance.gradients import Output, largest_difference, logprobs_of, meter, surrogate, tensor
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.target import Target, loss_message

_ZSTD = {"Content-Encoding": "zstd"}
_SAME = 1e-5


def long_tensor(values: Any) -> types.TensorData:
    """Converts an array to an int64 tensor."""
    return types.TensorData.from_numpy(np.asarray(values, np.int64))


def many_targets(target: Target, count: int, per_position: int, seed: int = 0, dense: bool = True) -> types.Datum:
    """Returns a datum with [N, K] targets and weights.

    Target 0 has a weight in column 0, and a third of the cells have no weight.

    The tensors are dense, or torch tensors that the SDK stores as CSR.
    """
    random = np.random.default_rng(seed)
    tokens = target.tokens(count, seed)
    pool = target.tokens(40, seed + 1)
    ids = random.choice(pool, (count, per_position)).astype(np.int64)
    weights = random.uniform(0.1, 1, (count, per_position)).astype(np.float32)
    weights[:, per_position // 3 :] = 0
    ids[:, per_position // 3 :] = 0
    ids[:, 0] = 0
    given: dict[str, Any] = {"target_tokens": torch.from_numpy(ids), "weights": torch.from_numpy(weights)}
    if dense:
        given = {"target_tokens": long_tensor(ids), "weights": types.TensorData.from_numpy(weights)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)


@check("C78", "A forward_backward body compressed by zstd decodes the same as uncompressed; a zstd bomb is refused")
def c78_zstd(target: Target) -> str:
    """Runs the same forward pass in both encodings.

    Then sends 131 kB that decompress to 4 GiB, which must give a 4xx with a body soon.
    """
    model_id = target.raw_model(target.session())
    data = [target.datum(12, seed) for seed in range(2)]
    plain = raw_training.run(target, loss_message(model_id, 1, data))
    packed = target.send_loss(raw_training.zstd(loss_message(model_id, 2, data)), **_ZSTD)
    expect(packed.status_code == 200, f"zstd was answered {packed.status_code}: {packed.text[:200]}")
    result = target.poll(packed.json()["request_id"], accept=raw_training.PROTOBUF)
    outputs = [_output(plain), _output(proto.ForwardBackwardOutput.FromString(result.content))]
    difference = largest_difference(*(logprobs_of(output) for output in outputs))
    expect(difference <= _SAME, f"logprobs of the two encodings differ by {difference:.3g}")
    begun = time.monotonic()
    bomb = target.send_loss(raw_training.zstd_bomb(), **_ZSTD)
    took = time.monotonic() - begun
    refused = 400 <= bomb.status_code < 500 and bomb.status_code not in (408, 409, 429) and bool(bomb.content)
    expect(refused, f"the bomb was answered {bomb.status_code} {bomb.text[:100]!r}")
    expect(took < 30, f"the bomb was refused only after {took:.0f} s")
    expect(target.http.get("healthz").status_code == 200, "healthz fails after the bomb")
    return f"same logprobs; the bomb was answered {bomb.status_code} after {took:.2f} s"


def _output(result: Any) -> Output:
    expect(not isinstance(result, dict), f"forward_backward failed: {result}")
    return deserialize_forward_backward_output(result.SerializeToString())


@check("C84", "logprobs output per datum has the shape of target_tokens, [N] and [N,K]")
def c84_shapes(target: Target) -> str:
    """Sends datums of different lengths with 1-D and 2-D targets, together and separately.

    All results must be finite, also with weights of 0.
    """
    training = target.training()
    data = [target.datum(12), many_targets(target, 7, 6), target.datum(5, 1), many_targets(target, 9, 4, 2)]
    wanted = [[12], [7, 6], [5], [9, 4]]
    for send in (training.forward, training.forward_backward):
        mixed = send(data, "cross_entropy").result(120)
        shapes = [list(one.shape) for one in logprobs_of(mixed)]
        expect(shapes == wanted, f"shapes {shapes}, expected {wanted}")
        finite = all(bool(np.isfinite(one).all()) for one in logprobs_of(mixed))
        expect(finite, "a logprob is not finite")
        alone = [logprobs_of(send([datum], "cross_entropy").result(120))[0] for datum in data]
        difference = largest_difference(logprobs_of(mixed), alone)
        expect(difference <= 1e-3, f"a datum's logprobs differ by {difference:.3g} between one call and its own")
    return f"shapes {shapes}, in input order, all finite"


@check("C85", "Sparse [N,K] targets containing token id 0 give the same loss as dense")
def c85_sparse(target: Target) -> str:
    """Uses CSR that the SDK makes of torch tensors, in which a weighted id 0 is implicit.

    Loss and logprobs must be the same, and the gradient must cancel against the dense one.
    """
    dense, sparse = (many_targets(target, 10, 12, dense=dense) for dense in (True, False))
    expect(sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None, "the SDK did not make CSR")
    gauge = meter(target.training(), [target.datum(10)])
    outputs = [gauge.training.forward([one], "cross_entropy").result(120) for one in (dense, sparse)]
    expect_close(outputs[1].metrics["loss:sum"], outputs[0].metrics["loss:sum"], 1e-5, "loss:sum of sparse targets")
    difference = largest_difference(logprobs_of(outputs[0]), logprobs_of(outputs[1]))
    expect(difference <= _SAME, f"logprobs differ by {difference:.3g}")
    opposite = surrogate([dense], [-dense.loss_fn_inputs["weights"].to_numpy().astype(np.float64)])

    def alone() -> None:
        gauge.training.forward_backward([sparse], "cross_entropy").result(120)

    def both() -> None:
        alone()
        gauge.training.forward_backward(opposite, "cross_entropy").result(120)

    left = gauge.expect_nothing_left(both, alone, "sparse against dense")
    return f"loss:sum {outputs[0].metrics['loss:sum']:.4f} for both; {left}"


@check("C86", "Negative and large weights are used unscaled")
def c86_weights(target: Target) -> str:
    """Compares loss:sum with weights from -3 to 1000.

    A gradient of weights 1000u must cancel against four of weights -250u.
    """
    gauge = meter(target.training(), [target.datum(12)])
    data = [target.datum(12)]
    pattern = np.tile([1000.0, -3.0, 0.0, 250.0], 3)
    output = gauge.training.forward_backward(surrogate(data, [pattern]), "cross_entropy").result(120)
    wanted, _ = loss_and_gradient("cross_entropy", logprobs_of(output), [{"weights": pattern}], {})
    expect_close(output.metrics["loss:sum"], wanted, 1e-4, "loss:sum with weights -3 to 1000")
    gauge.step()

    def send(weights: NDArray[np.float64], times: int = 1) -> None:
        for _ in range(times):
            gauge.training.forward_backward(surrogate(data, [weights]), "cross_entropy").result(120)

    unit = pattern / 1000

    def both() -> None:
        send(1000 * unit)
        send(-250 * unit, 4)

    left = gauge.expect_nothing_left(both, lambda: send(1000 * unit), "1000u against 4 times -250u")
    return f"loss:sum {wanted:.2f} as computed; {left}"


@check("C87", "All metric keys have exactly one colon; loss:sum always present, also for forward")
def c87_metric_keys(target: Target) -> str:
    """Reads the raw protobuf responses of forward and forward_backward, for cross_entropy and importance_sampling."""
    model_id = target.raw_model(target.session())
    plain = [target.datum(12, seed) for seed in range(2)]
    first = _output(raw_training.run(target, loss_message(model_id, 1, plain)))
    policy = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "logprobs": tensor(logprobs),
                "advantages": tensor(np.ones_like(logprobs)),
            },
        )
        for datum, logprobs in zip(plain, logprobs_of(first), strict=True)
    ]
    seen: set[str] = set()
    cases = [(loss, only) for loss in ("cross_entropy", "importance_sampling") for only in (True, False)]
    for seq_id, (loss, only) in enumerate(cases, 2):
        message = loss_message(model_id, seq_id, plain if loss == "cross_entropy" else policy, loss)
        message.forward_only = only
        result = raw_training.run(target, message)
        expect(not isinstance(result, dict), f"{loss} failed: {result}")
        bad = [key for key in result.metrics if key.count(":") != 1]
        expect(not bad, f"{loss}: keys without exactly one colon: {bad}")
        expect("loss:sum" in result.metrics, f"{loss}, forward_only {only}: no loss:sum among {list(result.metrics)}")
        seen |= set(result.metrics)
    return f"keys {sorted(seen)}"


@check("C88", "3-chunk call: loss:sum is the sum, :mean keys weighted by datum count, outputs in input order")
def c88_chunks(target: Target) -> str:
    """Compares five datums in chunks of two, forced by a client flag, with one chunk.

    The SDK must join the three responses datum for datum.
    """
    proxy = target.proxy({"fwdbwd_max_chunk_len": 2})
    data = [target.datum(8 + 2 * seed, seed) for seed in range(5)]
    chunked = target.training(target.service(proxy)).forward_backward(data, "cross_entropy").result(120)
    whole = target.training().forward_backward(data, "cross_entropy").result(120)
    answers = _answers(proxy)
    counts = [len(answer.loss_fn_outputs) for answer in answers]
    expect(sorted(counts) == [1, 2, 2], f"the chunks answered for {counts} data, expected 2, 2 and 1")
    total = sum(answer.metrics["loss:sum"] for answer in answers)
    expect_close(chunked.metrics["loss:sum"], total, 1e-6, "the call's loss:sum against the sum of its chunks")
    expect_close(total, whole.metrics["loss:sum"], 1e-4, "the chunks' loss:sum against that of one chunk")
    means = [key for key in answers[0].metrics if key.endswith(":mean") and key in chunked.metrics]
    for key in means:
        weighted = sum(count * answer.metrics[key] for count, answer in zip(counts, answers, strict=True)) / 5
        expect_close(chunked.metrics[key], weighted, 1e-6, f"{key} against its weighted mean")
    difference = largest_difference(logprobs_of(chunked), logprobs_of(whole))
    expect(difference <= 1e-3, f"the outputs differ from those of one chunk by {difference:.3g}: wrong order?")
    return f"3 chunks, loss:sum {total:.4f}, {len(means)} :mean keys, outputs within {difference:.1e}"


def _answers(proxy: Proxy) -> list[Output]:
    """Returns the forward_backward results in the proxy."""

    def decoded(one: Exchange) -> bytes:
        return httpx.Response(one.status, headers=one.answer_headers, content=one.answer).content

    finished = [one for one in proxy.of("retrieve_future") if "protobuf" in one.answer_headers.get("content-type", "")]
    return [deserialize_forward_backward_output(decoded(one)) for one in finished]


@check("C89", "Two forward_backward calls then one optim_step equals one call with both batches")
def c89_accumulation(target: Target) -> str:
    """Checks that the gradients of A and of B cancel against one call with both and negative weights."""
    first, second = ([target.datum(12, seed)] for seed in range(2))
    gauge = meter(target.training(), first + second)
    opposite = surrogate(first + second, [-np.ones(12)] * 2)
    train = gauge.training.forward_backward

    def both() -> None:
        futures = [train(part, "cross_entropy") for part in (first, second, opposite)]
        for future in futures:
            future.result(120)

    return gauge.expect_nothing_left(both, lambda: train(first, "cross_entropy").result(120), "A, B and minus both")


@check("C90", "forward leaves gradients and weights untouched")
def c90_forward(target: Target) -> str:
    """Sends a forward between a gradient and its negative. It must neither clear the first nor add a gradient."""
    data, other = [target.datum(12)], [target.datum(12, 1)]
    gauge = meter(target.training(), data + other)
    train, opposite = gauge.training.forward_backward, surrogate(data, [-np.ones(12)])

    def between() -> None:
        futures = [
            train(data, "cross_entropy"),
            gauge.training.forward(other, "cross_entropy"),
            train(opposite, "cross_entropy"),
            gauge.training.forward(other, "cross_entropy"),
        ]
        for future in futures:
            future.result(120)

    left = gauge.expect_nothing_left(between, lambda: train(data, "cross_entropy").result(120), "forward in between")
    before = gauge.look()
    gauge.training.forward(other, "cross_entropy").result(120)
    change = largest_difference(before, gauge.look())
    expect(change <= _SAME, f"a forward changed logprobs by {change:.3g}")
    return f"{left}; logprobs after a forward differ by {change:.1e}"


@check("C97", "unknown loss_fn, missing inputs or wrong lengths fail as user error naming the field")
def c97_bad_input(target: Target) -> str:
    """Sends bad requests.

    Each must give a failed future of category user with a message about the error, and the model must still work.

    cross_entropy without weights is not an error: as in the SDK's examples, each target then counts once.
    """
    training = target.training()
    good = target.datum(12)
    weights, targets = good.loss_fn_inputs["weights"], good.loss_fn_inputs["target_tokens"]
    short = types.TensorData.from_numpy(np.ones(9, np.float32))
    full = types.TensorData.from_numpy(np.ones(12, np.float32))
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("no_such_loss", {"target_tokens": targets, "weights": weights}, "no_such_loss"),
        ("cross_entropy", {"weights": weights}, "target_tokens"),
        ("cross_entropy", {"target_tokens": targets, "weights": short}, "weights"),
        ("cross_entropy", {"target_tokens": long_tensor(target.tokens(14)), "weights": weights}, "target_tokens"),
        ("importance_sampling", {"target_tokens": targets, "logprobs": full}, "advantages"),
        ("importance_sampling", {"target_tokens": targets, "logprobs": short, "advantages": full}, "logprobs"),
    ]
    for loss, inputs, word in cases:
        datum = types.Datum(model_input=good.model_input, loss_fn_inputs=inputs)
        with user_error(word):
            training.forward_backward([datum], loss).result(120)  # type: ignore[arg-type]
    plain = types.Datum(model_input=good.model_input, loss_fn_inputs={"target_tokens": targets})
    after = training.forward([plain], "cross_entropy").result(120)
    wanted = -float(sum(one.sum() for one in logprobs_of(after)))
    expect_close(after.metrics["loss:sum"], wanted, 1e-4, "loss:sum without weights, after the errors")
    return f"{len(cases)} requests are refused; the model still works, and missing weights count as 1"


@check("C99", "A 2000-datum, 30 MB batch with default flags completes", timeout_s=600)
def c99_large_batch(target: Target) -> str:
    """Sends datums of four positions with 320 targets each, many bytes with little computation.

    Recomputes loss:sum from the returned logprobs.
    """
    training = target.training()
    pool = np.asarray(sorted(set(target.tokens(60))), np.int64)
    ids = np.random.default_rng(3).choice(pool, (2000, 4, 320))
    weights = types.TensorData.from_numpy(np.full((4, 320), 1 / 320, np.float32))
    inputs = [types.ModelInput.from_ints(target.tokens(4, seed % 50)) for seed in range(2000)]
    data = [
        types.Datum(model_input=one, loss_fn_inputs={"target_tokens": long_tensor(targets), "weights": weights})
        for one, targets in zip(inputs, ids, strict=True)
    ]
    begun = time.monotonic()
    output = training.forward_backward(data, "cross_entropy").result(580)
    took = time.monotonic() - begun
    logprobs = logprobs_of(output)
    expect(len(logprobs) == 2000, f"{len(logprobs)} outputs for 2000 data")
    wanted = -sum(float(one.sum()) for one in logprobs) / 320
    expect_close(output.metrics["loss:sum"], wanted, 1e-3, "loss:sum")
    training.optim_step(types.AdamParams()).result(120)
    return f"{2000 * 4 * 320 * 12 / 1e6:.0f} MB in {took:.1f} s"
