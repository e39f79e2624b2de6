"""Golden files are the checked-in wrappers themselves: bytes for the reviewer, proof for the machine."""

from collections.abc import Callable
from pathlib import Path

import pytest

import afd_generated
from afd_compiler.outcome import Compiled
from afd_compiler.pipeline import compile_family
from afd_compiler.report import drift_of, files_of, module_text
from afd_compiler.source import SourceTree, find_source
from afd_compiler.spec import load_spec
from afd_runtime.manifest import read_manifest

from .conftest import CompileTiny

GENERATED = Path(afd_generated.__file__).parent
GOLDEN = Path(__file__).parent / "golden"


WRAPPERS = sorted(path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("vllm_*/*.json"))
EVERY = 6
"""The share of the wrappers that this suite compiles again; `make check` compiles all of them."""


@pytest.mark.parametrize("wrapper", WRAPPERS[::EVERY])
def test_checked_in_wrappers_are_what_the_compiler_writes(wrapper: str) -> None:
    manifest = read_manifest(GENERATED / wrapper)
    outcome = compile_family(load_spec(manifest.family), find_source(manifest.vllm), "cpu")
    assert isinstance(outcome, Compiled), outcome
    assert drift_of(files_of(outcome), GENERATED) == ()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_can_be_read_in_a_minute(wrapper: str) -> None:
    """At most 120 lines for a family with one kind of layer, and half as many for each further kind."""
    manifest = read_manifest(GENERATED / wrapper)
    lines = (GENERATED / wrapper).with_suffix(".py").read_text().splitlines()
    assert len(lines) <= 60 + 60 * len(manifest.layers)


def test_the_tiny_model(compile_tiny: CompileTiny) -> None:
    outcome = compile_tiny()
    assert isinstance(outcome, Compiled), outcome
    assert module_text(outcome) == (GOLDEN / "tiny.py").read_text()


def test_what_follows_the_ffn_alone_goes_with_it(compile_tiny: CompileTiny) -> None:
    last = "        return hidden_states, residual\n\n\nclass TinyModel"
    doubled = "        if isinstance(self.ffn, TinyMoE):\n            hidden_states = torch.tanh(hidden_states)\n"
    outcome = compile_tiny((last, doubled + last))
    assert isinstance(outcome, Compiled), outcome
    assert "hidden_states = torch.tanh(hidden_states)" in outcome.text
    assert dict(outcome.layers[0].cut.owners) == {
        "self_attn": "attention",
        "norm1": "attention",
        "norm2": "attention",
        "ffn": "ffn",
    }


def test_emitted_text_names_nothing_of_the_machine(
    compile_tiny: CompileTiny, tiny_tree: Callable[..., SourceTree], tmp_path: Path
) -> None:
    outcome = compile_tiny()
    assert isinstance(outcome, Compiled), outcome
    for file in files_of(outcome):
        assert str(tmp_path) not in file.text


def test_a_submodule_whose_class_is_a_class_attribute(compile_tiny: CompileTiny) -> None:
    """No global name is looked up when it is built, so the emitted layer overrides the attribute."""
    outcome = compile_tiny(
        ("class TinyDecoderLayer(nn.Module):\n", "class TinyDecoderLayer(nn.Module):\n    moe_cls: type = TinyMoE\n\n"),
        (
            'self.ffn = TinyMoE(config, prefix=f"{prefix}.ffn")',
            'self.ffn = self.moe_cls(config, prefix=f"{prefix}.ffn")',
        ),
        (
            '            self.ffn = TinyMLP(config.size, prefix=f"{prefix}.ffn")\n',
            "            raise ValueError(config)\n",
        ),
    )
    assert isinstance(outcome, Compiled), outcome
    assert "class AttentionTinyDecoderLayer(upstream.TinyDecoderLayer):\n    moe_cls = RemoteFfn\n" in outcome.text


def test_a_submodule_whose_class_is_the_default_of_a_parameter_of_the_layer(compile_tiny: CompileTiny) -> None:
    """The default was evaluated before any name is bound, and upstream's model does not pass the argument."""
    outcome = compile_tiny(
        ("vllm_config, prefix, quant_config=None):\n", "vllm_config, prefix, kind=TinyAttention):\n"),
        ("self.self_attn = TinyAttention(config)", "self.self_attn = kind(config)"),
    )
    assert isinstance(outcome, Compiled), outcome
    assert "with bind(upstream, RMSNorm=Unowned), bind_default(self, kind=Unowned):\n" in outcome.text
    assert outcome.text.count("bind_default(") == 1


