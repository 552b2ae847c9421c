"""A task for inspect-ai, an evaluation harness: pictures in one folder for each right answer.

In a separate environment (`pip install inspect-ai openai`), with a running Fovea server:

    cd examples
    export FOVEA_BASE_URL=http://127.0.0.1:8000/v1 FOVEA_API_KEY=tml-local
    inspect eval inspect_pictures.py -T folder=birds -T "question=Which bird is this?" \\
        --temperature 0 --model openai-api/fovea/MODEL

MODEL is the name of a base model or the tinker:// path of a sampler checkpoint. inspect sends each picture as a data
URL.
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task  # type: ignore[untyped-decorator]
def pictures(folder: str, question: str) -> Task:
    """Asks about each picture. An answer is right if it is the name of the picture's folder."""
    samples = [
        Sample(
            id=f"{path.parent.name}/{path.name}",
            input=[ChatMessageUser(content=[ContentImage(image=str(path)), ContentText(text=question)])],
            target=path.parent.name,
        )
        for path in sorted(Path(folder).resolve().glob("*/*.png"))
    ]
    return Task(dataset=MemoryDataset(samples), solver=generate(max_tokens=8), scorer=exact())
