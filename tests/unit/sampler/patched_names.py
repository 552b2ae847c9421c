"""Compares what Fovea imports and patches in another version of vLLM with the installed one, by their sources alone.

`python -m tests.unit.sampler.patched_names FOLDER`, for a folder with an unpacked wheel, prints a line for each name
that is missing, takes other arguments, or has code for which Fovea's patch was not written. The exit code is 1 if there
is one.
"""

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

WRITTEN_AGAINST = {
    "vllm.lora.model_manager:LoRAModelManager._create_lora_modules": "3b6853ab5df5bc19 f94825f6e20595db",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.create_lora_weights": "5e7977e40efdbbed",
    "vllm.v1.engine.input_processor:InputProcessor._get_mm_identifier": "d644b95a5629d796",
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters": "17305484708fe89a",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_linear": "ce7d3860a194211d",
    "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta.prepare_tensors": "73a6f5453d696742",
    "vllm.lora.layers.fused_moe:FusedMoEWithLoRA.set_lora": "414a3ed95b69dbc3",
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA.create_lora_weights": "95a26fe046bf88f3",
    "vllm.lora.model_manager:LoRAModelManager._get_punica_wrapper": "932915972fb830e2",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec": "b615d66aa36074b4",
    "vllm.lora.model_manager:LoRAModelManager.activate_adapter": "b3273d9fb8465a00 9547ae064822186a",
    "vllm.lora.model_manager:LoRAModelManager._add_adapter": "6a8993c934882a65",
    "vllm.lora.model_manager:LoRAModelManager._slice_moe_lora_ep": "8639fb4bea3acb63",
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter": "fa48015699b08b1c",
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": "8aac6e6c6c9fc452 2b23d6c19a38bede",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_logits": "09ad711cba536905",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar": "126b089c123c8f84 625937bd5be57aef",
    "vllm.sampling_params:SamplingParams._validate_structured_outputs": "f2dcbb7a6324cb44",
    "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing": "4aa83c9727b0b901",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids": "ac43ccfaa22654cd",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": "38db4d83ca9a5cd4",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs": "d78ca68bb42e6278 51c3052cb33a8989",
    "vllm.v1.worker.gpu_worker:Worker.load_model": "af77cf06693df999",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": "736c17082fb56b4f",
    "vllm.model_executor.custom_op:CustomOp.forward": "fcb6490e1a777f42",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": "141d17cea9b15596",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "a7d9800e11e0c9b7",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "8bbaa064e94ac8b5",
}
"""Digests of vLLM 0.32.0's own code, and of 0.33.0's where it differs and the patch is right for both."""