def test_a_layer_class_that_is_a_parameter_of_the_model(compile_tiny: CompileTiny) -> None:
    """The default was evaluated before any name is bound, so the emitted role passes the argument."""
    outcome = compile_tiny(
        ('class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""):',
         'class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix="", kind=TinyDecoderLayer):'),
        ("TinyDecoderLayer(vllm_config, prefix=prefix)", "kind(vllm_config, prefix=prefix)"),
    )  # fmt: skip
    assert isinstance(outcome, Compiled), outcome
    assert "TinyModel=partial(upstream.TinyModel, kind=FFNTinyDecoderLayer)," in outcome.text


def test_a_layer_class_that_is_a_parameter_of_the_causal_lm(compile_tiny: CompileTiny) -> None:
    head = 'class TinyForCausalLM(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""'
    outcome = compile_tiny(
        (f"{head}):", f"{head}, kind=TinyDecoderLayer):"),
        ("TinyModel(vllm_config=vllm_config)", "TinyModel(vllm_config=vllm_config, kind=kind)"),
        ('class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix=""):',
         'class TinyModel(nn.Module):\n    def __init__(self, *, vllm_config, prefix="", kind=TinyDecoderLayer):'),
        ("TinyDecoderLayer(vllm_config, prefix=prefix)", "kind(vllm_config, prefix=prefix)"),
    )  # fmt: skip
    assert isinstance(outcome, Compiled), outcome
    assert "super().__init__(vllm_config=vllm_config, prefix=prefix, kind=AttentionTinyDecoderLayer)" in outcome.text


def test_work_that_attention_would_repeat_is_outlined(compile_tiny: CompileTiny) -> None:
    """What follows the FFN under a condition of the layer's own cannot be inherited: the statements become one."""
    init, last = "        self.norm1 = ", "            hidden_states *= 1.0 / self.scale\n"
    outcome = compile_tiny(
        (init, f"        self.reduce = config.reduce\n{init}"),
        (last, f"{last}        if self.reduce:\n            hidden_states = all_reduce(hidden_states)\n"),
    )
    assert isinstance(outcome, Compiled), outcome
    attention, ffn = outcome.text.split("class FFNTinyDecoderLayer")
    assert "class AttentionTinyDecoderLayer(OutlinedLayer, upstream.TinyDecoderLayer)" in attention
    assert "        hidden_states = self.exchange(hidden_states)\n        return hidden_states, residual\n" in attention
    assert "upstream.all_reduce(hidden_states)" in ffn
    assert "all_reduce" not in attention


def test_two_kinds_of_layers_in_a_table(compile_tiny: CompileTiny) -> None:
    """The table was filled before any name is bound, so each role has its own."""
    outcome = compile_tiny(
        (
            "class TinyModel(",
            "class OtherDecoderLayer(TinyDecoderLayer):\n    pass\n\n\n"
            'KINDS = {"one": TinyDecoderLayer, "other": OtherDecoderLayer}\n\n\nclass TinyModel(',
        ),
        ("TinyDecoderLayer(vllm_config, prefix=prefix)", "KINDS[vllm_config.kind](vllm_config, prefix=prefix)"),
    )
    assert isinstance(outcome, Compiled), outcome
    assert [item.layer.name for item in outcome.layers] == ["TinyDecoderLayer", "OtherDecoderLayer"]
    table = 'KINDS={**upstream.KINDS, "one": FFNTinyDecoderLayer, "other": FFNOtherDecoderLayer}'
    assert table in " ".join(outcome.text.split())


def test_what_the_model_reads_off_its_experts_is_none_on_attention(compile_tiny: CompileTiny) -> None:
    whole = "        self.model = TinyModel(vllm_config=vllm_config)\n"
    outcome = compile_tiny(
        (
            whole,
            f"{whole}        held = [layer.ffn for layer in self.model.layers if isinstance(layer.ffn, TinyMoE)]\n"
            "        if not held:\n            raise RuntimeError('no experts')\n"
            "        self.count = held[0].count\n",
        ),
    )
    assert isinstance(outcome, Compiled), outcome
    assert "    count = None\n" in outcome.text
    assert "with bind(upstream, TinyDecoderLayer=AttentionTinyDecoderLayer, TinyMoE=RemoteFfn):" in outcome.text


def test_a_name_that_the_ffn_needs_itself_is_bound_around_it_only(compile_tiny: CompileTiny) -> None:
    """The experts' own norm is built natively while attention's norms are not built."""
    experts = "        self.experts = FusedMoE(config.num_experts)\n"
    outcome = compile_tiny((experts, f"{experts}        self.norm = RMSNorm(config.size)\n"))
    assert isinstance(outcome, Compiled), outcome
    assert 'TinyMoE=owned(upstream, "TinyMoE")' in outcome.text


MASKED = (
    ("self.ffn(hidden_states, scaled=True)", "self.ffn(hidden_states, mask=positions, scaled=True)"),
    ("self.ffn(hidden_states)", "self.ffn(hidden_states, mask=positions)"),
)


