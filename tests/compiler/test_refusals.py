"""Every refusal by its whole text, each made by edits of a layer that is otherwise accepted."""

import pytest

from afd_compiler import trace
from afd_compiler.diagnostics import RefusalKind
from afd_compiler.outcome import Compiled, Refusal
from afd_compiler.spec import Spec

from .conftest import TINY, CompileTiny

FILE = "vllm/model_executor/models/tiny.py"
CALL = "            hidden_states = self.ffn(hidden_states)\n"
BEFORE = "        if self.flag:\n"
INIT = "        self.norm1 = "
FORWARD = "    def forward(\n        self,\n        positions: torch.Tensor,\n"
WHOLE = "        self.model = TinyModel(vllm_config=vllm_config)\n"
COUNT = (
    f"{WHOLE}        if not any(isinstance(layer.ffn, (TinyMoE, TinyMLP)) for layer in self.model.layers):\n"
    "            raise RuntimeError('no FFN in this model')\n"
)
LAST = "            hidden_states *= 1.0 / self.scale\n        return hidden_states, residual\n"
MODEL_NORM = "        self.norm = RMSNorm(vllm_config)\n"
ALIKE = "serve this family unsplit: layers send what they call their FFN with, all alike, and get one tensor back"
SUM = "serve this family unsplit: the FFN role takes a sum only where a constructor's argument leaves it out"
ALONE = "serve this family unsplit: the FFN's work must stand in assignments of its own, outside loops"
MOE = "self_attn=TinyAttention, ffn=TinyMoE"
Edits = tuple[tuple[str, str], ...]

