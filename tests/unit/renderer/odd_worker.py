"""A worker that speaks the real protocol over a real socket, starts at once, and misbehaves by the image's width."""

import argparse
import hashlib
import os
import time
from multiprocessing.connection import Connection

import numpy as np

from services.renderer.worker_protocol import Done, Failed, Job, Ready, Refused

GOOD, DIES, HANGS, REFUSES, FAILS, RUNS_OUT_OF_MEMORY, DIES_ONCE = range(1, 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    arguments = parser.parse_args()
    with Connection(arguments.connection) as connection:
        connection.send(Ready({}, "00" * 32))
        while True:
            try:
                job: Job = connection.recv()
                data = connection.recv_bytes()
            except EOFError:
                return
            _answer(connection, job, data, arguments.model)


def _answer(connection: Connection, job: Job, data: bytes, directory: str) -> None:
    width = job.header.width
    marker = os.path.join(directory, "died")
    if width == DIES or (width == DIES_ONCE and not os.path.exists(marker)):
        open(marker, "w").close()
        os._exit(7)
    if width == HANGS:
        time.sleep(600)
    if width == REFUSES:
        connection.send(Refused("corrupt", "no picture"))
    elif width in (FAILS, RUNS_OUT_OF_MEMORY):
        connection.send(Failed("a traceback", width == RUNS_OUT_OF_MEMORY))
    else:
        tensors = {"pixel_values": np.frombuffer(data, np.uint8)}
        described = tuple((name, array.dtype.name, array.shape) for name, array in tensors.items())
        connection.send(Done(described, hashlib.sha256(data).hexdigest(), 0.0))
        connection.send_bytes(data)


if __name__ == "__main__":
    main()
