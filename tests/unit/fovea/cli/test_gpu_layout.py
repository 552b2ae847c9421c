"""The GPUs of trainer and samplers, and refusals of layouts that cannot fit."""

import os
import pathlib
from typing import Any

import pytest

from fovea.cli import gpu_layout
from fovea.cli.gpu_layout import GIB, Gpu, GpuLayout, check_free, choose, read_devices, split, visible_gpus
from fovea.cli.preflight import StartRefused
from fovea.cli.service_specs import NO_GPU, ServedModel, Setting, UpOptions


def cards(count: int, free_gib: int = 78) -> list[Gpu]:
    return [Gpu(str(number), 80 * GIB, free_gib * GIB) for number in range(count)]


@pytest.mark.parametrize(
    ("gpus", "weights_gib", "samplers", "ranks", "trainer", "of_samplers", "count"),
    [
        (0, 4, None, None, "", "", 1),
        (0, 4, 3, None, "", "", 3),
        (0, 4, 0, None, "", "", 0),
        (1, 8, None, None, "0", "0", 1),
        (1, 8, 2, None, "0", "0", 2),
        (1, 60, 0, None, "0", "", 0),
        (2, 60, None, None, "0", "1", 1),
        (4, 8, None, None, "0,1", "2,3", 2),
        (4, 8, 1, None, "0,1,2", "3", 1),
        (4, 8, 1, 2, "0,1", "2", 1),
        (8, 8, None, None, "0,1,2,3", "4,5,6,7", 4),
        (8, 100, None, None, "0,1,2,3", "4,5,6,7", 2),
        (8, 8, 0, 4, "0,1,2,3", "", 0),
    ],
)
def test_cards_are_divided(
    gpus: int, weights_gib: int, samplers: int | None, ranks: int | None, trainer: str, of_samplers: str, count: int
) -> None:
    layout = split(cards(gpus), weights_gib * GIB, samplers, ranks)
    assert (",".join(layout.trainer), ",".join(layout.samplers), layout.sampler_count) == (trainer, of_samplers, count)


def test_shares_of_one_card_hold_the_weights_and_do_not_overlap() -> None:
    for free_gib, weights_gib, count in ((78, 1, 1), (78, 30, 1), (24, 4, 1), (78, 8, 3)):
        layout = split(cards(1, free_gib), weights_gib * GIB, count, None)
        told = {each.name: float(each.value) for each in layout.suggestions}
        trainer, sampler = told["memory_limit_mib"] / 1024, told["gpu_memory_fraction"] * 80
        assert trainer > weights_gib
        assert sampler > weights_gib - 0.8  # the fraction has two digits
        assert trainer + count * sampler <= 0.92 * free_gib
        assert f"share GPU 0: {trainer:.1f} GiB and " in layout.words


def test_a_shared_base_leaves_its_size_to_both() -> None:
    own, shared = (split(cards(1), 20 * GIB, 1, None, shares_base=shares) for shares in (False, True))
    trainer, sampler = ({each.name: float(each.value) for each in one.suggestions} for one in (own, shared))
    assert sampler["memory_limit_mib"] / 1024 == pytest.approx(trainer["memory_limit_mib"] / 1024 - 8, abs=1)
    assert sampler["gpu_memory_fraction"] * 80 == pytest.approx(trainer["gpu_memory_fraction"] * 80 + 8, abs=1)
    assert shared.words.endswith("with one copy of the weights (20.0 GiB)")
    assert split(cards(1), 60 * GIB, 1, None, shares_base=True).suggestions, "two copies would not fit"


@pytest.mark.parametrize(
    ("gpus", "weights_gib", "samplers", "ranks", "words"),
    [
        (1, 40, None, None, "--model: the weights need 40.0 GiB in the trainer and again in each of 1 sampler"),
        (1, 80, 0, None, "--model: the weights need 80.0 GiB, but the trainer's 1 GPU have 71.8 GiB free"),
        (2, 100, None, None, "--model: 1 sampler(s) on 2 GPUs and a trainer on 2 do not fit on 2 GPUs"),
        (2, 8, 2, None, "--samplers: 2 sampler(s) on 2 GPUs and a trainer on 1 do not fit on 2 GPUs"),
        (4, 8, None, 8, "--ranks: 2 sampler(s) on 2 GPUs and a trainer on 8 do not fit on 4 GPUs"),
        (1, 8, None, 2, "--ranks: 2 ranks need 2 GPUs, but the trainer has 1"),
    ],
)
def test_what_cannot_fit_is_refused(
    gpus: int, weights_gib: int, samplers: int | None, ranks: int | None, words: str
) -> None:
    with pytest.raises(StartRefused) as refused:
        split(cards(gpus), weights_gib * GIB, samplers, ranks)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(("free_gib", "samplers"), [(0, 1), (1, 1), (2, 1), (3, 2), (0, 0)])
def test_a_card_that_another_process_fills_is_refused(free_gib: int, samplers: int) -> None:
    """A model of 5 MB would fit by its weights, but each process takes more. Zero free bytes does not mean unknown."""
    with pytest.raises(StartRefused, match=rf"^--model: .*{free_gib or 0}\.0 GiB"):
        split(cards(1, free_gib), 5 << 20, samplers, None)


