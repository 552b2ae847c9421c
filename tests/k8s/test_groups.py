"""LeaderWorkerSet and Kueue with their real controllers: groups restart as a whole, and quotas hold pods back."""

import pytest

from deploy.cluster.cluster import Cluster, CommandFailed
from tests.k8s.cluster import CHART, Object, Release, wait_for
from tests.k8s.queues import queue

_SMALL = ("--set", "sampler.replicas=0,trainer.gpus=4")
_GROUP = ("--set", "trainer.nodes=2")


def _trainers(release: Release) -> dict[str, Object]:
    return {pod["metadata"]["name"]: pod for pod in release.get("pods", "trainer")}


def _names(release: Release) -> list[str]:
    """Returns the names of the pods of two nodes."""
    return [f"{release.fullname}-trainers-{suffix}" for suffix in ("0", "0-1")]


def _uids(release: Release) -> set[str]:
    return {pod["metadata"]["uid"] for pod in _trainers(release).values()}


def _running(release: Release) -> set[str]:
    return {name for name, pod in _trainers(release).items() if pod["status"]["phase"] == "Running"}


def _is_held_back(release: Release) -> bool:
    """Returns whether trainer pods exist and none may be scheduled."""
    gates = [pod["spec"].get("schedulingGates") for pod in _trainers(release).values()]
    return bool(gates) and all(gates)


def _environment(pod: Object) -> list[str]:
    return [item["name"] for item in pod["spec"]["containers"][0]["env"]]


def test_a_group_is_made_anew_as_a_whole(cluster: Cluster, namespace: str) -> None:
    """A group of two pods: the deletion of one replaces both, and so does an upgrade."""
    release = Release(cluster, namespace, "vision", (*_SMALL, *_GROUP))
    release.install()
    leader, worker = _names(release)
    wait_for("both pods run", lambda: _running(release) == {leader, worker})
    pods = _trainers(release)
    for index, name in enumerate((leader, worker)):
        assert pods[name]["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] == str(index)
        assert (pods[name]["spec"]["hostname"], pods[name]["spec"]["subdomain"]) == (name, leader.removesuffix("-0"))
        names = _environment(pods[name])
        assert names.index("LWS_LEADER_ADDRESS") < names.index("FOVEA_TRAINER_MASTER_ADDR"), (
            "the second variable refers to the first"
        )
    address = {item["name"]: item.get("value") for item in pods[worker]["spec"]["containers"][0]["env"]}
    assert address["LWS_LEADER_ADDRESS"] == f"{leader}.{release.fullname}-trainers.{namespace}"

    def renewed() -> bool:
        return _running(release) == {leader, worker} and not _uids(release) & before

    before = _uids(release)
    cluster.kubectl("delete", "pod", worker, "-n", namespace, "--wait=false")
    wait_for("both pods are new", renewed)
    before = _uids(release)
    release.upgrade("--set", "trainer.settings.token_budget=1234")
    wait_for("both pods are of the new release", renewed)
    release.uninstall()


def test_one_host_becomes_two_and_back(cluster: Cluster, namespace: str) -> None:
    """A StatefulSet is replaced by a LeaderWorkerSet, and returns."""
    release = Release(cluster, namespace, "vision", _SMALL)
    release.install()
    single = {f"{release.fullname}-trainer-0"}
    assert _running(release) == single
    release.upgrade(*_GROUP)
    wait_for("two pods", lambda: _running(release) == {*_names(release)})
    release.upgrade("--set", "trainer.nodes=1")
    wait_for("one pod", lambda: _running(release) == single)
    release.uninstall()


def test_a_quota_holds_a_second_trainer_back(cluster: Cluster, namespace: str) -> None:
    """Eight GPUs: a group of two pods with four each uses them. The next trainer starts once they are free."""
    cluster.apply(*queue(namespace, "gpus", gpus=8))
    values = (*_SMALL, "--set", "kueue.queue=gpus")
    first = Release(cluster, namespace, "first", (*values, *_GROUP))
    first.install()
    wait_for("the first trainer runs", lambda: len(_running(first)) == 2)
    second = Release(cluster, namespace, "second", values)
    second.install("--wait=false")
    wait_for("the second trainer is held back", lambda: _is_held_back(second))
    third = Release(cluster, namespace, "third", (*values, *_GROUP))
    third.install("--wait=false")
    wait_for("the third trainer is held back as a whole", lambda: _is_held_back(third))
    assert len(_running(first)) == 2

    first.uninstall()
    wait_for("the second trainer runs", lambda: len(_running(second)) == 1)
    assert _is_held_back(third), "half of the group would fit, which is not enough"
    second.uninstall()
    wait_for("the third trainer runs", lambda: len(_running(third)) == 2)
    third.uninstall()


def test_samplers_of_a_queue_scale_one_by_one(cluster: Cluster, namespace: str) -> None:
    """With GPUs for the trainer and two samplers, the third sampler waits and the others serve."""
    cluster.apply(*queue(namespace, "gpus", gpus=3))
    release = Release(cluster, namespace, "vision", ("--set", "kueue.queue=gpus,sampler.replicas=1"))
    release.install()
    release.upgrade("--set", "sampler.replicas=3", "--wait=false")
    pods = release.get
    wait_for(
        "two samplers run",
        lambda: sorted(pod["status"]["phase"] for pod in pods("pods", "sampler")) == ["Pending", "Running", "Running"],
    )
    release.upgrade("--set", "sampler.replicas=2")
    assert [pod["status"]["phase"] for pod in pods("pods", "sampler")] == ["Running"] * 2
    release.uninstall()


def test_a_group_without_its_controller_is_refused_by_its_definition(cluster: Cluster, namespace: str) -> None:
    """The API server knows the fields, so that a typo in the chart fails."""
    text = cluster.helm("template", "vision", str(CHART), *_GROUP, "--show-only=templates/trainer.yaml")
    with pytest.raises(CommandFailed, match=r"unknown field .*restartPolicies"):
        cluster.kubectl(
            "create", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-",
            stdin=text.replace("restartPolicy:", "restartPolicies:"),
        )  # fmt: skip
