"""Tries the grammars of structured output in a separate process before the engine uses them.

vLLM lets xgrammar compile a grammar in the engine's process and advance it between two engine steps, which delays every
request of the batch. A grammar of 28 characters can make either take minutes, and a call into xgrammar cannot be
interrupted. Therefore a child process first compiles each grammar and advances it by some tokens, under limits of
processor time and memory. A grammar that exceeds them kills the child instead of the engine.
`vllm_patches.grammar_budget` measures the same budget in the engine, for states of the grammar that the trial did not
reach.

`python -m fovea_sampler.grammar_trials` is the process that forks the children. Only `GrammarTrials` starts it.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn
from weakref import WeakValueDictionary

from fovea.runtime.processes import bare_environment, die_with_parent
from fovea.wire.errors import InvalidInput, Unavailable

FIELD = "params.structured_outputs"
Kind = Literal["json", "json_object", "regex", "grammar", "lark", "structural_tag"]

FREE_S = 1.0
"""Seconds of processor time by which a grammar may exceed its allowance of `TOKEN_S` per token before it is refused."""
TOKEN_S = 0.03
"""Seconds of processor time that a grammar may take for each token."""
_COMPILE_S = 20
_WALK_TOKENS = 256
_MEMORY_BYTES = 2 * 2**30
_LONGEST_S = 120
_KEPT = 4096
_AT_ONCE = 2
_CANDIDATES = 8
_MESSAGE_BYTES = 2000
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""The time and the C++ source line with which xgrammar begins its error messages."""
_ADVICE = "lower its repetition counts, lengths and nesting, and make it unambiguous"
TOO_SLOW = f"takes more than {TOKEN_S * 1000:g} ms of processor time per token; {_ADVICE}"
_TOO_LONG = f"takes more than {_COMPILE_S} s of processor time to compile; {_ADVICE}"
_TOO_LARGE = f"takes more than {_MEMORY_BYTES >> 30} GiB of memory; {_ADVICE}"


@dataclass
class GrammarBudget:
    """The processor time of one grammar, in seconds.

    Allowance that a token leaves unused is not saved for later ones.
    """

    debt_s: float = 0.0
    is_spent: bool = False

    @contextlib.contextmanager
    def measured(self, token_count: int = 0) -> Iterator[None]:
        """Charges this thread's processor time in the block, less the allowance of `token_count` tokens."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.debt_s = max(0.0, self.debt_s + time.thread_time() - began - token_count * TOKEN_S)
            self.is_spent = self.is_spent or self.debt_s > FREE_S


@dataclass(frozen=True)
class _TrialProcess:
    """The running process that forks the children, its reader, and the unanswered trials by their number."""

    process: asyncio.subprocess.Process
    reading: asyncio.Task[None]
    answers: dict[int, asyncio.Future[dict[str, Any]]]


@dataclass
class GrammarTrials:
    """The trials of grammars. Each grammar is tried once, and the outcome is remembered.

    Args:
        tokenizer_info: Returns xgrammar's TokenizerInfo of the model's tokenizer as JSON. It takes seconds, so it is
            called in a thread.
    """

    tokenizer_info: Callable[[], str]
    _known: OrderedDict[str, asyncio.Task[str]] = field(default_factory=OrderedDict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    _owners: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _forks: _TrialProcess | None = None
    _count: int = 0

    async def check(self, kind: Kind, text: str, owner: str) -> None:
        """Waits until a grammar has been tried. The grammars of one owner are tried one after the other.

        Raises InvalidInput for a grammar that is invalid or takes too much time or memory, Unavailable if the trial did
        not finish.
        """
        digest = _digest(kind, text)
        task = self._known.get(digest)
        if task is None:
            task = asyncio.create_task(self._try(kind, text, owner), name="grammar trial")
            self._known[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, done))
        self._known.move_to_end(digest)
        if problem := await asyncio.shield(task):
            raise InvalidInput(f"{FIELD}: the {kind} {problem}", field=FIELD)

    def close(self) -> None:
        """Kills the process that forks the children."""
        if self._forks is not None:
            self._forks.reading.cancel()
            with contextlib.suppress(ProcessLookupError):
                self._forks.process.kill()
            self._forks = None

    def _forget(self, digest: str, done: asyncio.Task[str]) -> None:
        """Forgets a trial without an outcome, and the least recently used trials beyond the limit."""
        if done.cancelled() or done.exception() is not None:
            self._known.pop(digest, None)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    async def _try(self, kind: Kind, text: str, owner: str) -> str:
        """Returns the problem of the grammar, or an empty string if the engine may use the grammar."""
        # The dictionary is weak: the lock lives as long as a trial holds it or waits for it. `Lock.locked()` could not
        # tell when to delete a lock, because it is also false between a release and the wake-up of the next holder.
        turn = self._owners.setdefault(owner, asyncio.Lock())
        async with turn, self._slots:
            forks = await self._running()
            self._count += 1
            number = self._count
            answer = forks.answers[number] = asyncio.get_running_loop().create_future()
            assert forks.process.stdin is not None
            forks.process.stdin.write(json.dumps({"id": number, "kind": kind, "text": text}).encode() + b"\n")
            said = await answer
        if said["problem"] is None:
            raise Unavailable(f"{FIELD}: the trial of the {kind} did not finish within {_LONGEST_S} s; try again later")
        return str(said["problem"])

    async def _running(self) -> _TrialProcess:
        async with self._starting:
            if self._forks is None or self._forks.reading.done():
                info = await asyncio.to_thread(self.tokenizer_info)
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", __name__, str(os.getpid()),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    env=bare_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
                )  # fmt: skip
                assert process.stdin is not None
                process.stdin.write(info.replace("\n", " ").encode() + b"\n")
                answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
                self._forks = _TrialProcess(
                    process, asyncio.create_task(_read(process, answers), name="grammars"), answers
                )
            return self._forks


async def _read(process: asyncio.subprocess.Process, answers: dict[int, asyncio.Future[dict[str, Any]]]) -> None:
    """Delivers the answers of the process until it ends, then fails the trials that still wait."""
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            said = json.loads(line)
            if not (answer := answers.pop(said["id"])).done():
                answer.set_result(said)
    finally:
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(Unavailable(f"{FIELD}: the process that tries grammars has died; try again"))


def _digest(kind: Kind, text: str) -> str:
    return hashlib.sha256(f"{kind}:{text}".encode(errors="surrogatepass")).hexdigest()


def main() -> NoReturn:
    """Forks a child for each line of standard input, and ends when its parent ends."""
    die_with_parent(int(sys.argv[1]))
    os.nice(10)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.buffer.readline().decode())
    saying = threading.Lock()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            _run_child(info, order["kind"], order["text"], theirs)
        os.close(theirs)
        threading.Thread(target=_await_child, args=(order["id"], pid, ours, saying)).start()
    os._exit(0)


def _await_child(number: int, pid: int, pipe: int, saying: threading.Lock) -> None:
    """Reports how a child ended.

    `problem` is null if the child exceeded its wall-clock time: that may be the machine's fault, not the grammar's.
    """
    with os.fdopen(pipe, "rb") as reading:
        said = reading.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    problem: str | None = said
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        problem = said or _TOO_LONG
    elif status == -signal.SIGALRM:
        problem = None
    elif status:
        problem = said or _TOO_LARGE
    with saying:
        print(json.dumps({"id": number, "problem": problem}), flush=True)


def _run_child(info: Any, kind: Kind, text: str, pipe: int) -> NoReturn:
    """Tries a grammar and writes its problem to `pipe`; a signal ends the process if it exceeds its limits."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    signal.alarm(_LONGEST_S)
    most = int(_COMPILE_S + FREE_S + _WALK_TOKENS * TOKEN_S) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        problem = _problem(info, kind, text)
    except MemoryError:
        problem = _TOO_LARGE
    except Exception as error:  # xgrammar raises RuntimeError and others with the problem of the grammar
        problem = _TOO_LARGE if "bad_alloc" in str(error) else f"is not valid: {_PLACE.sub('', str(error)).strip()}"
    os.write(pipe, problem.encode(errors="replace")[:_MESSAGE_BYTES])
    os._exit(0)