def test_an_input_of_the_model_goes_with_the_hidden_states(compile_tiny: CompileTiny) -> None:
    outcome = compile_tiny(*MASKED)
    assert isinstance(outcome, Compiled), outcome
    assert "#           attention->ffn: positions[tokens, ...] in its own dtype\n" in module_text(outcome)
    assert (
        "    def forward(self, hidden_states, mask=None, scaled=False):\n"
        "        return self.exchange(hidden_states, mask)\n"
    ) in outcome.text
    assert '    extras = ("positions",)\n' in outcome.text
    assert "    def forward(self, hidden_states, positions):\n" in outcome.text


def test_only_experts_move_where_dense_layers_send_less(compile_tiny: CompileTiny) -> None:
    """Upstream asks for the class; on attention that is the stand-in's."""
    flag, call = "        if self.flag:\n", "            hidden_states = self.ffn(hidden_states, positions)\n"
    outcome = compile_tiny((flag, f"        if isinstance(self.ffn, TinyMoE):\n{call}        elif self.flag:\n"))
    assert isinstance(outcome, Compiled), outcome
    assert f"        if isinstance(self.ffn, RemoteFfn):\n{call}" in outcome.text
    assert "with bind(upstream, TinyMoE=RemoteFfn):" in outcome.text
    assert "TinyMLP=Unowned" in outcome.text
    assert dict(outcome.layers[0].cut.owners)["ffn=TinyMLP"] == "attention"


def test_a_sum_that_is_left_out_is_taken_by_the_ffn(compile_tiny: CompileTiny) -> None:
    """Both values of the flag are variants: the stand-in gives parts exactly where upstream's FFN does."""
    outcome = compile_tiny(
        ("TinyMLP(config.size, prefix=", "TinyMLP(config.size, reduce_results=config.whole, prefix="),
        ("if isinstance(self.ffn, TinyMLP) and hidden_states.dtype == torch.float16:", "if False:"),
    )
    assert isinstance(outcome, Compiled), outcome
    assert "class RemoteFfn(RemoteSum):" in outcome.text
    assert 'TinyMLP=owned(upstream, "TinyMLP", reduce_results=True),' in outcome.text
    names = " ".join(outcome.layers[0].proof.variants)
    assert len(outcome.layers[0].proof.variants) == 12, names


def test_what_a_layer_sets_inside_its_attention(compile_tiny: CompileTiny) -> None:
    init = "        self.norm1 = "
    outcome = compile_tiny((init, f"        self.self_attn.out.reduce_results = False\n{init}"))
    assert isinstance(outcome, Compiled), outcome
    assert "class AbsentAttention(Unowned):\n    out = property(Inert)\n" in outcome.text
    assert "TinyAttention=AbsentAttention" in outcome.text


def test_a_norm_that_the_constructor_reads_is_on_both_roles(compile_tiny: CompileTiny) -> None:
    norms = "        self.norm2 = RMSNorm(config.size)\n"
    outcome = compile_tiny((norms, f"{norms}        vllm_config.warm_up(eps=self.norm1.eps)\n"))
    assert isinstance(outcome, Compiled), outcome
    assert 'RMSNorm=owned(upstream, "RMSNorm")' in outcome.text
    assert '    shared = ("norm1", "norm2")\n' in outcome.text
    assert dict(outcome.layers[0].cut.owners)["norm1"] == "both"


def test_a_module_of_torchs_own_is_on_both_roles(compile_tiny: CompileTiny) -> None:
    init, attention = "        self.norm1 = ", "        hidden_states = self.self_attn(positions, hidden_states)\n"
    outcome = compile_tiny(
        (init, f"        self.first = nn.LayerNorm(config.size)\n{init}"),
        (attention, f"        hidden_states = self.first(hidden_states)\n{attention}"),
    )
    assert isinstance(outcome, Compiled), outcome
    assert dict(outcome.layers[0].cut.owners)["first"] == "both"
    assert '    shared = ("first",)\n' in outcome.text


def test_an_attribute_that_the_model_sets_later_is_unknown(compile_tiny: CompileTiny) -> None:
    init, norm = "        self.norm1 = ", "        self.norm = RMSNorm(vllm_config)\n"
    outcome = compile_tiny(
        (init, f"        self.last = False\n{init}"),
        (norm, f"{norm}        for layer in self.layers:\n            layer.last = vllm_config.last\n"),
        ("        return hidden_states, residual\n", "        return hidden_states, None if self.last else residual\n"),
    )
    assert isinstance(outcome, Compiled), outcome
    assert len(outcome.layers[0].proof.variants) == 24
    assert any("self.last" in name for name in outcome.layers[0].proof.variants)
