"""The images work: these tests detect a missing template, compiler or library, which a list of files does not show."""

import json

import pytest

from deploy.images.engine import podman
from tests.images.conftest import Running, client

SERVICES = ("gateway", "renderer", "sampler", "trainer")
_COMPILED = """
from triton.runtime.build import compile_module_from_src
source = '''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef made = {PyModuleDef_HEAD_INIT, "made", NULL, -1, methods};
PyMODINIT_FUNC PyInit_made(void) { return PyModule_Create(&made); }
'''
print(compile_module_from_src(source, "made").answer())
"""


def test_the_tinker_example_learns_its_picture(running: Running) -> None:
    assert "Ada<|im_end|>" in client(running, "tinker_image.py").splitlines()[-1]


def test_the_grpc_example_streams_an_answer(running: Running) -> None:
    assert client(running, "grpc_image.py").strip()


@pytest.mark.parametrize("service", SERVICES)
def test_services_run_unprivileged_and_write_nothing_to_their_image(running: Running, service: str) -> None:
    status = podman("exec", running.container(service), "cat", "/proc/1/status").stdout
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split() == ["10001"] * 4
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"] == "1"
    (inspected,) = json.loads(podman("inspect", running.container(service)).stdout)
    assert inspected["HostConfig"]["ReadonlyRootfs"]
    assert podman("exec", running.container(service), "touch", "/app/x", check=False).returncode != 0


@pytest.mark.parametrize("service", ["sampler", "trainer"])
def test_kernels_are_compiled_and_loaded(running: Running, service: str) -> None:
    """Compiles as triton does for a GPU: needs a C compiler, Python's headers, and a folder that
    allows loading code.
    """
    made = podman("exec", running.container(service), "python", "-c", _COMPILED).stdout
    assert made.strip() == "42"


def test_the_gateway_has_no_gpu_libraries(running: Running) -> None:
    found = podman(
        "exec",
        running.container("gateway"),
        "find",
        "/opt/fovea",
        "/usr/lib",
        "-iname",
        "*nvidia*",
        "-o",
        "-iname",
        "libcud*",
        "-o",
        "-iname",
        "torch",
        "-o",
        "-iname",
        "libtorch*",
        "-o",
        "-iname",
        "triton",
    ).stdout
    assert found == ""
