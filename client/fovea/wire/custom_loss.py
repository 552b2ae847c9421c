"""Parses and checks a traced loss in the Tinker SDK's graph format 1. This module never runs it.

The graph is untrusted input. In the nodes that `parse` returns, every operation is on the allow-list, every reference
points to an earlier node, and every size is bounded.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput

# The operations that a traced loss may use, under the names that torch.fx records. Excluded on purpose: operations that
# write in place, draw random numbers, read files or devices, call back into Python, or derive a size from values.
# services/trainer/fovea_trainer/losses/loss_worker.py maps each name to a callable.
_UNARY = """
abs absolute acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac
isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive rad2deg reciprocal
relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc bitwise_not
""".split()

_BINARY = """
add atan2 bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min clip copysign div divide eq float_power
floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose le less less_equal lerp logaddexp
logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne not_equal pow remainder sub subtract
true_divide where xlogy addcdiv addcmul
""".split()

_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum diff dist kthvalue log_softmax
logcumsumexp logsumexp max mean median min nanmean nanmedian nanquantile nansum prod quantile softmax std sum var
argsort sort topk msort
""".split()

_SHAPES = """
broadcast_to chunk clone detach diag diag_embed diagonal flatten flip gather index_select masked_fill masked_select
movedim narrow numel permute ravel reshape roll select squeeze swapaxes swapdims t take take_along_dim tensor_split tile
trace transpose tril triu unbind unflatten unsqueeze
""".split()

_PRODUCTS = "bmm dot inner matmul mm mv outer vdot".split()

_TORCH_ONLY = """
cat concat concatenate cosine_similarity hstack stack std_mean var_mean vstack
arange eye full full_like linspace ones ones_like scalar_tensor zeros zeros_like
functional.norm functional.split
_C._linalg.linalg_norm _C._linalg.linalg_vector_norm
_C._nn.gelu _C._nn.log_sigmoid _C._nn.softplus
_C._special.special_digamma _C._special.special_entr _C._special.special_erf _C._special.special_erfc
_C._special.special_exp2 _C._special.special_expit _C._special.special_expm1 _C._special.special_gammaln
_C._special.special_log1p _C._special.special_log_ndtr _C._special.special_log_softmax _C._special.special_logit
_C._special.special_logsumexp _C._special.special_ndtr _C._special.special_sinc _C._special.special_softmax
_C._special.special_xlog1py _C._special.special_xlogy
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.elu
nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss
nn.functional.leaky_relu nn.functional.log_softmax nn.functional.margin_ranking_loss nn.functional.mish
nn.functional.mse_loss nn.functional.normalize nn.functional.pad nn.functional.relu nn.functional.relu6
nn.functional.selu nn.functional.sigmoid nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softmax
nn.functional.softmin nn.functional.softsign nn.functional.tanh nn.functional.tanhshrink
""".split()

_METHOD_ONLY = """
bfloat16 bool contiguous cpu dim double expand expand_as float half int long ndimension nelement new_full new_ones
new_zeros norm repeat size split to type_as view view_as
""".split()

_OPERATOR = """
abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor
""".split()

_MATH = """
acos asin atan atan2 ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot isfinite isinf isnan log log10
log1p log2 pow sin sinh sqrt tan tanh trunc
""".split()

_TENSOR = (*_UNARY, *_BINARY, *_REDUCTIONS, *_SHAPES, *_PRODUCTS)

GETATTR = "getattr"

TORCH_FUNCTIONS = frozenset(f"torch.{name}" for name in (*_TENSOR, *_TORCH_ONLY))
OPERATORS = frozenset(f"operator.{name}" for name in _OPERATOR)
MATH_FUNCTIONS = frozenset(f"math.{name}" for name in _MATH)
FUNCTIONS = TORCH_FUNCTIONS | OPERATORS | MATH_FUNCTIONS | {GETATTR}
"""Allowed targets of `call_function`."""

METHODS = frozenset((*_TENSOR, *_METHOD_ONLY))
"""Allowed targets of `call_method`; all are methods of a tensor."""

