"""Sixth pass: the wrapper module.

Only what must differ is written; everything else is inherited from upstream:

- attention: upstream's layer, built while the FFN's class names are bound to a stand-in whose call is an exchange;
- FFN: upstream's layer, built while attention's class names are bound to nothing, with a forward that holds the
  FFN's own statements and no others;
- causal LM: upstream's, built while the layer's name is bound to one of the two.

No method of upstream's is copied whole, and no `__init__` at all. The text is formatted by ruff and depends on
nothing but the source and the spec.
"""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping

from afd_compiler import names
from afd_compiler.classes import LayerClasses
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.kept import kept_statements
from afd_compiler.partition import Partition
from afd_compiler.symbols import ModuleIndex

LINE_LENGTH = 120


def emit(classes: LayerClasses, cut: Partition, index: ModuleIndex, header: Iterable[str]) -> str:
    """Write the wrapper module's text."""
    package, _, module = classes.module.rpartition(".")
    ffn_forward = _ffn_forward(classes, cut, index)
    body = [
        "from functools import partial" if _partials(classes, "") else "",
        "import torch" if "torch." in ffn_forward else "",
        "from afd_runtime.split import AttentionModel, FFNLayer, FFNModel, RemoteFFN, Unowned, bind",
        f"from {package} import {module} as upstream",
        *_remotes(classes, cut, index),
        _layer(names.ATTENTION_LAYER, "", classes, cut, role="attention"),
        _layer(names.FFN_LAYER, "FFNLayer, ", classes, cut, role="ffn"),
        _indented(ffn_forward),
        _role(names.ATTENTION_ROLE, "AttentionModel", classes, names.ATTENTION_LAYER, {}),
        _role(names.FFN_ROLE, "FFNModel", classes, names.FFN_LAYER, _unowned(classes.model_modules)),
        *_causal_lms(classes),
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header)
    return comment + _formatted("\n".join(part for part in body if part))


def _owned_elsewhere(classes: LayerClasses, cut: Partition, role: str) -> dict[str, tuple[str, ...]]:
    """Submodules of the layer that `role` does not own, with the class names that build them."""
    owners = dict(cut.owners)
    return {name: candidates for name, candidates in classes.layer_modules if owners.get(name, "attention") != role}


def _bindings(classes: LayerClasses, cut: Partition, role: str) -> dict[str, str]:
    """Class name -> stand-in, for what the role does not own; refuses a name that also builds what it keeps."""
    foreign = _owned_elsewhere(classes, cut, role)
    by_attribute = dict(classes.class_attributes)
    kept = {name for attribute, group in classes.layer_modules if attribute not in foreign for name in group}
    bound = {
        name: names.remote_class(attribute) if role == "attention" else "Unowned"
        for attribute, group in foreign.items()
        if attribute not in by_attribute
        for name in group
    }
    if shared := sorted(kept & bound.keys()):
        raise Refused(
            RefusalKind.SHARED_CONSTRUCTOR,
            at=classes.location,
            name=f"{classes.layer}.__init__",
            saw=f"{', '.join(shared)} builds submodules of both roles",
            do="serve this family unsplit: binding that name would also change what the role keeps",
        )
    return dict(sorted(bound.items()))


def _unowned(modules: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    return dict.fromkeys(sorted({name for _, group in modules for name in group}), "Unowned")


def _remotes(classes: LayerClasses, cut: Partition, index: ModuleIndex) -> Iterable[str]:
    sent = cut.contract.sent[0].name
    for child, keywords in cut.calls:
        extra = "".join(f", {word}={_default_of(word, child, classes, index)}" for word in keywords)
        yield f'''
class {names.remote_class(child)}(RemoteFFN):
    """`{child}` on the attention role: upstream's own call of it becomes an exchange with the FFN role."""

    def forward(self, {sent}{extra}):
        return self.exchange({sent})
'''


def _default_of(keyword: str, child: str, classes: LayerClasses, index: ModuleIndex) -> str:
    """Upstream's own default of a keyword of the FFN's forward."""
    for name in dict(classes.layer_modules)[child]:
        if forward := index.method(name, "forward"):
            arguments = forward.args
            positional = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
            for argument, default in [*positional, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
                if argument.arg == keyword and default is not None:
                    return ast.unparse(default)
    return "None"


def _layer(name: str, marker: str, classes: LayerClasses, cut: Partition, role: str) -> str:
    bindings = _bindings(classes, cut, role)
    foreign = _owned_elsewhere(classes, cut, role)
    held = [
        f"{attribute} = {names.remote_class(child) if role == 'attention' else 'Unowned'}"
        for child, attribute in classes.class_attributes
        if child in foreign
    ]
    body = "\n".join([*held, _bound_init(bindings) if bindings else ""])
    return f"""
class {name}({marker}upstream.{classes.layer}):
{_indented(body)}
"""


def _role(name: str, base: str, classes: LayerClasses, layer: str, unowned: Mapping[str, str]) -> str:
    # vLLM tells the style of a model by the names of its constructor's parameters.
    arguments = ["vllm_config=vllm_config", "prefix=prefix"]
    arguments += [f"{item.parameter}={layer}" for item in classes.layer_parameters if item.of_causal_lm]
    bindings = {classes.layer: layer, **_partials(classes, layer), **unowned}
    init = _bound_init(bindings, '*, vllm_config, prefix=""', ", ".join(arguments))
    return f"""
class {name}({base}):
{_indented(init)}
"""


def _partials(classes: LayerClasses, layer: str) -> dict[str, str]:
    """Model classes that take the layer's class as an argument which their causal LM leaves at its default."""
    return {
        item.class_name: f"partial(upstream.{item.class_name}, {item.parameter}={layer})"
        for item in classes.layer_parameters
        if not item.of_causal_lm
    }


def _bound_init(
    bindings: Mapping[str, str], parameters: str = "*args, **kwargs", arguments: str = "*args, **kwargs"
) -> str:
    words = ", ".join(f"{name}={stand_in}" for name, stand_in in bindings.items())
    return f"""
def __init__(self, {parameters}):
    with bind(upstream, {words}):
        super().__init__({arguments})
"""


def _causal_lms(classes: LayerClasses) -> Iterable[str]:
    for name in dict.fromkeys(name for _, name in classes.architectures):
        for role, mixin in (("attention", names.ATTENTION_ROLE), ("ffn", names.FFN_ROLE)):
            yield f"\nclass {names.causal_lm_class(role, name)}({mixin}, upstream.{name}):\n    pass\n"


def _ffn_forward(classes: LayerClasses, cut: Partition, index: ModuleIndex) -> str:
    forward = index.method(classes.layer, "forward")
    assert forward is not None  # the region was found in it
    body = kept_statements(forward, cut.region, index).rstrip()
    sent, returned = cut.contract.sent[0].name, cut.contract.returned[0].name
    return f"\ndef forward(self, {sent}):\n{_indented(body)}\n    return {returned}\n"


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(LINE_LENGTH), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
