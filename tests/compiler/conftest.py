"""A vLLM small enough to read: the names that model source imports, and one model whose layer a test twists."""

from collections.abc import Callable
from pathlib import Path

import pytest

from afd_compiler.outcome import Outcome
from afd_compiler.pipeline import compile_family
from afd_compiler.source import SourceTree, directory_source, find_source
from afd_compiler.spec import Spec

RELEASES = ("0.19.1", "0.26.0", "0.32.0")
TINY = Spec(family="tiny", module="vllm.model_executor.models.tiny", architectures=("TinyForCausalLM",))
TINY_FILE = "vllm/model_executor/models/tiny.py"
MODEL = Path(__file__).parent / "layers" / "tiny.py"

CompileTiny = Callable[..., Outcome]

PACKAGES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '9.9.9'\n",
    "vllm/distributed.py": "def all_reduce(x): ...\ndef world_size(): ...\n",
    "vllm/platforms.py": "current_platform = object()\n",
    "vllm/model_executor/layers/attention.py": "from torch import nn\nclass Attention(nn.Module): ...\n",
    "vllm/model_executor/layers/fused_moe.py": "from torch import nn\nclass FusedMoE(nn.Module): ...\n",
    "vllm/model_executor/layers/layernorm.py": "from torch import nn\nclass RMSNorm(nn.Module): ...\n",
    "vllm/model_executor/layers/embedding.py": "from torch import nn\nclass Embedding(nn.Module): ...\n",
    "vllm/model_executor/models/registry.py": 'MODELS = {"TinyForCausalLM": ("tiny", "TinyForCausalLM")}\n',
    "vllm/model_executor/models/utils.py": (
        "from torch import nn\nclass PPMissingLayer(nn.Identity): ...\ndef make_layers(*a): ...\n"
    ),
}


@pytest.fixture
def tiny_tree(tmp_path: Path) -> Callable[..., SourceTree]:
    """Write the tree; each (old, new) pair is one edit of the model's text, and must apply."""

    def write(*edits: tuple[str, str], **files: str) -> SourceTree:
        text = MODEL.read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        for path, content in {**PACKAGES, TINY_FILE: text, **files}.items():
            target = tmp_path / "tree" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        return directory_source(tmp_path / "tree")

    return write


@pytest.fixture
def compile_tiny(tiny_tree: Callable[..., SourceTree]) -> CompileTiny:
    """Compile the tiny model after some edits."""

    def run(*edits: tuple[str, str], platform: str = "cpu", spec: Spec = TINY) -> Outcome:
        return compile_family(spec, tiny_tree(*edits), platform)

    return run


@pytest.fixture(params=RELEASES)
def release_tree(request: pytest.FixtureRequest) -> SourceTree:
    """Sources of each release that has checked-in wrappers; downloaded once into the user's cache."""
    return find_source(request.param)
