from collections.abc import Callable
from dataclasses import replace

from afd_compiler.outcome import Outcome
from afd_compiler.pipeline import compile_family
from afd_compiler.source import SourceTree
from afd_compiler.tables import models_table, releases_table
from tests.compiler.conftest import TINY, CompileTiny

REFUSED = ("            hidden_states = self.ffn(hidden_states)\n", "            hidden_states = self.ffn(self.ffn)\n")


def of_release(outcome: Outcome, release: str, platform: str = "cpu") -> Outcome:
    return replace(outcome, origin=replace(outcome.origin, release=release, platform=platform))


def test_platforms_with_the_same_verdict_share_a_row(compile_tiny: CompileTiny) -> None:
    proved, refused = compile_tiny(), compile_tiny(REFUSED)
    platforms = [of_release(proved, "9.9.9"), of_release(proved, "9.9.9", "cuda"), of_release(refused, "9.9.9", "npu")]
    lines = models_table(platforms).splitlines()
    assert lines[0] == "# Models of vLLM 9.9.9"
    assert lines[2].startswith(
        "Layers proved: cpu 1 of 1; cuda 1 of 1; npu 0 of 1; by `afd-compile --all --vllm 9.9.9 "
    )
    assert lines[-2].startswith(
        "| tiny | TinyDecoderLayer | cpu, cuda | proved | vllm/model_executor/models/tiny.py:69"
    )
    assert lines[-1].startswith("| tiny | TinyDecoderLayer | npu | refused | ")


def test_a_release_counts_what_any_platform_proves_and_not_what_it_lacks(
    compile_tiny: CompileTiny, tiny_tree: Callable[..., SourceTree]
) -> None:
    proved, refused = compile_tiny(), compile_tiny(REFUSED)
    unknown = TINY.model_copy(update={"family": "other", "architectures": ("OtherForCausalLM",)})
    missing = compile_family(unknown, tiny_tree(), "cpu")
    outcomes = [
        *(of_release(proved, release) for release in ("1.0.0", "1.1.0", "1.3.0")),
        of_release(refused, "1.2.0"),
        of_release(proved, "1.1.0", "cuda"),
        of_release(refused, "1.0.0", "cuda"),
        *(of_release(missing, release) for release in ("1.0.0", "1.1.0", "1.2.0", "1.3.0")),
    ]
    ordered = sorted(outcomes, key=lambda outcome: outcome.origin.release)
    table = releases_table(ordered).splitlines()
    assert table[2:3] == [
        "Proved on at least one of cpu, cuda; a layer is a class in a file. Written by "
        "`afd-compile --all --vllm all --platform cpu --platform cuda --table`."
    ]
    assert table[4:10] == [
        "| vLLM | families proved | layers proved | of | families refused |",
        "| --- | --- | --- | --- | --- |",
        "| 1.0.0 | 1 | 1 | 1 | - |",
        "| 1.1.0 | 1 | 1 | 1 | - |",
        "| 1.2.0 | 0 | 0 | 1 | tiny |",
        "| 1.3.0 | 1 | 1 | 1 | - |",
    ]
    assert table[-1] == "| tiny | 1.0.0 to 1.1.0, 1.3.0 | 1.2.0 |"