REFUSALS: dict[str, tuple[Edits, RefusalKind, str]] = {
    "a second value for the FFN on some paths": (
        ((CALL, "            hidden_states = self.ffn(hidden_states, positions)\n"),),
        RefusalKind.CONTRACT,
        f"{FILE}:41: TinyDecoderLayer.forward: variants send different values: 1 () in self_attn=TinyAttention, "
        "ffn=TinyMLP, not (residual is None), self.flag, not (dtype == torch.float16); 2 (positions) in "
        "self_attn=TinyAttention, ffn=TinyMLP, not (residual is None), not (self.flag), not (dtype == torch.float16) "
        f"[contract]\n  do: {ALIKE}",
    ),
    "a second value back": (
        ((CALL, "            hidden_states, residual = self.ffn(hidden_states)\n"),),
        RefusalKind.CONTRACT,
        f"{FILE}:71: TinyDecoderLayer.forward: 2 values cross back (made at {FILE}:71, {FILE}:71) in the variant "
        f"{MOE}, residual is None, not (self.flag) [contract]\n  do: {ALIKE}",
    ),
    "a value used again after it was sent": (
        ((BEFORE, f"        sent = hidden_states\n{BEFORE}"), (LAST, LAST.replace("residual\n", "residual + sent\n"))),
        RefusalKind.CONTRACT,
        f"{FILE}:70: TinyDecoderLayer.forward: the value that is sent is used again at {FILE}:76, after the FFN may "
        f"have changed it [contract]\n  do: {ALIKE}",
    ),
    "a statement of both sides": (
        ((CALL, "            hidden_states = residual + self.ffn(hidden_states)\n"),),
        RefusalKind.NO_FORM,
        f"{FILE}:74: forward: the statement `hidden_states *= 1.0 / self.scale` does work of both sides [no-form]\n"
        f"  do: {ALONE}",
    ),
    "FFN work in a method of its own": (
        (
            (CALL, "            hidden_states = self.called(hidden_states)\n"),
            (CALL.replace(")", ", scaled=True)"), "            hidden_states = self.called(hidden_states)\n"),
            (FORWARD, f"    def called(self, x):\n        return self.ffn(x, scaled=self.flag)\n\n{FORWARD}"),
            ("if isinstance(self.ffn, TinyMLP) and hidden_states.dtype == torch.float16:", "if False:"),
        ),
        RefusalKind.NO_FORM,
        f"{FILE}:56: forward: FFN work outside `forward`, in something that it calls [no-form]\n  do: {ALONE}",
    ),
    "an FFN in a loop": (
        ((CALL, f"            for _ in (1,):\n    {CALL}"),),
        RefusalKind.NO_FORM,
        f"{FILE}:72: forward: FFN work inside a `For` statement [no-form]\n  do: {ALONE}",
    ),
    "a submodule of both sides": (
        ((CALL, "            hidden_states = self.ffn(self.norm1(self.ffn(hidden_states)))\n"),),
        RefusalKind.CONTRACT,
        f"{FILE}:71: TinyDecoderLayer.forward: 2 values cross back (made at {FILE}:71, {FILE}:71) in the variant "
        f"{MOE}, residual is None, not (self.flag) [contract]\n  do: {ALIKE}",
    ),
    "a partial sum that the FFN works on": (
        (("TinyMLP(config.size, prefix=", "TinyMLP(config.size, reduce_results=False, prefix="),),
        RefusalKind.NOT_EQUAL,
        f"{FILE}:74: TinyDecoderLayer.forward: upstream's `call_function _operator.imul` ({FILE}:74) became "
        "`call_function _operator.imul` (<emitted>:36), in the variant self_attn=TinyAttention, ffn=TinyMLP, residual "
        "is None, self.flag, dtype == torch.float16 [not-equal]\n"
        "  do: the cut would change the model here; keep it unsplit, and report the layer to afd-compiler",
    ),
    "a sum that is left out after construction": (
        ((INIT, f"        self.ffn.reduce_results = False\n{INIT}"),),
        RefusalKind.UNREDUCED,
        f"{FILE}:49: TinyDecoderLayer.forward: `self.TinyMoE.reduce_results=False` is set after submodule ffn is "
        f"built: its output can be a partial sum [un-reduced]\n  do: {SUM}",
    ),
    "a sum that is left out inside": (
        ((INIT, f"        self.ffn.down.reduce_results = False\n{INIT}"),),
        RefusalKind.UNREDUCED,
        f"{FILE}:49: TinyDecoderLayer.forward: `self.TinyMoE.down.reduce_results=False` is set after submodule ffn is "
        f"built: its output can be a partial sum [un-reduced]\n  do: {SUM}",
    ),
    "the FFN's work on a path without the FFN": (
        ((CALL, "            pass\n"),),
        RefusalKind.NOT_EQUAL,
        f"{FILE}:41: TinyDecoderLayer.forward: the split makes 0 exchanges instead of 1, in the variant {MOE}, "
        "residual is None, not (self.flag) [not-equal]\n"
        "  do: the cut would change the model here; keep it unsplit, and report the layer to afd-compiler",
    ),
    "no FFN on any path": (
        ((CALL, "            pass\n"), (CALL.replace(")", ", scaled=True)"), "            pass\n")),
        RefusalKind.NO_BOUNDARY,
        f"{FILE}:41: TinyDecoderLayer.forward: no FFN is called in any variant [no-boundary]\n"
        "  do: serve this family unsplit: its layers make no exchange",
    ),
    "no experts anywhere": (
        (("        self.experts = FusedMoE(config.num_experts)\n", ""),),
        RefusalKind.NO_BOUNDARY,
        f"{FILE}:1: vllm.model_executor.models.tiny: no class that the architectures reach builds both an attention "
        "and a mixture of experts [no-boundary]\n"
        "  do: serve this family unsplit: its experts are built in a way that is not followed",
    ),
    "a layer built under another name": (
        (("TinyDecoderLayer(vllm_config, prefix=prefix)", "vllm_config.layer_of(TinyDecoderLayer)"),),
        RefusalKind.CONSTRUCTION,
        f"{FILE}:41: TinyForCausalLM.__init__: upstream's own constructor cannot be followed: TypeError: "
        f"afd_compiler.symbolic.Symbolic is not a Module subclass ({FILE}:82) [construction]\n"
        "  do: serve this family unsplit: its constructors need what the other role owns",
    ),
    "a class name for both roles": (
        ((INIT, f"        self.extra = TinyMLP(config.size, prefix)\n{INIT}"),),
        RefusalKind.SHARED_CONSTRUCTOR,
        f"{FILE}:41: TinyDecoderLayer.__init__: TinyMLP builds submodules of both roles [shared-constructor]\n"
        "  do: serve this family unsplit: binding that name would also change what the role keeps",
    ),
    "a model that asks attention for its experts": (
        ((WHOLE, COUNT),),
        RefusalKind.CONSTRUCTION,
        f"{FILE}:41: TinyForCausalLM.__init__: on the attention role it raises RuntimeError: no FFN in this model "
        "[construction]\n  do: serve this family unsplit: its constructors need what the other role owns",
    ),
    "a module around the layers that is built in a hidden way": (
        (
            ("class TinyModel(", "MODULES = [Embedding]\n\n\nclass TinyModel("),
            (MODEL_NORM, f"{MODEL_NORM}        self.extra = MODULES[0](vllm_config)\n"),
        ),
        RefusalKind.CONSTRUCTION,
        f"{FILE}:41: TinyForCausalLM.__init__: the ffn role builds model.extra, which attention owns [construction]\n"
        "  do: serve this family unsplit: its constructors need what the other role owns",
    ),
    "a layer that is built in a hidden way": (
        (
            ("class TinyModel(", "LAYERS = [TinyDecoderLayer]\n\n\nclass TinyModel("),
            (MODEL_NORM, f"{MODEL_NORM}        self.last = LAYERS[0](vllm_config, prefix='last')\n"),
        ),
        RefusalKind.CONSTRUCTION,
        f"{FILE}:41: TinyForCausalLM.__init__: the attention role does not build AttentionTinyDecoderLayer for every "
        "layer [construction]\n  do: serve this family unsplit: its constructors need what the other role owns",
    ),
    "source that does not run": (
        (("class TinyMLP(nn.Module):", "undefined_name\nclass TinyMLP(nn.Module):"),),
        RefusalKind.SOURCE_FAILED,
        f"{FILE}:15: vllm.model_executor.models.tiny: NameError while executing the source under stubs: name "
        "'undefined_name' is not defined [source-failed]\n"
        "  do: report this release to afd-compiler: its stubs do not cover what the module does on import",
    ),
    "a loop over a tensor": (
        ((BEFORE, f"        for row in hidden_states:\n            hidden_states = row\n{BEFORE}"),),
        RefusalKind.UNTRACEABLE,
        f"{FILE}:68: self.norm2(self.self_attn(positions, self.norm1(hidden_states)), hidden_states)[0]: "
        "a loop over a traced value [untraceable]\n"
        "  do: serve this family unsplit: its forward cannot be followed symbolically here",
    ),
    "a branch on a tensor's values": (
        ((BEFORE, f"        if positions.max() > 0:\n            hidden_states = hidden_states + 1\n{BEFORE}"),),
        RefusalKind.NOT_CAPTURE_SAFE,
        f"{FILE}:68: TinyDecoderLayer: a branch on the values of a tensor: `positions.max() > 0` [not-capture-safe]\n"
        "  do: serve this family unsplit: such a forward cannot be recorded in a graph",
    ),
    "state kept in Python": (
        ((BEFORE, f"        self.last = positions\n{BEFORE}"),),
        RefusalKind.NOT_CAPTURE_SAFE,
        f"{FILE}:68: TinyDecoderLayer: state kept in Python: `self.last` is set to `positions` [not-capture-safe]\n"
        "  do: serve this family unsplit: such a forward cannot be recorded in a graph",
    ),
    "a host read": (
        ((BEFORE, f"        hidden_states = hidden_states * positions.max().item()\n{BEFORE}"),),
        RefusalKind.NOT_CAPTURE_SAFE,
        f"{FILE}:68: TinyDecoderLayer.forward: `item` reads a tensor on the host [not-capture-safe]\n"
        "  do: serve this family unsplit: its forward cannot be recorded in a graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_refusal(compile_tiny: CompileTiny, what: str) -> None:
    edits, kind, text = REFUSALS[what]
    outcome = compile_tiny(*edits)
    assert isinstance(outcome, Refusal), outcome
    assert (outcome.reason.kind, str(outcome.reason)) == (kind, text)


def test_without_an_edit_the_layer_is_accepted(compile_tiny: CompileTiny) -> None:
    assert isinstance(compile_tiny(), Compiled)


def test_an_architecture_that_the_release_lacks(compile_tiny: CompileTiny) -> None:
    outcome = compile_tiny(spec=Spec(family="tiny", module=TINY.module, architectures=("OtherForCausalLM",)))
    assert isinstance(outcome, Refusal)
    assert outcome.reason.kind is RefusalKind.ARCHITECTURE_MISSING
    assert str(outcome.reason) == (
        f"{FILE}:1: vllm.model_executor.models.tiny: vLLM 9.9.9 for cpu has OtherForCausalLM in no file "
        "[architecture-missing]\n"
        "  do: correct `module` or `architectures` in the spec, or choose another platform"
    )


def test_too_many_variants(compile_tiny: CompileTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_PATHS", 3)
    outcome = compile_tiny()
    assert isinstance(outcome, Refusal)
    assert outcome.reason.kind is RefusalKind.TOO_MANY_VARIANTS
    assert str(outcome.reason) == (
        f"{FILE}:41: TinyDecoderLayer: more than 3 paths through the layer [too-many-variants]\n"
        "  do: split the spec by architecture, or fix an option in it"
    )
