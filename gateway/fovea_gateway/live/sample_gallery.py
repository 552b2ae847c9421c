"""The newest samples with their pictures, grouped by the weights that drew them, by step and by prompt.

Samples are only in memory, and their total size is limited: pictures are large, and their owners may not want them
stored. A second gallery holds datums: a group is one datum, and its sequence has the targets.
"""

import hashlib
import heapq
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.wire import tensors
from fovea_gateway.replicas.base_models import whole_text
from fovea_gateway.sessions.future import split_messages

_MOST_BYTES = 64 * 2**20
_SOURCES = 256
_STEPS = 64
_GROUPS = 8
_SEQUENCES = 16
_PROMPT_TOKENS = 4096
_SAMPLED_TOKENS = 2048
_LINGER_S = 10.0
"""Seconds for which a picture outlives the last prompt with it. A page that has just received the prompt still loads
it."""
_MEDIA_TYPES = {model_input_pb2.IMAGE_FORMAT_PNG: "image/png", model_input_pb2.IMAGE_FORMAT_JPEG: "image/jpeg"}
_STOPS = {sampler_pb2.FINISH_REASON_STOP: "stop", sampler_pb2.FINISH_REASON_LENGTH: "length"}

Ids = npt.NDArray[np.int32]


class Picture(NamedTuple):
    """An encoded picture. `data` is empty for a picture that is known only by its address or digest."""

    digest: str
    media_type: str
    data: bytes = b""


@dataclass(eq=False)
class Drawn:
    """One sampled sequence.

    Attributes:
        logprobs: float32, one per token; empty if there are none.
        reward: The client's reward; None if it sent none.
        is_cut: Whether the sequence had more tokens than are stored.
        trained: float32, the trainer's log-probabilities of the first loss with the sequence; empty until then.
        place: The digest of prompt and tokens, by which a datum is recognized; empty for a sequence that is cut.
    """

    sequence_id: str
    tokens: Ids
    logprobs: npt.NDArray[np.float32]
    stop: str
    at: float
    is_cut: bool = False
    reward: float | None = None
    is_held_out: bool = False
    trained: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    place: bytes = b""


@dataclass
class Group:
    """One prompt and the sequences drawn for it.

    Attributes:
        source: The trained model's id, or the base model's name.
        step: The number of optimizer steps in the weights.
        pieces: The prompt, in reading order.
        truth: The right answer, if the client has sent it.
        loss: The loss per token of a datum, by which a step keeps the largest; 0 for samples.
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
    loss: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The unique key of the group."""
        return self.owner, self.source, self.step, self.prompt

    @property
    def size_bytes(self) -> int:
        """The memory of the group without its pictures."""
        pieces = sum(piece.nbytes for piece in self.pieces if isinstance(piece, np.ndarray))
        return 1024 + pieces + sum(768 + one.tokens.nbytes + 2 * one.logprobs.nbytes for one in self.drawn)


