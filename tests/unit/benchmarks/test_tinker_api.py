"""Aggregation of rows of the peer-neutral script into figures."""

import sys
from typing import Any

import pytest

from benchmarks import tinker_api


def test_each_run_gives_one_value_in_our_units() -> None:
    runs: list[list[dict[str, Any]]] = [
        [
            {"figure": "meta", "sdk": "0.38.0"},
            {"figure": "a_fb_optim_b1", "status": "ok", "p50_ms": milliseconds, "p99_ms": 90.0},
            {"figure": "vlm_g_multi_client", "status": "ok", "ratio": 2.5},
        ]
        for milliseconds in (70.0, 60.0)
    ]
    values, problems = tinker_api.collect(runs)
    found = {(figure, field.name): some for (figure, field), some in values.items()}
    assert found[("a_fb_optim_b1", "p50_ms")] == pytest.approx([0.07, 0.06])
    assert found[("vlm_g_multi_client", "ratio")] == [2.5, 2.5]
    assert problems == []


@pytest.mark.parametrize(
    "row",
    [
        {"figure": "vlm", "status": "unsupported", "error": "the image is ignored"},
        {"figure": "c_sample_throughput", "status": "timeout", "error": "no end"},
        {"figure": "e_save_and_sampler", "status": "ok", "p50_ms": 1.0, "first_sample": "unsupported: no"},
        {"figure": "f_get_info", "status": "ok", "requests_per_s": 1.0, "errors": 2},
    ],
)
def test_what_did_not_work_is_told(row: dict[str, object]) -> None:
    values, problems = tinker_api.collect([[row]])
    assert not values
    assert str(row["figure"]) in problems[0]


def test_a_script_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinker_api", "--bench", "/nowhere/bench_tinker.py"])
    with pytest.raises(SystemExit):
        tinker_api.main()
    assert "/nowhere/bench_tinker.py is no file" in capsys.readouterr().err
