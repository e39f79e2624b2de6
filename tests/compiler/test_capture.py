"""What of our own code a graph would not record."""

from pathlib import Path

import pytest

import afd_runtime
from afd_compiler.capture import hazards_of

RUNTIME = Path(afd_runtime.__file__).parent
FORWARD = frozenset({"forward"})

UNSAFE = {
    "x = x * x.max().item()": "`forward` reads a tensor on the host: `x.max().item()`",
    "self.last = x": "`forward` keeps state in Python: `self.last`",
    "global step": "`forward` keeps state in Python: `global step`",
    "x = x + torch.tensor([1.0])": "`forward` takes data from the host: `torch.tensor([1.0])`",
    "print(x)": "`forward` does what a replay would not: `print(x)`",
    "logger.info('step')": "`forward` does what a replay would not: `logger.info('step')`",
    "x = x * random.random()": "`forward` does what a replay would not: `random.random()`",
}


@pytest.mark.parametrize("statement", UNSAFE)
def test_a_hazard_is_told_with_its_line(statement: str) -> None:
    (hazard,) = hazards_of(f"def forward(self, x):\n    {statement}\n    return x\n", "emitted.py", FORWARD)
    assert (str(hazard.at), hazard.saw) == ("emitted.py:2", UNSAFE[statement])


def test_tensor_work_is_safe() -> None:
    text = "def forward(self, x):\n    y = torch.empty_like(x)\n    y[0] = 1\n    return self.mlp(x) + y\n"
    assert hazards_of(text, "emitted.py", FORWARD) == ()


@pytest.mark.parametrize(
    ("module", "functions"), [("split.py", {"exchange"}), ("ops.py", {"send", "recv", "_send", "_recv"})]
)
def test_the_connector_nodes_are_safe(module: str, functions: set[str]) -> None:
    text = (RUNTIME / module).read_text()
    assert all(f"def {function}(" in text for function in functions)
    assert hazards_of(text, module, frozenset(functions)) == ()