class SampleGallery:
    """The newest groups of each step, for steps spread over a training. The least recently changed group is removed
    first.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._groups: OrderedDict[tuple[str, str, int, str], Group] = OrderedDict()
        self._steps: OrderedDict[tuple[str, str], dict[int, list[Group]]] = OrderedDict()
        self._pictures: dict[str, Picture] = {}
        self._uses: Counter[str] = Counter()
        self._lingering: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._bytes = 0
        self._groups_of: dict[str, Group] = {}
        # For each owner and source: the sequences that no loss has had yet, by their places.
        self._untrained: defaultdict[tuple[str, str], dict[bytes, list[Drawn]]] = defaultdict(dict)
        self.version = 0

    def add(self, group: Group, drawn: list[Drawn]) -> None:
        """Adds the sequences drawn for a prompt to those drawn before with the same weights."""
        known = self._groups.get(group.key)
        if known is None:
            known = group
            self._insert(group)
        self._bytes -= known.size_bytes
        for one in drawn:
            if len(known.drawn) == _SEQUENCES:
                self._forget(known, known.drawn[0])
            known.drawn.append(one)
            if one.place:
                self._untrained[known.owner, known.source].setdefault(one.place, []).append(one)
            self._groups_of[one.sequence_id] = known
        self._bytes += known.size_bytes
        known.at = time.time()
        self._groups.move_to_end(known.key)
        self._steps.move_to_end((known.owner, known.source))
        self.version += 1
        self._bound(known)

    def judge(self, owner: str, sequence_id: str, reward: float | None, truth: str, is_held_out: bool = False) -> bool:
        """Records a client's judgement of a sequence. Returns False if it is not stored or belongs to another owner."""
        group = self._groups_of.get(sequence_id)
        if group is None or group.owner != owner:
            return False
        for one in group.drawn:
            if one.sequence_id == sequence_id:
                one.reward = one.reward if reward is None else reward
                one.is_held_out |= is_held_out
        if truth:
            group.truth = truth
        self.version += 1
        return True

    def awaits_losses(self, owner: str, source: str) -> bool:
        """Returns whether stored sequences of a model lack the trainer's values."""
        return (owner, source) in self._untrained

    def note_losses(self, owner: str, source: str, found: Mapping[bytes, npt.NDArray[np.float32]]) -> None:
        """Records the trainer's log-probabilities of datums, by their places; float32, one per position."""
        waiting = self._untrained.get((owner, source), {})
        for place in found.keys() & waiting.keys():
            for one in waiting.pop(place):
                one.trained = found[place][len(found[place]) - len(one.tokens) :].copy()
            self.version += 1
        if not waiting:
            self._untrained.pop((owner, source), None)

    def sources(self, owner: str | None) -> Iterator[tuple[str, str, list[int], float]]:
        """Yields the sources of samples, newest first: owner, source, sorted steps, and time of the newest sample."""
        for (of, source), steps in reversed(self._steps.items()):
            if owner in (None, of):
                yield of, source, sorted(steps), max(group.at for groups in steps.values() for group in groups)

    def groups(self, owner: str, source: str, step: int | None) -> list[Group]:
        """Returns the groups of a step, newest first; by default those of the last step."""
        steps = self._steps.get((owner, source), {})
        wanted = max(steps, default=0) if step is None else step
        return sorted(steps.get(wanted, []), key=lambda group: -group.at)

    def all_groups(self, owner: str, source: str) -> list[Group]:
        """Returns copies of all groups of a source, the newest steps first."""
        steps = self._steps.get((owner, source), {})
        found = [replace(group, drawn=group.drawn.copy()) for groups in steps.values() for group in groups]
        return sorted(found, key=lambda group: (-group.step, -group.at))

    def newest_step(self, owner: str, source: str) -> int | None:
        """Returns the step of a source that was added last; None without any."""
        return next(reversed(self._steps.get((owner, source), {})), None)

    def worst(self, owner: str, source: str, steps: int, most: int) -> list[Group]:
        """Returns the datums of the last `steps` steps by their loss, the largest first. A datum counts once, with its
        last loss.
        """
        kept = self._steps.get((owner, source), {})
        found = {group.prompt: group for step in sorted(kept)[-steps:] for group in kept[step]}
        return heapq.nlargest(most, found.values(), key=lambda group: group.loss)

    def picture(self, owner: str | None, digest: str) -> Picture | None:
        """Returns a picture from a prompt of the owner, or of any owner if that is None."""
        known = ((group.owner, piece) for group in self._groups.values() for piece in group.pieces)
        pictures = ((of, piece.digest) for of, piece in known if isinstance(piece, Picture))
        if any(owner in (None, of) and name == digest for of, name in chain(pictures, self._lingering)):
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
            self._remove(min(steps[newest.step], key=lambda group: (group.loss, group.at)))
        if len(steps) > _STEPS:
            for group in list(steps[_closest(sorted(steps))]):
                self._remove(group)
        while len(self._steps) > _SOURCES:
            for groups in list(next(iter(self._steps.values())).values()):
                for group in list(groups):
                    self._remove(group)
        while self._lingering and next(iter(self._lingering.values())) < time.monotonic() - _LINGER_S:
            self._release(self._lingering.popitem(last=False)[0])
        while self._bytes > self._most_bytes and (self._lingering or len(self._groups) > 1):
            if self._lingering:
                self._release(self._lingering.popitem(last=False)[0])
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
            self._forget(group, one)
        for piece in group.pieces:
            if isinstance(piece, Picture) and piece.data:
                place = group.owner, piece.digest
                if self._lingering.pop(place, None) is not None:
                    self._release(place)
                self._lingering[place] = time.monotonic()

    def _forget(self, group: Group, one: Drawn) -> None:
        self._groups_of.pop(one.sequence_id, None)
        waiting = self._untrained.get((group.owner, group.source), {})
        alike = waiting.get(one.place, [])
        if one in alike:
            alike.remove(one)
            if not alike:
                del waiting[one.place]
        if not waiting:
            self._untrained.pop((group.owner, group.source), None)

    def _release(self, place: tuple[str, str]) -> None:
        """Releases one use of an owner's picture. The last release deletes the bytes."""
        digest = place[1]
        self._uses[digest] -= 1
        if not self._uses[digest]:
            self._bytes -= len(self._pictures.pop(digest).data)
            del self._uses[digest]