FOVEA = Path(__file__).parents[3] / "services/sampler/fovea_sampler"
Sources = Callable[[str], str | None]
"""Returns the source of a module of vLLM, None for an unknown module."""
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def installed(module: str) -> str | None:
    """Returns the source of a module of the installed vLLM. It imports the module's parents."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).read_text() if spec is not None and spec.origin is not None else None


def in_folder(folder: Path) -> Sources:
    """Returns the sources of an unpacked wheel."""

    def read(module: str) -> str | None:
        path = folder / module.replace(".", "/")
        found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        return found[0].read_text() if found else None

    return read


def differences(sources: Sources) -> list[str]:
    """Returns a line for each name in which another vLLM differs from the installed one."""
    lines = [f"{name} is missing" for name in sorted(imported_names()) if not _exists(sources, name)]
    for name in sorted({*WRITTEN_AGAINST, *overridden_methods()}):
        before, after = node_of(installed, name), node_of(sources, name)
        assert before is not None, f"the installed vLLM has no {name}"
        if after is None:
            lines.append(f"{name} is missing")
        elif _arguments(before) != _arguments(after):
            lines.append(f"{name} takes {_arguments(after)} instead of {_arguments(before)}")
        elif name in WRITTEN_AGAINST and (digest := digest_of(sources, name)) not in WRITTEN_AGAINST[name].split():
            lines.append(
                f"{name} has changed: see whether the patch is still needed and still right, then add {digest}"
            )
    return lines


def imported_names() -> set[str]:
    """Returns what the sampler imports from vLLM, and what its patches say that they replace, as `module:path`."""
    found = {f"{module}:{name}" for tree in _trees() for module, name in _imports(tree).values()}
    for replaced in re.findall(r"^Replaces:.*?\n(?=[A-Z]\w+:)", "\n".join(_docstrings()), re.MULTILINE | re.DOTALL):
        found |= {_split(name) for name in re.findall(r"`(vllm\.[\w.]+)`", replaced)}
    return found


def overridden_methods() -> set[str]:
    """Returns the methods of vLLM's classes that the sampler's subclasses override, as `module:Class.method`."""
    found = set()
    for tree in _trees():
        imports = _imports(tree)
        for own in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            names = {node.id for base in own.bases for node in ast.walk(base) if isinstance(node, ast.Name)}
            methods = [node.name for node in own.body if isinstance(node, ast.FunctionDef)]
            places = [":".join(imports[name]) for name in names & imports.keys()]
            found |= {f"{place}.{method}" for place in places for method in methods if method != "__init__"}
    return {name for name in found if node_of(installed, name) is not None}


def node_of(sources: Sources, name: str) -> Node | None:
    """Returns the class or function `module:Class.method`, None if it does not exist."""
    module, _, path = name.partition(":")
    text = sources(module)
    found: Node | None = None
    body = _parsed(text).body if text is not None else []
    for part in path.split("."):
        named = [node for node in body if isinstance(node, Node) and node.name == part]
        if not named:
            return None
        found, body = named[-1], named[-1].body
    return found


def code_of(sources: Sources, name: str) -> str:
    """Returns the lines of `module:Class.method` without its docstring. Raises AssertionError if it does not exist."""
    found = node_of(sources, name)
    assert found is not None, f"vLLM has no {name} any more: see whether the patch is still needed"
    first, text = found.body[0], sources(name.partition(":")[0])
    assert text is not None
    docstring = ast.get_docstring(found) is not None
    left_out = range(first.lineno - 1, first.end_lineno or 0) if docstring else range(0)
    whole, lines = range(found.lineno - 1, found.end_lineno or 0), text.splitlines()
    return "\n".join(lines[number].strip() for number in whole if number not in left_out)


def digest_of(sources: Sources, name: str) -> str:
    """Returns the digest of the code of `module:Class.method`."""
    return hashlib.sha256(code_of(sources, name).encode()).hexdigest()[:16]


def _exists(sources: Sources, name: str) -> bool:
    module, _, path = name.partition(":")
    text = sources(module)
    if text is None or not path:
        return text is not None
    if sources(f"{module}.{path}") is not None or node_of(sources, name) is not None:
        return True
    # Variables, and what the module imports itself. Of a class, it may inherit what is patched.
    return re.search(rf"\b{path.partition('.')[0]}\b", text) is not None


def _arguments(node: Node) -> str:
    return "" if isinstance(node, ast.ClassDef) else re.sub(r": [^,=]*(?=,|=|$)", "", ast.unparse(node.args))


_parsed = cache(ast.parse)


@cache
def _trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted(FOVEA.rglob("*.py"))]


def _docstrings() -> Iterator[str]:
    return (f"{ast.get_docstring(tree)}\n" for tree in _trees())


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Returns the module and the name of each import from vLLM, by the name in Fovea's module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            found |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
    return found


def _split(dotted: str) -> str:
    """Returns `module:path` of a dotted name; the module is the longest that the installed vLLM has."""
    parts = dotted.split(".")
    for count in range(len(parts), 1, -1):
        if installed(".".join(parts[:count])) is not None:
            return f"{'.'.join(parts[:count])}:{'.'.join(parts[count:])}"
    return f"{dotted}:"


if __name__ == "__main__":
    found = differences(in_folder(Path(sys.argv[1])))
    print("\n".join(found) or f"{len(imported_names())} names exist, {len(WRITTEN_AGAINST)} have known code")
    sys.exit(bool(found))
