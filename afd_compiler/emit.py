"""Sixth pass: the wrapper module.

Only what must differ is written; everything else is inherited from upstream:

- attention: upstream's layer, built while the FFN's class names are bound to a stand-in whose call is an exchange;
  where the FFN's work is more than such a call, the statements that do it become one exchange (`kept.outlined`);
- FFN: upstream's layer, built while attention's class names are bound to nothing, with a forward that holds the
  FFN's own statements and no others;
- causal LM: upstream's, built while the layer's name is bound to one of the two.

No `__init__` of upstream's is copied. The text is formatted by ruff and depends on nothing but the source and the spec.
"""

import ast
import re
import subprocess
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ruff import find_ruff_bin

from afd_compiler import names
from afd_compiler.classes import FamilyClasses, LayerClass
from afd_compiler.constructs import GlobalName
from afd_compiler.contract import TOKEN_TENSOR
from afd_compiler.diagnostics import RefusalKind, Refused
from afd_compiler.kept import kept_statements, outlined
from afd_compiler.partition import BOTH, Partition
from afd_compiler.symbols import ModuleIndex, Symbol
from afd_compiler.tracer import REDUCES

LINE_LENGTH = 120
RUNTIME = (
    "AttentionModel", "FFNLayer", "FFNModel", "Inert", "OutlinedLayer", "RemoteFFN", "RemoteSum", "Unowned", "bind",
    "bind_default", names.BUILD_PART, "owned",
)  # fmt: skip
"""Names of `afd_runtime.split` that emitted text can use."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A layer, the way it is cut, and upstream's forward with the module that it stands in."""

    layer: LayerClass
    cut: Partition
    forward: ast.FunctionDef
    index: ModuleIndex
    defaults: tuple[tuple[str, str], ...]
    """Upstream's own defaults of the FFN's keywords."""


Bindings = dict[GlobalName, str]
"""Global name of an upstream module -> what stands for it while a constructor runs."""


def emit(classes: FamilyClasses, cuts: tuple[LayerCut, ...], told: Mapping[str, tuple[str, ...]]) -> str:
    """Write the wrapper module's text; `told` are, by role, attributes that upstream's constructors read off what the
    role does not own."""
    writer = _Writer(classes, cuts, told)
    body = "\n".join(part for part in writer.parts() if part)
    used = ", ".join(name for name in RUNTIME if re.search(rf"\b{name}\b", body))
    imports = [
        "from functools import partial" if "partial(" in body else "",
        "import torch" if "torch." in body else "",
        f"from afd_runtime.split import {used}",
        *(line for alias, line in writer.imports() if re.search(rf"\b{alias}\b", body)),
    ]
    return _formatted("\n".join(part for part in (*imports, body) if part))


