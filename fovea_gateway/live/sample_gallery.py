"""The newest samples, with their pictures, by whose weights drew them, by step and by prompt: in memory alone, bounded.

Neither a restart nor whoever samples most keeps what is old: pictures are large, and whose they are may end any day.
"""

import hashlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.wire import tensors
from fovea_gateway.futures.future import split_messages

_MOST_BYTES = 64 * 2**20
_SOURCES = 256
_STEPS = 64
_GROUPS = 8
_SEQUENCES = 16
_PROMPT_TOKENS = 4096
_SAMPLED_TOKENS = 2048
_LINGER_S = 10.0
"""How long a picture outlives the last prompt with it: who has just been told of that comes for it a moment later."""
_MEDIA_TYPES = {model_input_pb2.IMAGE_FORMAT_PNG: "image/png", model_input_pb2.IMAGE_FORMAT_JPEG: "image/jpeg"}
_STOPS = {sampler_pb2.FINISH_REASON_STOP: "stop", sampler_pb2.FINISH_REASON_LENGTH: "length"}

Ids = npt.NDArray[np.int32]


class Picture(NamedTuple):
    """An encoded picture; `data` is empty for one that is only named, by address or digest."""

    digest: str
    media_type: str
    data: bytes = b""


@dataclass
class Drawn:
    """One sampled sequence.

    Attributes:
        logprobs: float32, one per token; empty if there are none.
        reward: What the client said; None if it said nothing.
        is_cut: Whether there were more tokens than are kept.
    """

    sequence_id: str
    tokens: Ids
    logprobs: npt.NDArray[np.float32]
    stop: str
    at: float
    is_cut: bool = False
    reward: float | None = None


@dataclass
class Group:
    """One prompt and what was drawn for it.

    Attributes:
        source: The trained model's id, or the base model's name.
        step: Steps that the weights had taken.
        pieces: The prompt, in reading order.
        truth: What the right answer is, if the client told.
    """

    owner: str
    source: str
    step: int
    prompt: str
    base_model: str
    pieces: list[Ids | Picture]
    drawn: deque[Drawn] = field(default_factory=lambda: deque(maxlen=_SEQUENCES))
    truth: str = ""
    at: float = field(default_factory=time.time)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Unlike any other group's."""
        return self.owner, self.source, self.step, self.prompt

    @property
    def size_bytes(self) -> int:
        """What it takes, pictures aside."""
        pieces = sum(piece.nbytes for piece in self.pieces if isinstance(piece, np.ndarray))
        return 1024 + pieces + sum(512 + one.tokens.nbytes + one.logprobs.nbytes for one in self.drawn)


