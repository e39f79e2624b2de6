import sys
from collections.abc import Callable

from afd_compiler.classes import classify
from afd_compiler.constructs import Constructs
from afd_compiler.effects import forward_nodes, is_effect
from afd_compiler.expressions import target_name
from afd_compiler.sandbox import Sandbox
from afd_compiler.source import SourceTree
from afd_compiler.spec import Spec, load_spec
from afd_compiler.symbols import Symbols
from afd_compiler.trace import Trace, trace

from .conftest import TINY


def trace_all(tree: SourceTree, spec: Spec = TINY) -> tuple[Trace, ...]:
    symbols = Symbols(tree, "cpu")
    classes = classify(spec, Constructs(symbols))
    sandbox = Sandbox(symbols, classes.opened)
    sandbox.make_leaves([layer.symbol for layer in classes.layers])
    return tuple(variant for layer in classes.layers for variant in trace(layer, sandbox))


def effects(variant: Trace) -> list[str]:
    return [target_name(node.target) for node in forward_nodes(variant.graph) if is_effect(node)]


def test_the_variants_are_all_combinations_of_the_questions_asked(tiny_tree: Callable[..., SourceTree]) -> None:
    moe, dense = "self_attn=TinyAttention, ffn=TinyMoE", "self_attn=TinyAttention, ffn=TinyMLP"
    flags = ("self.flag", "not (self.flag)")
    residuals = ("residual is None", "not (residual is None)")
    dtypes = ("dtype == torch.float16", "not (dtype == torch.float16)")
    wanted = {f"{moe}, {residual}, {flag}" for residual in residuals for flag in flags}
    wanted |= {f"{dense}, {residual}, {flag}, {dtype}" for residual in residuals for flag in flags for dtype in dtypes}
    assert {variant.name for variant in trace_all(tiny_tree())} == wanted


def test_effects_keep_their_order_and_in_place_operators_stay_in_place(tiny_tree: Callable[..., SourceTree]) -> None:
    scaled = next(v for v in trace_all(tiny_tree()) if "TinyMLP" in v.name and "not (dtype" not in v.name)
    assert effects(scaled) == ["norm1", "self_attn", "norm2", "ffn", "_operator.imul"]


def test_nodes_carry_the_line_of_the_source(tiny_tree: Callable[..., SourceTree]) -> None:
    variant = trace_all(tiny_tree())[0]
    lines = {str(node.target): variant.locations[node].line for node in variant.graph.nodes if node.op == "call_module"}
    assert lines == {"norm1": 63, "self_attn": 66, "norm2": 67, "ffn": 69}


def test_children_are_known_by_class_and_arguments(tiny_tree: Callable[..., SourceTree]) -> None:
    variant = next(v for v in trace_all(tiny_tree()) if "TinyMLP" in v.name)
    child = variant.children["ffn"]
    assert (child.class_name, child.arguments) == (
        "TinyMLP",
        ("vllm_config.model_config.hf_config.size", "prefix='prefix.ffn'"),
    )


def test_paths_that_upstream_itself_refuses_are_no_variants(tiny_tree: Callable[..., SourceTree]) -> None:
    check = "        self.scale = config.scale\n"
    refusing = (check, f"{check}        if config.act != 'silu':\n            raise ValueError(config.act)\n")
    assert [v.name for v in trace_all(tiny_tree(refusing))] == [v.name for v in trace_all(tiny_tree())]


def test_the_same_source_gives_the_same_variants_in_the_same_order(release_tree: SourceTree) -> None:
    first, second = (trace_all(release_tree, load_spec("deepseek_v2")) for _ in range(2))
    assert [variant.name for variant in first] == [variant.name for variant in second]
    assert len({variant.name for variant in first}) == len(first)


def test_a_set_of_the_source_is_run_through_in_the_same_order_in_every_process(
    tiny_tree: Callable[..., SourceTree],
) -> None:
    tree = tiny_tree(
        ("        self.flag = config.flag\n",
         "        keys = {'sigma', 'tau', 'rho', 'psi', *('phi', 'chi')}\n"
         "        self.flag = config.flag if any(getattr(config, key) for key in keys) else None\n"),
    )  # fmt: skip
    longest = max((text for variant in trace_all(tree) for text in variant.constructions), key=len)
    positions = [longest.index(f"'{key}'") for key in ("chi", "phi", "psi", "rho", "sigma", "tau")]
    assert positions == sorted(positions)


def test_an_installed_vllm_is_neither_imported_nor_replaced(tiny_tree: Callable[..., SourceTree]) -> None:
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    trace_all(tiny_tree())
    assert {name for name in sys.modules if name.partition(".")[0] == "vllm"} == before
