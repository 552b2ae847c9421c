"""The committed stubs equal the output of `make protos`, and the protos pass buf's lint."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_committed_stubs_are_current(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", tmp_path], check=True)
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*_pb2*")}
    assert len(fresh) >= 20
    committed = {
        path.relative_to(ROOT / "client"): path.read_bytes()
        for folder in ("api", "tinker")
        for path in (ROOT / "client" / "fovea" / folder).rglob("*_pb2*")
        if path.suffix in {".py", ".pyi"}
    }
    assert sorted(fresh) == sorted(committed)
    assert [path for path in fresh if fresh[path] != committed[path]] == []


def test_protos_pass_lint() -> None:
    buf = pathlib.Path(sys.executable).parent / "buf"
    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