class SampleGallery:
    """Groups, the newest of each step, of steps spread over the training. What has not grown for longest goes first."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._groups: OrderedDict[tuple[str, str, int, str], Group] = OrderedDict()
        self._steps: OrderedDict[tuple[str, str], dict[int, list[Group]]] = OrderedDict()
        self._pictures: dict[str, Picture] = {}
        self._uses: Counter[str] = Counter()
        self._parting: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._bytes = 0
        self._groups_of: dict[str, Group] = {}
        self.version = 0

    def add(self, group: Group, drawn: list[Drawn]) -> None:
        """Takes what was drawn for a prompt, beside what was drawn for it before with the same weights."""
        known = self._groups.get(group.key)
        if known is None:
            known = group
            self._insert(group)
        self._bytes -= known.size_bytes
        for one in drawn:
            if len(known.drawn) == _SEQUENCES:
                self._groups_of.pop(known.drawn[0].sequence_id, None)
            known.drawn.append(one)
            self._groups_of[one.sequence_id] = known
        self._bytes += known.size_bytes
        known.at = time.time()
        self._groups.move_to_end(known.key)
        self._steps.move_to_end((known.owner, known.source))
        self.version += 1
        self._bound(known)

    def judge(self, owner: str, sequence_id: str, reward: float | None, truth: str) -> bool:
        """Notes what a client says of a sequence; False if it is not kept, or somebody else's."""
        group = self._groups_of.get(sequence_id)
        if group is None or group.owner != owner:
            return False
        for one in group.drawn:
            if one.sequence_id == sequence_id and reward is not None:
                one.reward = reward
        if truth:
            group.truth = truth
        self.version += 1
        return True

    def sources(self, owner: str | None) -> Iterator[tuple[str, str, list[int], float]]:
        """Whose samples there are, newest first: owner, source, steps in order, when the newest came."""
        for (of, source), steps in reversed(self._steps.items()):
            if owner in (None, of):
                yield of, source, sorted(steps), max(group.at for groups in steps.values() for group in groups)

    def groups(self, owner: str, source: str, step: int | None) -> list[Group]:
        """The groups of a step, newest first; of the last step if none is named."""
        steps = self._steps.get((owner, source), {})
        wanted = max(steps, default=0) if step is None else step
        return sorted(steps.get(wanted, []), key=lambda group: -group.at)

    def picture(self, owner: str | None, digest: str) -> Picture | None:
        """A picture that an owner, or with None anybody, has sampled with."""
        known = ((group.owner, piece) for group in self._groups.values() for piece in group.pieces)
        told = ((of, piece.digest) for of, piece in known if isinstance(piece, Picture))
        if any(owner in (None, of) and name == digest for of, name in chain(told, self._parting)):
            return self._pictures.get(digest)
        return None

    def _insert(self, group: Group) -> None:
        self._groups[group.key] = group
        self._steps.setdefault((group.owner, group.source), {}).setdefault(group.step, []).append(group)
        self._bytes += group.size_bytes
        for index, piece in enumerate(group.pieces):
            if isinstance(piece, Picture) and piece.data:
                if not self._uses[piece.digest]:
                    self._pictures[piece.digest] = piece
                    self._bytes += len(piece.data)
                self._uses[piece.digest] += 1
                group.pieces[index] = Picture(piece.digest, piece.media_type, self._pictures[piece.digest].data)

    def _bound(self, newest: Group) -> None:
        place = newest.owner, newest.source
        steps = self._steps[place]
        while len(steps[newest.step]) > _GROUPS:
            self._remove(min(steps[newest.step], key=lambda group: group.at))
        if len(steps) > _STEPS:
            for group in list(steps[_closest(sorted(steps))]):
                self._remove(group)
        while len(self._steps) > _SOURCES:
            for groups in list(next(iter(self._steps.values())).values()):
                for group in list(groups):
                    self._remove(group)
        while self._parting and next(iter(self._parting.values())) < time.monotonic() - _LINGER_S:
            self._release(self._parting.popitem(last=False)[0])
        while self._bytes > self._most_bytes and (self._parting or len(self._groups) > 1):
            if self._parting:
                self._release(self._parting.popitem(last=False)[0])
            else:
                self._remove(next(iter(self._groups.values())))

    def _remove(self, group: Group) -> None:
        del self._groups[group.key]
        steps = self._steps[group.owner, group.source]
        steps[group.step].remove(group)
        if not steps[group.step]:
            del steps[group.step]
        if not steps:
            del self._steps[group.owner, group.source]
        self._bytes -= group.size_bytes
        for one in group.drawn:
            self._groups_of.pop(one.sequence_id, None)
        for piece in group.pieces:
            if isinstance(piece, Picture) and piece.data:
                place = group.owner, piece.digest
                if self._parting.pop(place, None) is not None:
                    self._release(place)
                self._parting[place] = time.monotonic()

    def _release(self, place: tuple[str, str]) -> None:
        """Lets go of one use of an owner's picture, and with the last one of its bytes."""
        digest = place[1]
        self._uses[digest] -= 1
        if not self._uses[digest]:
            self._bytes -= len(self._pictures.pop(digest).data)
            del self._uses[digest]


def _closest(steps: list[int]) -> int:
    """The step whose neighbours are nearest to each other, neither the first nor one of the last few."""
    inner = range(1, len(steps) - 4)
    return steps[min(inner, key=lambda index: (steps[index + 1] - steps[index - 1], index))]


def read_prompt(request: gateway_pb2.SampleTokensRequest) -> tuple[str, list[Ids | Picture]]:
    """A prompt's digest, and its pieces; beyond some thousand tokens its beginning is left out."""
    digest = hashlib.sha256(request.prompt.SerializeToString(deterministic=True)).hexdigest()[:16]
    pieces: list[Ids | Picture] = []
    room = _PROMPT_TOKENS
    for chunk in reversed(request.prompt.chunks):
        match chunk.WhichOneof("kind"):
            case "tokens":
                ids = tensors.decode_tokens(chunk.tokens.tokens)
                pieces.append(ids[max(len(ids) - room, 0) :].copy())
                room -= len(pieces[-1])
            case "image":
                image = chunk.image
                name = hashlib.sha256(image.data).hexdigest()
                pieces.append(Picture(name, _MEDIA_TYPES.get(image.format, ""), image.data))
            case _:
                named = chunk.image_reference
                pieces.append(Picture(named.sha256 or named.uri, ""))
    return digest, pieces[::-1]


def read_drawn(future_id: str, result: bytes, at: float) -> tuple[str, list[Drawn]]:
    """The id of the snapshot that a kept result was drawn from, empty for the base model, and its sequences."""
    snapshot, found = "", []
    for record in split_messages(gateway_pb2.SampleTokensResponse, result):
        if record.WhichOneof("event") != "delta":
            continue
        delta = record.delta
        snapshot = delta.snapshot_id
        tokens = tensors.decode_tokens(delta.tokens)
        found.append(
            Drawn(
                f"{future_id}:{delta.index}",
                tokens[:_SAMPLED_TOKENS].copy(),
                tensors.decode_floats(delta.logprobs)[:_SAMPLED_TOKENS].copy(),
                _STOPS.get(delta.finish_reason, ""),
                at,
                len(tokens) > _SAMPLED_TOKENS,
            )
        )
    return snapshot, found[-_SEQUENCES:]
