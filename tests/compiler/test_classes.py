from collections.abc import Callable

import pytest

from afd_compiler.classes import classify
from afd_compiler.constructs import Constructs, GlobalName
from afd_compiler.source import SourceTree
from afd_compiler.spec import load_spec
from afd_compiler.symbols import SymbolKind, Symbols

from .conftest import TINY, TINY_FILE

FAMILY = load_spec("deepseek_v2")


def tiny(name: str) -> GlobalName:
    return GlobalName(TINY.module, name)


def test_what_the_tiny_model_is_made_of(tiny_tree: Callable[..., SourceTree]) -> None:
    classes = classify(TINY, Constructs(Symbols(tiny_tree(), "cpu")))
    (layer,) = classes.layers
    assert (layer.name, layer.location.file) == ("TinyDecoderLayer", TINY_FILE)
    assert (layer.attention_children, layer.moe_children, layer.dense_children) == (("self_attn",), ("ffn",), ())
    assert layer.arguments == ("vllm_config", "prefix")
    assert dict(layer.modules)["ffn"] == (tiny("TinyMoE"), tiny("TinyMLP"))
    assert layer.expert_names == (tiny("TinyMoE"),)
    assert classes.opened == (TINY.module,)
    assert classes.model_modules == (("embed_tokens", (tiny("Embedding"),)), ("norm", (tiny("RMSNorm"),)))


ALIASES = {
    "a local name": "        kind = TinyMoE\n        if not config.is_moe:\n            kind = TinyMLP\n",
    "a conditional expression": "        kind = TinyMoE if config.is_moe else TinyMLP\n",
}


@pytest.mark.parametrize("how", ALIASES)
def test_aliases_of_a_constructor_are_followed(tiny_tree: Callable[..., SourceTree], how: str) -> None:
    old = (
        "        if config.is_moe:\n"
        '            self.ffn = TinyMoE(config, prefix=f"{prefix}.ffn")\n'
        "        else:\n"
        '            self.ffn = TinyMLP(config.size, prefix=f"{prefix}.ffn")\n'
    )
    classes = classify(
        TINY, Constructs(Symbols(tiny_tree((old, f"{ALIASES[how]}        self.ffn = kind(config, prefix)\n")), "cpu"))
    )
    (layer,) = classes.layers
    assert layer.moe_children == ("ffn",)
    assert dict(layer.modules)["ffn"] == (tiny("TinyMoE"), tiny("TinyMLP"))


def test_the_family_in_each_release(release_tree: SourceTree) -> None:
    classes = classify(FAMILY, Constructs(Symbols(release_tree, "cpu")))
    assert classes.elsewhere == ()
    assert [name for name, _ in classes.architectures] == list(FAMILY.architectures)
    (layer,) = classes.layers
    assert (layer.attention_children, layer.moe_children) == (("self_attn",), ("mlp",))
    assert [name for name, _ in classes.model_modules] == ["embed_tokens", "lm_head", "logits_processor", "norm"]


def test_a_platform_that_takes_an_architecture_from_another_file(release_tree: SourceTree) -> None:
    classes = classify(FAMILY, Constructs(Symbols(release_tree, "cuda")))
    place = "vllm.models.deepseek_v32.nvidia.model.DeepseekV32ForCausalLM"
    moved = {"0.32.0": {"DeepseekV32ForCausalLM": place, "GlmMoeDsaForCausalLM": place}}
    assert dict(classes.elsewhere) == moved.get(release_tree.release, {})


def test_names_are_followed_through_star_imports_and_cycles_end(tiny_tree: Callable[..., SourceTree]) -> None:
    tree = tiny_tree(
        **{
            "vllm/a.py": "from vllm.b import *\nfrom vllm.a import loop\n",
            "vllm/b.py": "from .c import Thing as Other\n",
            "vllm/c.py": "class Thing: ...\n",
        }
    )
    symbols = Symbols(tree, "cpu")
    assert (str(found := symbols.resolve("vllm.a", "Other")), found.kind) == ("vllm.c.Thing", SymbolKind.CLASS)
    assert symbols.resolve("vllm.a", "loop").kind is SymbolKind.UNKNOWN


def test_a_class_that_derives_from_an_import_of_its_own_name(tiny_tree: Callable[..., SourceTree]) -> None:
    files = {"vllm/a.py": "from vllm.c import Thing\nclass Thing(Thing): ...\n", "vllm/c.py": "class Thing: ...\n"}
    symbols = Symbols(tiny_tree(**files), "cpu")
    assert list(map(str, symbols.bases(symbols.resolve("vllm.a", "Thing")))) == ["vllm.c.Thing"]