class Wanted(NamedTuple):
    """A search of samples. None does not restrict; `text` is compared without case."""

    text: str = ""
    least_reward: float | None = None
    most_reward: float | None = None
    first_step: int | None = None
    last_step: int | None = None

    def matching(self, group: Group, tokenizer: str) -> tuple[list[Drawn], int]:
        """Returns the sequences of a group that match, and the number of tokens that were read as text."""
        if not _within(group.step, self.first_step, self.last_step):
            return [], 0
        kept = list(group.drawn)
        if self.least_reward is not None or self.most_reward is not None:
            kept = [one for one in kept if _within(one.reward, self.least_reward, self.most_reward)]
        text = self.text.casefold()
        if not text or text in group.truth.casefold():
            return kept, 0
        prompts = [piece.tolist() for piece in group.pieces if not isinstance(piece, Picture)]
        ids = [*prompts, *(one.tokens.tolist() for one in kept)]
        has_text = [text in (whole_text(tokenizer, each) or "").casefold() for each in ids]
        if not any(has_text[: len(prompts)]):
            kept = [one for one, has in zip(kept, has_text[len(prompts) :], strict=True) if has]
        return kept, sum(map(len, ids))


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    """Returns whether there is a value within the bounds; None as a bound does not restrict."""
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


def _closest(steps: list[int]) -> int:
    """Returns the step with the nearest neighbours, excluding the first step and the last four."""
    inner = range(1, len(steps) - 4)
    return steps[min(inner, key=lambda index: (steps[index + 1] - steps[index - 1], index))]


def read_input(given: model_input_pb2.ModelInput) -> tuple[str, list[Ids | Picture]]:
    """Returns a model input's digest and its pieces; of a long input, only its last `_PROMPT_TOKENS` tokens."""
    digest = hashlib.sha256(given.SerializeToString(deterministic=True)).hexdigest()[:16]
    pieces: list[Ids | Picture] = []
    room = _PROMPT_TOKENS
    for chunk in reversed(given.chunks):
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


def places_of(prompt: model_input_pb2.ModelInput, drawn: Iterable[Drawn]) -> list[bytes]:
    """Returns the place of each sequence drawn for a prompt: a digest of the prompt and its tokens."""
    begun = place_of(prompt)
    found = []
    for one in drawn:
        whole = begun.copy()
        whole.update(one.tokens.tobytes())
        found.append(b"" if one.is_cut or not len(one.tokens) else whole.digest())
    return found


def place_of(given: model_input_pb2.ModelInput) -> "hashlib._Hash":
    """Returns the running digest of a model input, which does not depend on the division of tokens into chunks."""
    digest = hashlib.sha256()
    for chunk in given.chunks:
        match chunk.WhichOneof("kind"):
            case "tokens":
                digest.update(tensors.decode_tokens(chunk.tokens.tokens).tobytes())
            case "image":
                digest.update(f"\0{hashlib.sha256(chunk.image.data).hexdigest()}".encode())
            case _:
                digest.update(f"\0{chunk.image_reference.sha256 or chunk.image_reference.uri}".encode())
    return digest


def read_drawn(future_id: str, result: bytes, at: float) -> tuple[str, list[Drawn]]:
    """Returns the snapshot id of a stored result, empty for the base model, and the result's sequences."""
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
