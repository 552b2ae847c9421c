"""The model reads exactly the client's input."""

import tinker
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import PromptBuilder, image_chunk, max_difference, picture


def test_several_text_chunks_equal_one(base_sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("<|im_start|>user\nWhat colour is the sky?<|im_end|>\n", add_special_tokens=False)
    whole = tinker.ModelInput.from_ints(ids)
    cut = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=part) for part in (ids[:1], ids[1:5], [], ids[5:])])
    assert base_sampler.compute_logprobs(cut).result() == base_sampler.compute_logprobs(whole).result()


def test_a_red_and_a_blue_square_differ(
    base_sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    builder = PromptBuilder(tokenizer)
    scores = {
        color: base_sampler.compute_logprobs(
            builder.build(
                "<|im_start|>user\n<|vision_start|>",
                (picture(224, 224, color=color), 64),
                "<|vision_end|>What colour is the square?<|im_end|>\n<|im_start|>assistant\nred",
            ).model_input
        ).result()
        for color in ("red", "blue")
    }
    assert max_difference(scores["red"][1:], [value or 0.0 for value in scores["blue"][1:]]) > 0.05


def test_the_same_picture_as_png_and_again_scores_the_same(
    base_sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<|vision_start|>", "<|vision_end|>a"))
    prompt = tinker.ModelInput(
        chunks=[
            tinker.EncodedTextChunk(tokens=start),
            image_chunk(picture(300, 200, 5)),
            tinker.EncodedTextChunk(tokens=end),
        ]
    )
    assert base_sampler.compute_logprobs(prompt).result() == base_sampler.compute_logprobs(prompt).result()
