"""Section F: images."""

import io
import struct

import numpy as np
import tinker
from PIL import Image
from tinker import types

from fovea_conformance.agreement import (
    PATIENCE_S,
    draw,
    expect_agree,
    expect_moved,
    forward_scores,
    outputs_of,
    prompt_scores,
    train,
)
from fovea_conformance.check import check, expect, expect_close, user_error
from fovea_conformance.pictures import (
    ASSISTANT,
    CONTRACT_TOKENS,
    END,
    START,
    USER,
    Example,
    Picture,
    asked_about,
    compose,
    image_chunk,
    image_tokens,
    naming,
    picture,
    user_mistake,
)
from fovea_conformance.target import Target


@check(
    "C100",
    "Cookbook vlm_classifier datum (Qwen3-VL) trains: lengths align, loss falls, last assistant tokens only",
    needs_images=True,
)
def c100_classifier(target: Target) -> str:
    """Trains six steps on two labelled images. loss:sum must cover the answers' tokens only, and must fall."""
    training = target.training()
    labelled = [(picture(target, 224, 224, 1), "daisy"), (picture(target, 150, 224, 2), "oak tree")]
    examples = [asked_about(target, image, label) for image, label in labelled]
    answers = [len(target.encode(f"{label}<|im_end|>")) for _, label in labelled]
    places = [range(len(one.ids) - count, len(one.ids)) for one, count in zip(examples, answers, strict=True)]
    data = [one.datum(at) for one, at in zip(examples, places, strict=True)]
    losses = []
    for _ in range(6):
        backward = training.forward_backward(data, "cross_entropy")
        taken = training.optim_step(types.AdamParams(learning_rate=3e-3))
        output = backward.result(PATIENCE_S)
        taken.result(PATIENCE_S)
        losses.append(output.metrics["loss:sum"])
        scores = outputs_of(output)
        lengths = [len(one) for one in scores]
        expect(lengths == [len(one.ids) - 1 for one in examples], f"logprobs of the lengths {lengths}")
        expect(all(bool(np.isfinite(one).all()) for one in scores), "a log-probability is not finite")
        wanted = -sum(sum(one[-count:]) for one, count in zip(scores, answers, strict=True))
        expect_close(losses[-1], wanted, 1e-3, "loss:sum of the answers' tokens")
    expect(losses[-1] < 0.9 * losses[0], f"the loss went {' '.join(f'{loss:.3f}' for loss in losses)}")
    return f"loss {losses[0]:.2f} to {losses[-1]:.2f} in 6 steps; lengths {lengths}"


@check("C101", "expected_tokens wrong by one fails with both numbers; absent is accepted", needs_images=True)
def c101_expected(target: Target) -> str:
    """Gives one token too few and one too many, in sampling and in training with targets of that number."""
    service = target.service()
    training, sampler = target.training(service), target.sampler(service).result(PATIENCE_S)
    image = picture(target, 224, 224)
    for wrong in (image.tokens - 1, image.tokens + 1):
        bad = asked_about(target, Picture(image.data, image.image_format, wrong))
        _expect_refused(sampler, training, bad.prompt, bad.datum(), str(wrong), str(image.tokens))
    _expect_works(sampler, training, asked_about(target, image, expected=False))
    return f"{image.tokens - 1} and {image.tokens + 1} instead of {image.tokens} fail; no number is accepted"


def _expect_works(sampler: tinker.SamplingClient, training: tinker.TrainingClient, example: Example) -> None:
    draw(sampler, example.prompt, max_tokens=1)
    forward_scores(training, [example.datum()])


def _expect_refused(
    sampler: tinker.SamplingClient,
    training: tinker.TrainingClient,
    prompt: types.ModelInput,
    datum: types.Datum,
    *words: str,
) -> None:
    """Expects a user error in sampling, and in training a failed future of category user, never an HTTP error."""
    with user_mistake(*words):
        draw(sampler, prompt, max_tokens=1)
    with user_error(*words):
        forward_scores(training, [datum])


@check("C102", "Token counts for 224x224, 150x224, 400x300 are 64, 70, 108", needs_images=True)
def c102_counts(target: Target) -> str:
    """Counts the log-probabilities of the prompt.

    Their number must be the contract's, or that of the model's processor.
    """
    sampler = target.sampler().result(PATIENCE_S)
    counts = {}
    for width, height in CONTRACT_TOKENS:
        image = picture(target, width, height)
        example = asked_about(target, image, expected=False)
        counts[width, height] = len(prompt_scores(sampler, example.prompt)) + 1 - len(example.ids) + image.tokens
        wanted = image_tokens(target.checkpoint, width, height)
        seen = counts[width, height]
        expect(seen == wanted, f"{width}x{height} takes {seen} tokens, the model's processor says {wanted}")
    family = "as the contract says" if list(counts.values()) == list(CONTRACT_TOKENS.values()) else "not a Qwen3-VL"
    return f"{', '.join(f'{width}x{height}: {count}' for (width, height), count in counts.items())}; {family}"


