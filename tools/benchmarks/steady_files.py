"""Measures how long a small file waits for the disk beside a large one: `python -m benchmarks.steady_files`.

A second process writes a file of the size of a durable point, as the trainer does, and then calls fsync. Meanwhile this
process appends 4 KiB to another file of that disk and calls fsync, as the gateway's database does for each commit. The
figures are the seconds of such a commit, by the pieces in which the large file is sent to the disk; 0 leaves all of it
to its fsync. Repeats are in turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figure import emit
from fovea.runtime import durable

_APPENDED = b"x" * 4096


def write_large(path: Path, size_mib: int, piece_mib: int) -> None:
    """Writes a large file of random data, and syncs it."""
    durable.PIECE_BYTES = piece_mib * 2**20 or size_mib * 2**21
    part = os.urandom(8 * 2**20)
    with durable.SteadyFile(path.open("wb")) as steady:
        for _ in range(size_mib // 8):
            steady.write(part)
        steady.flush()
        os.fsync(steady.fileno())


def commits_beside(folder: Path, size_mib: int, piece_mib: int) -> tuple[list[float], float]:
    """Returns the seconds of each commit beside a large write, and of that write."""
    arguments = ["--folder", str(folder), "--size-mib", str(size_mib), "--write", str(piece_mib)]
    seconds, begun = [], time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.steady_files", *arguments]
    with (folder / "small").open("ab", buffering=0) as small, subprocess.Popen(command) as writer:
        while writer.poll() is None:
            before = time.perf_counter()
            small.write(_APPENDED)
            os.fsync(small.fileno())
            seconds.append(time.perf_counter() - before)
            time.sleep(0.005)
    if writer.returncode:
        raise SystemExit(f"the large write ended with code {writer.returncode}")
    return seconds, time.perf_counter() - begun


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=816, help="size of the large file")
    parser.add_argument("--pieces-mib", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        return write_large(options.folder / "large", options.size_mib, options.write)
    worst: dict[int, list[float]] = {piece: [] for piece in options.pieces_mib}
    late: dict[int, list[float]] = {piece: [] for piece in options.pieces_mib}
    writes: dict[int, list[float]] = {piece: [] for piece in options.pieces_mib}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.repeats):
            for piece in options.pieces_mib:
                seconds, whole = commits_beside(Path(folder), options.size_mib, piece)
                worst[piece].append(max(seconds))
                late[piece].append(statistics.quantiles(seconds, n=20)[-1])
                writes[piece].append(whole)
    for piece in options.pieces_mib:
        sizes = {"size_mib": options.size_mib, "piece_mib": piece}
        emit("steady_files.commit_p95", late[piece], "s", late[options.pieces_mib[0]], **sizes)
        emit("steady_files.commit_worst", worst[piece], "s", worst[options.pieces_mib[0]], **sizes)
        emit("steady_files.write", writes[piece], "s", writes[options.pieces_mib[0]], **sizes)


if __name__ == "__main__":
    main()