def options(trainer: str, samplers: str = "", **more: Any) -> UpOptions:
    devices = {"trainer_gpus": tuple(trainer.split(",")), "sampler_gpus": tuple(filter(None, samplers.split(",")))}
    return UpOptions("m", "m", "127.0.0.1", 1, 2, 1, pathlib.Path(), **devices, **more)


TEACHER = ServedModel("t", "t", False, ("1",), ("1",))


def fraction(value: str) -> tuple[Setting]:
    return (Setting("sampler", "gpu_memory_fraction", value),)


@pytest.mark.parametrize(
    ("free", "chosen", "words"),
    [
        (
            (79_000, 40_000),
            options("0", "1"),
            "GPU 1 has 39.1 GiB free of 79.6 GiB, but Fovea needs 71.7 GiB for a sampler",
        ),
        (
            (500, 79_000),
            options("0", "1"),
            "GPU 0 has 0.5 GiB free of 79.6 GiB, but Fovea needs 1.0 GiB for the trainer",
        ),
        ((0, 79_000), options("0", "1"), "GPU 0 has 0.0 GiB free"),
        ((79_000, 40_000), options("0", "1", settings=fraction("0.4")), ""),
        ((79_000, 66_000), options("0", "1", parameter_count=8 * 10**9), ""),
        (
            (79_000, 79_000),
            options("0", "1", further_models=(TEACHER,)),
            "GPU 1 has",
        ),
        ((79_000, 79_000), options("0,1", sampler_count=0), ""),
        ((79_000, 79_000), options("0", "0", suggestions=fraction("0.3")), ""),
    ],
)
def test_what_is_free_is_compared_before_the_start(
    free: tuple[int, ...], chosen: UpOptions, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(tmp_path, monkeypatch, *free)
    if not words:
        check_free(chosen, "", "")
        return
    with pytest.raises(StartRefused) as refused:
        check_free(chosen, "", "1")
    assert str(refused.value).startswith(f"--sampler-gpus: {words}")


def tell(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *free_mib: int) -> None:
    """Puts a program on the path that reports cards of 80 GB, like the driver's."""
    lines = [f"echo '{index}, GPU-{index}{index}, 81559, {free}'" for index, free in enumerate(free_mib)]
    program = folder / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FOVEA_SAMPLER_GPU_MEMORY_FRACTION", raising=False)


@pytest.fixture
def driver(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that reports two cards."""
    tell(tmp_path, monkeypatch, 80_000, 79_000)


@pytest.mark.usefixtures("driver")
def test_cards_are_those_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus() == {"0": Gpu("0", 81559 << 20, 80000 << 20), "1": Gpu("1", 81559 << 20, 79000 << 20)}
    for listed, names in (("1", ["1"]), ("GPU-11,0", ["GPU-11", "0"]), ("", []), ("7", []), ("MIG-1", ["MIG-1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert list(visible_gpus()) == names


def told(gpus: str, trainer: str = "", samplers: str = "", count: int | None = None, taken: str = "") -> GpuLayout:
    return choose(gpus, trainer, samplers, weight_bytes=0, sampler_count=count, ranks=None, taken=taken.split(","))


@pytest.mark.usefixtures("driver")
def test_flags_choose_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told("auto").trainer == told("auto").samplers == NO_GPU, "the installed vLLM is for CPUs"
    assert told("auto", count=0).trainer == ("0", "1")
    monkeypatch.setattr(gpu_layout, "_is_vllm_for_cpu", lambda: False)
    assert (told("auto").trainer, told("auto").samplers) == (("0",), ("1",))
    assert (told("1").trainer, told("1").samplers) == (("1",), ("1",))
    assert (told("auto", taken="0").trainer, told("auto", taken="0").samplers) == (("1",), ("1",))
    assert told("auto", "0", "1").suggestions == ()
    shared = told("auto", "0", "0,1", 2)
    sizes = "43.1 GiB and 28.8 GiB of 79.6 GiB"
    assert shared.words == f"trainer on GPU 0, 2 samplers on GPU 0,1; on GPU 0 {sizes}, and as much on the others"
    for layout in (shared, told("auto", "0", "0")):
        assert layout.suggestions == told("0").suggestions != (), "as without the flags"
    with pytest.raises(
        StartRefused, match=r"^--samplers: the 2 GPUs of --sampler-gpus cannot be divided equally among 3"
    ):
        told("auto", "", "0,1", 3)
    with pytest.raises(StartRefused, match=r"^--gpus: the sampler needs a GPU"):
        told("none")
    assert told("none", count=0).trainer == NO_GPU


def test_devices_are_read_once_each() -> None:
    assert read_devices(" 0, 2", "--gpus", ["0", "1", "2"]) == ("0", "2")
    for text, words in (("3", "GPU 3 does not exist: this machine has 0,1"), ("1,1", "GPU 1 is listed twice")):
        with pytest.raises(StartRefused, match=words):
            read_devices(text, "--gpus", ["0", "1"])