def _problem(info: Any, kind: Kind, text: str) -> str:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    compiled = _compile(compiler, kind, text)
    if time.process_time() > _COMPILE_S:
        return _TOO_LONG
    budget, draw = GrammarBudget(), random.Random(0)
    for prefers_long in (True, False):
        _walk(compiled, info, budget, draw, prefers_long)
    return TOO_SLOW if budget.is_spent else ""


def _compile(compiler: Any, kind: Kind, text: str) -> Any:
    """Compiles a grammar exactly as vLLM's XgrammarBackend.compile_grammar does."""
    if kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
    if kind == "json":
        return compiler.compile_json_schema(text, any_whitespace=True)
    if kind == "structural_tag" and "structures" in (tag := json.loads(text)):
        import xgrammar

        items = [
            xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
            for one in tag["structures"]
        ]
        return compiler.compile_structural_tag(items, tag["triggers"])
    compile_it = {
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "lark": compiler.compile_lark,
        "structural_tag": compiler.compile_structural_tag,
    }[kind]
    return compile_it(text)


def _walk(compiled: Any, info: Any, budget: GrammarBudget, draw: random.Random, prefers_long: bool) -> None:
    """Advances a grammar by up to `_WALK_TOKENS // 2` random tokens that it allows, or until the budget is spent.

    `prefers_long` picks the longest text among `_CANDIDATES` random tokens, which costs the matcher the most.
    """
    import torch
    import xgrammar

    words, stops = info.decoded_vocab, set(info.stop_token_ids)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    bits = torch.arange(32, dtype=torch.int32)
    matcher = None
    for _ in range(_WALK_TOKENS // 2):
        if matcher is None or matcher.is_terminated():
            matcher = xgrammar.GrammarMatcher(compiled)
        with budget.measured():
            matcher.fill_next_token_bitmask(mask)
        allowed = ((mask[0][:, None] >> bits) & 1).flatten()[: info.vocab_size].nonzero().flatten()
        chosen = [int(allowed[draw.randrange(len(allowed))]) for _ in range(_CANDIDATES)] if len(allowed) else []
        chosen = [token for token in chosen if token not in stops]
        if not chosen:
            matcher = None
            continue
        token = max(chosen, key=lambda one: len(words[one])) if prefers_long else chosen[0]
        with budget.measured(1):
            matcher.accept_token(token)
        if budget.is_spent:
            return


if __name__ == "__main__":
    main()
