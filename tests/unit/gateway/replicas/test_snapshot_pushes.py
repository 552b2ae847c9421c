"""The lag of a sampler: by model, by the requested weights, and not for models that it does not have."""

from fovea_gateway.replicas.samplers import version_of
from fovea_gateway.replicas.snapshot_pushes import id_of_export, id_of_snapshot
from fovea_gateway.sampling.sample_runner import Versions


def test_a_sampler_that_has_what_was_asked_for_does_not_lag() -> None:
    versions = Versions()
    versions.want("")
    versions.want("m@3")
    versions.want("m@1")
    assert versions.lag(["m@3"]) == 0
    assert versions.lag(["m@0", "m@3"]) == 0
    assert versions.lag([]) == versions.lag([""]) == 0


def test_the_model_that_is_furthest_behind_counts() -> None:
    versions = Versions()
    for wanted in ("a:train:0@5", "b:train:0@9"):
        versions.want(wanted)
    assert versions.lag(["a:train:0@4", "b:train:0@2", "b:train:0@1"]) == 7
    assert versions.lag(["a:train:0@4", "c:train:0@2"]) == 1


def test_a_newer_version_than_requested_is_no_lag() -> None:
    versions = Versions()
    versions.want("m@2")
    assert versions.lag(["m@4"]) <= 0


def test_exports_and_the_base_have_no_version() -> None:
    assert version_of(id_of_snapshot("s:train:0", 7)) == ("s:train:0", 7)
    assert version_of(id_of_export("s:train:0", 7)) is None
    assert version_of("") is None