class _Writer:
    def __init__(self, classes: FamilyClasses, cuts: tuple[LayerCut, ...], told: Mapping[str, tuple[str, ...]]) -> None:
        self.classes, self.cuts = classes, cuts
        self.told, self.told_of_attention = told.get("attention", ()), told.get("ffn", ())

    def parts(self) -> Iterator[str]:
        yield from dict.fromkeys(text for cut in self.cuts for text in self.remotes(cut))
        if self.told_of_attention:
            told = " = ".join([*self.told_of_attention, "property(Inert)"])
            yield f"\nclass {names.ABSENT_ATTENTION}(Unowned):\n    {told}\n"
        for cut in self.cuts:
            yield self.attention_layer(cut)
            yield self.ffn_layer(cut)
        yield from map(self.role, names.ROLES)
        yield from self.causal_lms()

    def imports(self) -> Iterator[tuple[str, str]]:
        for module in self.classes.opened:
            package, _, own = module.rpartition(".")
            alias = self.alias(module)
            yield alias, f"from {package} import {own}" + ("" if alias == own else f" as {alias}")

    def alias(self, module: str) -> str:
        return names.UPSTREAM if module == self.classes.module else names.module_alias(module)

    def spelled(self, symbol: Symbol | GlobalName) -> str:
        return f"{self.alias(symbol.module)}.{symbol.name}"

    # Layers.

    def remotes(self, cut: LayerCut) -> Iterator[str]:
        told = " = ".join([*self.told, "None"]) if self.told else ""
        told_of_sum = " = ".join([*self.told, "property(RemoteSum.itself)"]) if self.told else ""
        if told and not cut.cut.calls:
            yield f"\nclass {names.ABSENT_EXPERTS}(Unowned):\n    {told}\n"
        sent, *extras = (value.name for value in cut.cut.contract.sent)
        for child, parameters in cut.cut.calls:
            words = "".join(f", {name}={dict(cut.defaults).get(name, 'None')}" for name, _ in parameters)
            carried = {value: name for name, value in parameters}
            values = ", ".join([sent, *(carried[extra] for extra in extras)])
            base = "RemoteSum" if child in cut.cut.unreduced else "RemoteFFN"
            yield f'''
class {names.remote_class(child)}({base}):
    """`{child}` on the attention role: upstream's own call of it becomes an exchange with the FFN role."""
    {told_of_sum if child in cut.cut.unreduced else told}

    def forward(self, {sent}{words}):
        return self.exchange({values})
'''

    def attention_layer(self, cut: LayerCut) -> str:
        alias = self.alias(cut.index.module)
        forward = ""
        if not cut.cut.calls:
            values = ", ".join(value.name for value in cut.cut.contract.sent)
            exchange = f"{cut.cut.contract.returned[0].name} = self.exchange({values})"
            forward = outlined(cut.forward, cut.cut.region.span, cut.index, alias, exchange)
        elif cut.cut.asks_class:
            classes = {
                name.name: self.stand_in("attention", child, cut)
                for child, group in self.foreign(cut, "attention").items()
                for name in group
            }
            forward = outlined(cut.forward, frozenset(), cut.index, alias, "pass", classes)
        marker = "" if cut.cut.calls else "OutlinedLayer, "
        return self.layer("attention", marker, cut, forward)

    def ffn_layer(self, cut: LayerCut) -> str:
        contract, region = cut.cut.contract, cut.cut.region
        body = f"return {region.call}"
        if not region.call:
            kept = kept_statements(cut.forward, region, cut.index, self.alias(cut.index.module)).rstrip()
            body = f"{kept}\nreturn {contract.returned[0].name}"
        extras = tuple("hidden" if value.shape == TOKEN_TENSOR else value.name for value in contract.sent[1:])
        told = f"extras = {extras!r}\n" if extras else ""
        shared = tuple(name for name, owner in cut.cut.owners if owner == BOTH)
        told += f"shared = {shared!r}\n" if shared else ""
        parameters = ", ".join(value.name for value in contract.sent)
        forward = f"\ndef forward(self, {parameters}):\n{_indented(body)}\n"
        return self.layer("ffn", "FFNLayer, ", cut, forward, told)

    def layer(self, role: str, marker: str, cut: LayerCut, forward: str, told: str = "") -> str:
        foreign = self.foreign(cut, role)
        held = [
            f"{attribute} = {self.stand_in(role, child, cut)}"
            for child, attribute in cut.layer.class_attributes
            if child in foreign
        ]
        defaults = [
            f"bind_default(self, {parameter}={self.stand_in(role, child, cut)})"
            for child, parameter in cut.layer.default_classes
            if child in foreign
        ]
        bindings = self.layer_bindings(cut, role)
        init = self.init(bindings, held=defaults) if bindings or defaults else ""
        body = "\n".join([told, *held, init, forward]) or "pass"
        name = names.role_class(role, cut.layer.name)
        return f"\nclass {name}({marker}{self.spelled(cut.layer.symbol)}):\n{_indented(body)}\n"

    def foreign(self, cut: LayerCut, role: str) -> dict[str, tuple[GlobalName, ...]]:
        """Submodules of the layer that a role does not own, with the class names that build them."""
        groups = {
            child: tuple(name for name in group if cut.cut.owner_of(child, name.name) not in (role, BOTH))
            for child, group in cut.layer.modules
        }
        return {child: group for child, group in groups.items() if group}

    def stand_in(self, role: str, child: str, cut: LayerCut) -> str:
        if role == "attention" and child in dict(cut.cut.calls):
            return names.remote_class(child)
        if role == "ffn" and child in cut.layer.attention_children and self.told_of_attention:
            return names.ABSENT_ATTENTION
        return names.ABSENT_EXPERTS if role == "attention" and self.told else "Unowned"

    def layer_bindings(self, cut: LayerCut, role: str) -> Bindings:
        """Stand-ins for what the role does not own; refuses a name that also builds what it keeps."""
        foreign = self.foreign(cut, role)
        by_no_name = {*dict(cut.layer.class_attributes), *dict(cut.layer.default_classes)}
        kept = {name for child, group in cut.layer.modules for name in group if name not in foreign.get(child, ())}
        bound = {
            name: self.stand_in(role, attribute, cut)
            for attribute, group in foreign.items()
            if attribute not in by_no_name
            for name in group
        }
        if shared := sorted(name.name for name in kept & bound.keys()):
            raise Refused(
                RefusalKind.SHARED_CONSTRUCTOR,
                at=cut.layer.location,
                name=f"{cut.layer.name}.__init__",
                saw=f"{', '.join(shared)} builds submodules of both roles",
                do="serve this family unsplit: binding that name would also change what the role keeps",
            )
        around = self.role_bindings(role) if role == "ffn" else {}
        for attribute, inner in cut.layer.inner_names:
            if attribute in by_no_name:
                continue
            summed = f", {REDUCES}=True" if role == "ffn" and attribute in cut.cut.unreduced else ""
            own = [name for name in dict(cut.layer.modules)[attribute] if name in kept]
            if summed or (inner | {*own}) & (bound.keys() | around.keys()):
                bound |= {name: f'owned({self.alias(name.module)}, "{name.name}"{summed})' for name in own}
        return bound

    # Models.

    def role(self, role: str) -> str:
        # vLLM tells the style of a model by the names of its constructor's parameters.
        arguments = ["vllm_config=vllm_config", "prefix=prefix"]
        arguments += [
            f"{item.parameter}={names.role_class(role, item.layer.name)}"
            for item in self.classes.layer_parameters
            if item.of_causal_lm
        ]
        held = [
            f"bind({self.spelled(owner)}, {attribute}={names.role_class(role, layer.name)})"
            for owner, attribute, layer in self.classes.layer_attributes
        ]
        init = self.init(self.role_bindings(role), '*, vllm_config, prefix=""', ", ".join(arguments), held)
        name, base = (names.role_class(role, part) for part in ("Role", "Model"))
        return f"\nclass {name}({base}):\n{_indented(init)}\n"

    def role_bindings(self, role: str) -> Bindings:
        bound = {name: names.role_class(role, layer.name) for name, layer in self.classes.layer_names}
        bound |= dict.fromkeys(self.classes.registered_names, names.BUILD_PART)
        for table, entries in self.classes.layer_tables:
            changed = ", ".join(f'"{key}": {names.role_class(role, layer.name)}' for key, layer in entries)
            bound[table] = f"{{**{self.spelled(table)}, {changed}}}"
        for item in self.classes.layer_parameters:
            if not item.of_causal_lm:
                layer = names.role_class(role, item.layer.name)
                bound |= {name: f"partial({self.spelled(item.owner)}, {item.parameter}={layer})" for name in item.names}
        if role == "ffn":
            bound |= dict.fromkeys((name for _, group in self.classes.model_modules for name in group), "Unowned")
        elif self.told:
            bound |= {
                name: self.stand_in(role, cut.layer.moe_children[0], cut)
                for cut in self.cuts
                for name in cut.layer.expert_names
            }
        return bound

    def causal_lms(self) -> Iterator[str]:
        for symbol in dict.fromkeys(symbol for _, symbol in self.classes.architectures):
            for role in names.ROLES:
                name, mixin = (names.role_class(role, part) for part in (symbol.name, "Role"))
                yield f"\nclass {name}({mixin}, {self.spelled(symbol)}):\n    pass\n"

    def init(
        self,
        bindings: Mapping[GlobalName, str],
        parameters: str = "*args, **kwargs",
        arguments: str = "*args, **kwargs",
        held: Iterable[str] = (),
    ) -> str:
        words = {
            module: [f"{name.name}={bindings[name]}" for name in sorted(bindings) if name.module == module]
            for module in self.classes.opened
        }
        binds = [f"bind({self.alias(module)}, {', '.join(group)})" for module, group in words.items() if group]
        binds += held
        return f"""
def __init__(self, {parameters}):
    with {", ".join(binds)}:
        super().__init__({arguments})
"""


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _formatted(text: str) -> str:
    command = [find_ruff_bin(), "format", "--isolated", "--line-length", str(LINE_LENGTH), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
