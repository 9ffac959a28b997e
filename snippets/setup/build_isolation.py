"""pip hides the installed torch while it builds a package, so a build that imports torch fails.

The program writes a small package whose build imports torch, as flash-attn's setup.py does. It
builds the package with pip's isolation and without it. A second package, which does not import
torch, shows that an isolated build works. Nothing is downloaded and nothing is installed.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

# --8<-- [start:backend]
PYPROJECT = """
[build-system]
requires = [{requires}]
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import os, sys, zipfile
open(os.environ["BUILD_LOG"], "w").write(sys.executable)  # which Python builds the package
{first_line}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{{folder}}/{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = "{name}-1.0.dist-info/"
        wheel.writestr("{name}.py", "BUILT_WITH = " + repr({version}))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any")
        wheel.writestr(info + "RECORD", "")
    return "{name}-1.0-py3-none-any.whl"
"""
# --8<-- [end:backend]


def write_package(name: str, first_line: str, version: str, requires: str = "") -> Path:
    """Write the two files of a package: its pyproject.toml and the code that builds it."""
    folder = Path(name)
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT.format(requires=requires))
    code = BACKEND.format(name=name, first_line=first_line, version=version)
    (folder / "backend.py").write_text(code)
    return folder


def build(package: Path, *options: str) -> tuple[str, str]:
    """Build a wheel with pip. Return "built" or the error, and the path of the Python."""
    log = Path("python.txt").absolute()
    log.write_text("no build was started")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "-w", "wheels",
         "--disable-pip-version-check", *options, f"./{package}"],
        capture_output=True, text=True, check=False,
        env=ours | {"BUILD_LOG": str(log), "PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip
    if done.returncode == 0:
        return "built", log.read_text()
    lines = [line.strip(" │╰─>") for line in (done.stdout + done.stderr).splitlines()]
    kinds = "ModuleNotFoundError:", "ERROR: Could not find"
    return next(line for line in lines if line.startswith(kinds)), log.read_text()


def main() -> None:
    if importlib.util.find_spec("pip") is None:
        sys.exit("This environment has no pip. Install it with: python -m ensurepip")
    plain = write_package("plain", "", "None")
    needs = write_package("needs_torch", "import torch", "torch.__version__")
    declares = write_package("declares", "import torch", "torch.__version__", '"torch"')

    result, _ = build(plain)
    print(f"no import of torch, isolated:\n  {result}")
    assert result == "built"  # so isolation itself works without a network

    result, python = build(needs)
    same = os.path.realpath(python) == os.path.realpath(sys.executable)
    print(f"import torch, isolated:\n  {result}\n  built by this Python: {same}")
    assert result == "ModuleNotFoundError: No module named 'torch'" and same

    result, python = build(declares)
    print(f'requires = ["torch"], isolated, no index:\n  {result}')
    assert result.startswith("ERROR: Could not find") and python == "no build was started"

    result, python = build(needs, "--no-build-isolation")
    wheel = zipfile.ZipFile("wheels/needs_torch-1.0-py3-none-any.whl")
    built_with = wheel.read("needs_torch.py").decode().split("'")[1]
    installed = importlib.metadata.version("torch")
    equal = built_with.split("+")[0] == installed.split("+")[0]  # without the build's suffix
    print(f"import torch, --no-build-isolation:\n  {result}")
    print(f"  built with the installed torch: {equal}")
    assert result == "built" and equal


if __name__ == "__main__":
    main()