ATTRIBUTES = frozenset({"T", "device", "dtype", "indices", "mT", "ndim", "shape", "values"})
"""Attributes that `getattr` may read."""

CONSTANTS = {
    "dtype": frozenset({"bfloat16", "bool", "float16", "float32", "float64", "int32", "int64"}),
    "device": frozenset({"cpu"}),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}

WORDS = frozenset(
    """
    batchmean constant cpu floor fro higher linear lower mean midpoint nearest none reflect replicate sum tanh trunc
    """.split()
)
"""Allowed string arguments: kinds of reduction, rounding, interpolation and padding."""

FORBIDDEN_KEYWORDS = frozenset({"generator", "out", "pin_memory"})
"""Keyword arguments that must be absent or null."""

FORMAT = 1
MAX_INPUTS = 16
MAX_NODES = 512
MAX_GRAPH_BYTES = 256 * 1024
MAX_RANK = 2
MAX_METRICS = 64
_MAX_DEPTH = 6
_MAX_INTEGER = 2**63 - 1
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NODE_KEYS = frozenset({"op", "name", "target", "args", "kwargs"})
LOGPROBS = "logprobs"

Op = Literal["placeholder", "call_function", "call_method"]


@dataclass(frozen=True)
class Ref:
    """The value of an earlier node."""

    node: str


@dataclass(frozen=True)
class Constant:
    """A torch constant: its kind and name, such as `dtype` and `float32`."""

    kind: str
    text: str


Argument = Any
"""None, bool, int, float, str, Ref, Constant, Ellipsis, or a list, tuple, dict or slice of them."""


@dataclass(frozen=True)
class Input:
    """An input of the loss: its name, and its number of dimensions in every datum."""

    name: str
    rank: int


