"""Generate with vLLM's `LLM` and no AFD settings, and print as JSON what came out and what of vLLM is not vLLM's own.

`python generate_plainly.py CHECKPOINT PROMPT`. A program of its own, because plugins act on a whole process.
"""

import json
import sys
import types
from collections.abc import Iterator


def functions_of(namespace: dict[str, object], name: str) -> Iterator[tuple[str, types.FunctionType]]:
    """Functions and methods in a module or class, as qualified name and function; wrappers are not unwrapped."""
    for key, value in list(namespace.items()):
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(inner, types.FunctionType):
            yield f"{name}.{key}", inner
        elif isinstance(value, type) and value.__module__ == name:
            yield from functions_of(dict(vars(value)), f"{name}.{value.__name__}")


def replaced(_worker: object = None) -> list[str]:
    """Qualified names in vLLM's loaded modules whose code is ours."""
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"}
    return sorted(
        name
        for module_name, module in modules.items()
        for name, function in functions_of(vars(module), module_name)
        if "afd_runtime" in function.__code__.co_filename
    )


def loaded(_worker: object = None) -> list[str]:
    """Modules of ours that were imported."""
    return sorted(
        name for name in sys.modules if name.split(".")[0] in ("afd_runtime", "afd_generated", "afd_compiler")
    )


def main(checkpoint: str, prompt: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 2**20,
        num_gpu_blocks_override=64,
        seed=0,
    )
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True))
    (sequence,) = output.outputs
    logprobs = [{token: entry.logprob for token, entry in position.items()} for position in sequence.logprobs]
    result = {
        "tokens": list(sequence.token_ids),
        "logprobs": logprobs,
        "worker": llm.llm_engine.vllm_config.parallel_config.worker_cls,
        "architectures": llm.llm_engine.vllm_config.model_config.hf_config.architectures,
        "replaced": {"front": replaced(), "worker": llm.collective_rpc(replaced)[0]},
        "loaded": {"front": loaded(), "worker": llm.collective_rpc(loaded)[0]},
    }
    print("RESULT " + json.dumps(result, sort_keys=True), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
