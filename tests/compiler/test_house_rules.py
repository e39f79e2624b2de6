"""Rules of the house that a test can see."""

import re
from pathlib import Path

import afd_compiler
from afd_compiler.spec import known_specs

SOURCES = sorted(Path(afd_compiler.__file__).parent.glob("*.py"))


def test_the_compiler_names_no_model() -> None:
    families = {family.partition("_")[0] for family in known_specs()}
    families |= {"deepseek", "glm", "qwen", "mixtral", "llama", "gpt_oss", "minimax", "kimi", "gemma"}
    names = re.compile(rf"\b({'|'.join(sorted(families))})", re.IGNORECASE)
    assert [(path.name, found.group()) for path in SOURCES if (found := names.search(path.read_text()))] == []


def test_files_stay_small() -> None:
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > 400] == []