@dataclass(frozen=True)
class Node:
    """One operation of a loss.

    Attributes:
        op: Kind of operation.
        name: Name of the node.
        target: Name of the input, function or method.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    op: Op
    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.target})"


@dataclass(frozen=True)
class Graph:
    """A loss as a list of nodes, with references to the nodes that hold the results.

    Attributes:
        name: Name of the loss.
        inputs: Inputs, the first of them the log-probabilities.
        nodes: Nodes in order of execution, inputs first.
        loss: The node that holds the loss of a datum.
        metrics: Nodes by metric key, `custom/<name>:sum` or `custom/<name>:mean`.
    """

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


def described(graph: Graph, problem: str) -> str:
    """Formats an error about a loss for the author of the loss."""
    return f"custom loss {graph.name!r}: {problem}"


def parse(message: trainer_pb2.CustomLoss) -> Graph:
    """Parses and checks a traced loss. Raises InvalidInput, which names the node and the reason."""
    return _Parser(message.name[:80]).parse(message)


class _Parser:
    def __init__(self, name: str) -> None:
        self._name = name
        self._place = "graph"
        self._known: dict[str, None] = {}

    def parse(self, message: trainer_pb2.CustomLoss) -> Graph:
        inputs = tuple(self._inputs(message))
        raw = self._raw_nodes(message.graph)
        nodes: list[Node] = []
        for index, entry in enumerate(raw[:-1]):
            self._place = f"graph.nodes[{index}]"
            nodes.append(self._node(entry, index, inputs))
            self._known[nodes[-1].name] = None
        if len(nodes) < len(inputs):
            self._refuse(f"has {len(nodes)} nodes for {len(inputs)} inputs")
        self._place = f"graph.nodes[{len(raw) - 1}]"
        loss, metrics = self._output(raw[-1])
        return Graph(self._name, inputs, tuple(nodes), loss, metrics)

    def _refuse(self, problem: str, place: str = "") -> NoReturn:
        place = place or self._place
        # Names in the graph may contain characters that neither a log nor a gRPC status can carry.
        problem = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in problem)
        raise InvalidInput(f"custom loss {self._name!r}: {place} {problem}", field=place)

    def _inputs(self, message: trainer_pb2.CustomLoss) -> Iterator[Input]:
        if not 1 <= len(message.inputs) <= MAX_INPUTS:
            self._refuse(f"has {len(message.inputs)} entries; 1 to {MAX_INPUTS} are allowed", "inputs")
        names = [given.name for given in message.inputs]
        if names[0] != LOGPROBS or len(set(names)) < len(names):
            self._refuse(f"is {names}: the first must be {LOGPROBS}, and names must be unique", "inputs")
        for index, given in enumerate(message.inputs):
            place = f"inputs[{index}]"
            if not _INPUT_NAME.fullmatch(given.name):
                self._refuse(f"is named {given.name[:80]!r}; use lowercase letters, digits and underscores", place)
            if not (0 if index else 1) <= given.rank <= MAX_RANK:
                self._refuse(
                    f"({given.name}) has rank {given.rank}; it must be {0 if index else 1} to {MAX_RANK}", place
                )
            yield Input(given.name, given.rank)

    def _raw_nodes(self, blob: bytes) -> list[Any]:
        if len(blob) > MAX_GRAPH_BYTES:
            self._refuse(f"has {len(blob)} bytes; at most {MAX_GRAPH_BYTES} are allowed")
        try:
            graph = json.loads(blob, parse_constant=self._no_constant)
        except (ValueError, RecursionError) as error:
            self._refuse(f"is not JSON: {error}")
        if not isinstance(graph, dict) or graph.get("format") != FORMAT or set(graph) != {"format", "nodes"}:
            self._refuse(f"must be an object with format {FORMAT} and nodes")
        nodes = graph["nodes"]
        if not isinstance(nodes, list) or not 2 <= len(nodes) <= MAX_NODES:
            self._refuse(f"must be a list of 2 to {MAX_NODES} nodes", "graph.nodes")
        return nodes

    def _no_constant(self, text: str) -> NoReturn:
        raise ValueError(f"write {text} as {{'float': ...}}")

    def _node(self, entry: Any, index: int, inputs: tuple[Input, ...]) -> Node:
        op, name, target = self._head(entry)
        if name in self._known:
            self._refuse(f"has the same name as an earlier node, {name!r}")
        if (op == "placeholder") != (index < len(inputs)):
            self._refuse(f"is a {op}: exactly the first {len(inputs)} nodes must be the placeholders of the inputs")
        raw_args, raw_kwargs = entry.get("args", []), entry.get("kwargs", {})
        if op == "placeholder" and (target != inputs[index].name or raw_args or raw_kwargs):
            self._refuse(
                f"must be the placeholder of input {inputs[index].name!r}, without arguments; it is {target!r}"
            )
        self._check_target(op, name, target)
        args = tuple(self._argument(arg, 0) for arg in self._list(raw_args, "args"))
        kwargs = {key: self._argument(arg, 0) for key, arg in self._dict(raw_kwargs, "kwargs").items()}
        node = Node(cast(Op, op), name, target, self._attribute_args(target, args), kwargs)
        self._check_keywords(node)
        return node

    def _head(self, entry: Any) -> tuple[str, str, str]:
        if not isinstance(entry, dict) or not set(entry) <= _NODE_KEYS:
            self._refuse(f"must be an object with the keys {', '.join(sorted(_NODE_KEYS))}")
        parts = [entry.get(key) for key in ("op", "name", "target")]
        if not all(isinstance(part, str) and 0 < len(part) <= 200 for part in parts):
            self._refuse("must have op, name and target as non-empty strings of at most 200 characters")
        op, name, target = parts
        return op, name, target  # type: ignore[return-value]

    def _check_target(self, op: str, name: str, target: str) -> None:
        if op not in ("placeholder", "call_function", "call_method"):
            self._refuse(f"has op {op!r}, which is not allowed in a loss on the server")
        if op == "call_function" and target not in FUNCTIONS:
            self._refuse(f"({name}) calls {target}, which is not a function allowed on the server")
        if op == "call_method" and target not in METHODS:
            self._refuse(f"({name}) calls the method {target}, which is not allowed on the server")

    def _attribute_args(self, target: str, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
        if target == GETATTR and (len(args) != 2 or not isinstance(args[1], str) or args[1] not in ATTRIBUTES):
            self._refuse(f"reads {args[1:]}; allowed attributes are {', '.join(sorted(ATTRIBUTES))}")
        return args

    def _check_keywords(self, node: Node) -> None:
        for key, value in node.kwargs.items():
            if (key in FORBIDDEN_KEYWORDS and value is not None) or (key == "inplace" and value is not False):
                self._refuse(f"({node.name}) passes {key} to {node.target}, which is not allowed on the server")

    def _argument(self, raw: Any, depth: int) -> Argument:
        if depth > _MAX_DEPTH:
            self._refuse(f"has arguments nested deeper than {_MAX_DEPTH}")
        if isinstance(raw, list):
            return [self._argument(item, depth + 1) for item in raw]
        if isinstance(raw, dict):
            if len(raw) != 1:
                self._refuse(f"has an argument object with {len(raw)} keys; it must have exactly one")
            ((kind, value),) = raw.items()
            return self._tagged(kind, value, depth)
        if isinstance(raw, str) and raw not in WORDS and raw not in ATTRIBUTES:
            self._refuse(f"passes the string {raw[:80]!r}, which no operation on the server accepts")
        if isinstance(raw, int) and abs(raw) > _MAX_INTEGER:
            self._refuse("passes an integer outside the int64 range")
        return raw

    def _tagged(self, kind: str, value: Any, depth: int) -> Argument:
        match kind:
            case "ref":
                return self._ref(value)
            case "tuple":
                return tuple(self._argument(item, depth + 1) for item in self._list(value, kind))
            case "dict":
                return {key: self._argument(item, depth + 1) for key, item in self._dict(value, kind).items()}
            case "slice":
                bounds = [self._argument(item, depth + 1) for item in self._list(value, kind)]
                if len(bounds) != 3:
                    self._refuse(f"has a slice with {len(bounds)} elements; it must have 3")
                return slice(*bounds)
            case "ellipsis":
                return Ellipsis
            case "float" if value in ("inf", "-inf", "nan"):
                return float(value)
        if not isinstance(value, str) or value not in CONSTANTS.get(kind, ()):
            self._refuse(f"passes {kind} {str(value)[:80]!r}, which is not allowed on the server")
        return Constant(kind, value)

    def _ref(self, value: Any) -> Ref:
        if not isinstance(value, str) or value not in self._known:
            self._refuse(f"refers to {str(value)[:80]!r}, which is not an earlier node")
        return Ref(value)

    def _output(self, entry: Any) -> tuple[Ref, dict[str, Ref]]:
        op, _, _ = self._head(entry)
        if op != "output":
            self._refuse(f"is a {op}: the last node must be the output")
        args = [self._argument(arg, 0) for arg in self._list(entry.get("args", []), "args")]
        returned = args[0] if len(args) == 1 else None
        if not isinstance(returned, list | tuple) or len(returned) != 2:
            self._refuse("must return a loss and metrics")
        loss, metrics = returned
        if not isinstance(loss, Ref) or not isinstance(metrics, dict):
            self._refuse("must return a reference to a node as loss, and a dict of metrics")
        if len(metrics) > MAX_METRICS:
            self._refuse(f"returns {len(metrics)} metrics; at most {MAX_METRICS} are allowed")
        for key, value in metrics.items():
            if not _METRIC_KEY.fullmatch(key) or not isinstance(value, Ref):
                self._refuse(
                    f"returns the metric {key[:80]!r}; its name must be custom/<name>:sum or :mean, and its "
                    "value a node"
                )
        return loss, metrics

    def _list(self, raw: Any, what: str) -> list[Any]:
        if not isinstance(raw, list):
            self._refuse(f"has {what} that are not a list")
        return raw

    def _dict(self, raw: Any, what: str) -> dict[str, Any]:
        if not isinstance(raw, dict):
            self._refuse(f"has {what} that are not an object")
        return raw
