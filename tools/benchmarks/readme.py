"""Compares the README's numbers with the files of results, or writes them: `python -m benchmarks.readme [--write]`."""

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_H200 = "h200x4-4b-2026-11-22.jsonl"
_DEMO = "demo-2cores-2026-11-30.jsonl"
"""The results file of `make demo`; demo/result.json has the same figures."""
_WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|fifty|hundreds?|thousands?|millions?"
UNMEASURED = {
    "Python 3.11 and 8 GB of disk": "a requirement",
    "only 6 GiB of memory": "a requirement",
    "CUDA 13": "a requirement",
    "a 2B model needs 20 GiB, a 4B model 32 GiB and an 8B model 64 GiB": "`fovea plan` computes it",
    "21,700 tokens/s | an expert's plain loop (transformers, PEFT): 10,900 tokens/s with padded and sorted batches, "
    "14,000 to 14,400 with packed ones": "an audit of 2026-11-28 left no line of results: docs/lab/performance.md",
    "Training is 2.0 times as fast as the padded loop and 1.5 times as fast as the packed one": "the same audit",
    "our target: 0.1 s": "a target",
    "in ten lines": "the call in examples/fine_tune.ipynb",
    "it trains ten steps on images": "a default of examples/first_model.py",
    "1 of 12 reaches the goal, then 12 of 12": "the picture shows it",
    "less than 1e-3 in float32": "the bound of tests/e2e/test_agreement.py",
    "a model of the 4B shape": "a name",
    "measured on H200s": "a name",
    "http://127.0.0.1:8000/": "an address",
    "127.0.0.1": "an address",
    "x86-64": "a name",
    "LFM2-VL": "a name",
    "All rows use bfloat16": "a name",
}
"""Phrases with numbers that no file of results has, and the reason."""


def claims() -> dict[str, list[str]]:
    """Returns the README's phrases with measured numbers, `{}` in place of each, and the numbers of the results."""
    sampling = _line(_H200, "sampler.tokens.grpc", kind="text", in_flight=256)
    pushing = _line(_H200, "push.first_token", rank=32, model="/tmp/shapes/4b")
    demo = _line(_DEMO, "demo.accuracy")
    games = [
        each for each in json.loads((ROOT / "examples/results.json").read_text()) if each["example"] == "rl_gridworld"
    ]
    before, after = max(each["before"] for each in games), min(each["after"] for each in games)
    minutes = sorted(each["seconds"] / 60 for each in games)
    return {
        "through the Tinker SDK; about {} minutes": [f"{_line(_DEMO, 'demo.seconds')['value'] / 60:.0f}"],
        "held-out accuracy rises from {} to {}": [f"{each:.2f}" for each in (demo["sizes"]["before"], demo["value"])],
        "256 requests in flight | {} tokens/s | {} tokens/s: vLLM's own engine": [
            f"{round(sampling[name], -1):,.0f}" for name in ("value", "reference")
        ],
        "first token of the new adapter (rank 32) | {} s": [f"{pushing['value']:.3f}"],
        "runs {} checks against any server": [str(_count("conformance.json"))],
        "{} model families have been compared": [str(_count("models.json"))],
        "the episodes that reach the goal from at most {} % to {} %, in {} to {} minutes": [
            f"{each:.0f}" for each in (100 * before, 100 * after, minutes[0], minutes[-1])
        ],
    }


def undeclared(text: str) -> list[str]:
    """Returns the numbers of the README that neither `claims` nor `UNMEASURED` has, in digits or words.

    Code and links are left out; comments of code and descriptions of pictures are not.
    """
    for phrase in claims():
        text = _pattern(phrase).sub("", text)
    text = re.sub(r"^```.*?^```", lambda block: "\n".join(re.findall(r"# .*", block[0])), text, flags=re.M | re.S)
    text = " ".join(re.sub(r"`[^`\n]*`|\]\([^)]*\)|^\d\. ", "", text, flags=re.M).split())
    for phrase in UNMEASURED:
        if phrase not in text:
            raise SystemExit(f"README.md no longer has {phrase!r}: take it out of UNMEASURED")
        text = text.replace(phrase, "")
    return re.findall(rf"\S*\d\S*|\b(?:{_WORDS})\b", text)


def written(text: str) -> str:
    """Returns the README with the numbers of the results."""
    for phrase, numbers in claims().items():
        if len(_pattern(phrase).findall(text)) != 1:
            raise SystemExit(f"README.md must have once: {phrase}")
        text = _pattern(phrase).sub(partial(_filled, numbers), text)
    return text


def _filled(numbers: list[str], found: re.Match[str]) -> str:
    text = found[0]
    for group in reversed(range(len(numbers))):
        first, end = (at - found.start() for at in found.span(group + 1))
        text = text[:first] + numbers[group] + text[end:]
    return text


def _pattern(phrase: str) -> re.Pattern[str]:
    """Returns a pattern with a group for each number. The README may break lines anywhere."""
    parts = [re.escape(part).replace(r"\ ", r"\s+") for part in phrase.split("{}")]
    return re.compile(r"(\d+(?:[.,]\d+)*)".join(parts))


def _line(file: str, figure: str, **sizes: Any) -> dict[str, Any]:
    lines = map(json.loads, (ROOT / "tools/benchmarks/results" / file).read_text().splitlines())
    (found,) = (one for one in lines if one["figure"] == figure and sizes.items() <= one["sizes"].items())
    return dict(found)


def _count(file: str) -> int:
    return len(json.loads((ROOT / "docs/reference" / file).read_text()))


def _main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the results' numbers into README.md")
    text = README.read_text()
    if parser.parse_args().write:
        README.write_text(written(text))
    elif (others := undeclared(text)) or written(text) != text:
        raise SystemExit(f"README.md differs from the results; --write mends it; numbers without a source: {others}")


if __name__ == "__main__":
    _main()