@check(
    "C103",
    "Same image prompt: sampler prompt logprobs equal trainer logprobs on the text after the image",
    needs_images=True,
)
def c103_agreement(target: Target) -> str:
    """Compares base weights, and then tuned ones. Another image must change the scores, or images are ignored."""
    service = target.service()
    training = target.training(service)
    examples = [asked_about(target, picture(target, 400, 300, seed), "a red square") for seed in (3, 4)]
    data = [one.datum() for one in examples]
    base = target.sampler(service).result(PATIENCE_S)
    first, second = (_after_image(one, prompt_scores(base, one.prompt)) for one in examples)
    largest = max(abs(a - b) for a, b in zip(first, second, strict=True))
    expect(largest > 1e-3, f"two images give the same scores, {largest:.1e} apart at most")
    far = [_compare(base, training, examples, "base weights")]
    fresh = forward_scores(training, data)
    train(training, data)
    tuned = training.save_weights_and_get_sampling_client().result(PATIENCE_S)
    expect_moved(fresh[0], forward_scores(training, data)[0], "the trainer's scores before and after two steps")
    far.append(_compare(tuned, training, examples, "tuned weights"))
    return f"largest difference {far[0]:.1e} base, {far[1]:.1e} tuned; two images are {largest:.2f} apart"


def _compare(
    sampler: tinker.SamplingClient, training: tinker.TrainingClient, examples: list[Example], what: str
) -> float:
    trained = forward_scores(training, [one.datum() for one in examples])
    return max(
        expect_agree(
            _after_image(one, prompt_scores(sampler, one.prompt)), _after_image(one, scores), f"{what}, after the image"
        )
        for one, scores in zip(examples, trained, strict=True)
    )


def _after_image(example: Example, scores: list[float]) -> list[float]:
    """Returns the scores of text after an image, from the scores of all positions but the first."""
    expect(len(scores) == len(example.ids) - 1, f"{len(scores)} scores, expected {len(example.ids) - 1}")
    return [scores[at - 1] for at in example.after_image]


@check(
    "C104",
    "Grey JPEG, PNG, two images, image first, image after long text all work; corrupt bytes and ratio above 200 fail",
    needs_images=True,
)
def c104_shapes(target: Target) -> str:
    """Compares sampler and trainer for each image. After the bad images, a good one must still work."""
    service = target.service()
    training, sampler = target.training(service), target.sampler(service).result(PATIENCE_S)
    grey = picture(target, 150, 224, 5, "L")
    png = picture(target, 224, 224, 6, kind="png")
    tail = f"{END}What is this?{ASSISTANT}a picture<|im_end|>"
    shapes = {
        "grey JPEG": asked_about(target, grey),
        "PNG": asked_about(target, png),
        "two images": compose(target, f"{USER}{START}", png, f"{END} and {START}", grey, tail),
        "image first": compose(target, grey, tail),
        "image after long text": compose(target, f"{USER}{'A long story. ' * 80}{START}", png, tail),
    }
    trained = forward_scores(training, [one.datum() for one in shapes.values()])
    far = 0.0
    for (name, example), scores in zip(shapes.items(), trained, strict=True):
        seen = _after_image(example, prompt_scores(sampler, example.prompt))
        far = max(far, expect_agree(seen, _after_image(example, scores), name))
    bad = {"corrupt bytes": b"\x89PNG\r\n\x1a\n" + b"\0" * 60, "ratio 201": _png(2010, 10)}
    for name, data in bad.items():
        example = asked_about(target, Picture(data, "png", 64), expected=False)
        with naming(name):
            _expect_refused(sampler, training, example.prompt, example.datum())
    _expect_works(sampler, training, shapes["PNG"])
    return f"5 shapes, sampler and trainer {far:.1e} apart at most; {' and '.join(bad)} fail as user errors"


def _png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "PNG")
    return out.getvalue()


@check("C105", "dmel or image on a text-only model, and image_asset_pointer, fail as user error")
def c105_unserved(target: Target) -> str:
    """Sends an audio chunk, an unreachable address and, to a text-only model, an image.

    A good prompt must work afterwards.
    """
    service = target.service()
    training, sampler = target.training(service), target.sampler(service).result(PATIENCE_S)
    text = types.EncodedTextChunk(tokens=target.tokens(6))
    unserved: dict[str, types.ModelInputChunk] = {"dmel": types.DmelChunk(dmel=_dmel(4, 8))}
    if not target.options.vlm:
        unserved["image"] = image_chunk(_png(224, 224), "png", 64)
    for name, chunk in unserved.items():
        model_input = types.ModelInput(chunks=[text, chunk, text])
        with naming(name):
            _expect_refused(sampler, training, model_input, _any_datum(model_input))
    address = types.ImageAssetPointerChunk(format="png", location="http://127.0.0.1:9/no.png", expected_tokens=64)
    pointed = types.ModelInput(chunks=[text, address, text])
    with naming("image_asset_pointer"), user_mistake():
        draw(sampler, pointed, max_tokens=1)
    draw(sampler, target.prompt(), max_tokens=1)
    forward_scores(training, [target.datum()])
    return f"{', '.join([*unserved, 'image_asset_pointer'])} fail as user errors, and the next prompt works"


def _any_datum(model_input: types.ModelInput) -> types.Datum:
    count = model_input.length
    inputs = {
        "target_tokens": types.TensorData([0] * count, "int64"),
        "weights": types.TensorData([0.0] * count, "float32"),
    }
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def _dmel(frames: int, bins: int) -> bytes:
    """Returns a TensorContainer with dtype 0, two dimensions and that many float32 zeros."""
    return bytes([0, 2, frames, bins]) + struct.pack(f"<{frames * bins}f", *[0.0] * (frames * bins))
