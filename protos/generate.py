"""Generates the Python stubs: `python protos/generate.py [DESTINATION]`, `client/` by default."""

import pathlib
import sys

from grpc_tools import protoc

PROTOS = pathlib.Path(__file__).parent


def generate(destination: pathlib.Path) -> None:
    """Writes the stubs of every .proto file below this folder into `destination`, by package path."""
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")
    # A file without services needs no gRPC stub.
    for source in PROTOS.rglob("*.proto"):
        stub = destination / source.relative_to(PROTOS).with_name(f"{source.stem}_pb2_grpc.py")
        if "Servicer" not in stub.read_text():
            stub.unlink()


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent / "client")
