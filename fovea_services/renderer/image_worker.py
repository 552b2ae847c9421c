"""An image worker: `python -m fovea_services.renderer.image_worker`. Only `worker_pool` starts it.

Image decoders and the image processor run in this separate process. A crash, a leak or a gigabyte of pixels therefore
does not affect the service, and processing pixels does not hold the interpreter lock of its event loop.
"""

import argparse
import io
import resource
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from fovea.runtime.children import importing, leave

with importing():
    import torch
    from PIL import Image

    from fovea.wire.features import tensors_sha256
    from fovea_services.renderer import pixels
    from fovea_services.renderer.chunk_errors import InvalidChunk
    from fovea_services.renderer.image_header import ImageHeader
    from fovea_services.renderer.image_processor import ImageProcessor, open_processor
    from fovea_services.renderer.worker_protocol import Done, Failed, Invalid, Job, Ready, SharedMemory, send

WARM_UP_SIZE = (320, 240)


def main() -> None:
    """Processes jobs until the service closes the socket or ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int, required=True, help="Inherited descriptor of the socket pair.")
    parser.add_argument("--tensors", type=int, required=True, help="Inherited descriptor of the shared memory.")
    parser.add_argument("--model", required=True, help="Model directory.")
    parser.add_argument("--memory-bytes", type=int, required=True, help="Memory limit in bytes; 0 is no limit.")
    arguments = parser.parse_args()
    # A Ctrl-C reaches the whole process group. The service drains and ends its workers by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    if arguments.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.memory_bytes, arguments.memory_bytes))
    processor = open_processor(Path(arguments.model))
    memory = SharedMemory(arguments.tensors)
    _warm_up(processor, memory)
    with Connection(arguments.connection) as connection:
        try:
            send(connection, Ready(processor.settings, processor.fingerprint))
            while True:
                _serve_one(connection, memory, processor)
        except (EOFError, ConnectionError):
            leave(0)


def _serve_one(connection: Connection, memory: SharedMemory, processor: ImageProcessor) -> None:
    job: Job = connection.recv()
    start = time.perf_counter()
    try:
        header = job.header
        image = pixels.decode(job.data, header.format, header.width, header.height, job.max_side)
        memory.clear()
        sha256 = tensors_sha256(processor.tensors(image, memory.allocate))
    except InvalidChunk as error:
        send(connection, Invalid(error.cause, error.message))
        return
    except Exception as error:  # any error must be reported, because the service waits for an answer
        out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        send(connection, Failed(traceback.format_exc(), out_of_memory))
        return
    send(connection, Done(memory.places, sha256, time.perf_counter() - start))


def _warm_up(processor: ImageProcessor, memory: SharedMemory) -> None:
    """Decodes and processes one image of each format, so that a client's first image is not slower than others."""
    image = Image.new("RGB", WARM_UP_SIZE, (120, 60, 30))
    for header in (ImageHeader("PNG", *WARM_UP_SIZE), ImageHeader("JPEG", *WARM_UP_SIZE)):
        file = io.BytesIO()
        image.save(file, header.format)
        memory.clear()
        processor.tensors(pixels.decode(file.getvalue(), header.format, header.width, header.height), memory.allocate)


if __name__ == "__main__":
    main()
