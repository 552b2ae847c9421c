"""What the code's house has become stays so: `python -m benchmarks.house --list` says what is behind a figure."""

import pytest

from benchmarks.house import Figure, House, figures

MOST = {"core_files": 276, "shared_names": 12.0, "circles": 0, "gateway_floors": 10, "foreign_attributes": 0}
"""A figure that has become better may be written down here. Of the files, four came with models of any family, one
with vLLM's own engine arguments, two with router replay, one on each side, and two with experts, in the trainer and
in the sampler on CPU, one with weights that both draw alike, of models that no disk of a benchmark holds, one holds
the masks of packed documents, cut off attention, one sends tokens to the ranks of their experts, and four came with
scopes of keys: what they are, their administration over REST and gRPC, and a step of the schema; one bounds gRPC
calls; two share places by tokens: the queue and the owners' records; two count what is used: by key and day, and the
command that prints it; three keep durable points in the trainer: their files, who writes them, and which is due; six
bring models back to a trainer: the journal, its replay, who is in the trainer, parking, a step of the schema, and the
commands that compute, apart from what runs them;
two came with mutual TLS, of which the gateway's image makes none; one shares the room for kept results;
one says which parts each of several base models has, and one what `fovea up` runs for them; five
answer OpenAI's API: routes, answers and images at the gateway, their folder, and vLLM's classes in the sampler;
eight are the page at /: what has happened, curves, samples, the texts of tokens, what is kept of them, what is told,
its routes, and their folder, which is a floor of its own."""


@pytest.fixture(scope="module")
def found() -> dict[str, Figure]:
    return figures(House.of(None))


@pytest.mark.parametrize("name", MOST)
def test_no_figure_gets_worse(found: dict[str, Figure], name: str) -> None:
    figure = found[name]
    assert figure.value <= MOST[name], "\n".join([f"{figure.value:g} {figure.unit}", *figure.behind])


MOST["core_files"] += 10
"""Of the command: three look before a start (the checks, who gets which GPUs, the memory of the machine), and five tell
of what runs: the kept log, the status, checkpoints, how commands find it, and the page made of all commands. One is
for weights over a GPU that trainer and sampler share, one for their digest on a GPU."""
MOST["core_files"] += 1
"""The kernels around experts, which import Triton."""
