"""Shows how a file torch.py, or a second installation, hides the torch that you installed.

Python imports the first torch on sys.path. It searches the folder of the program, then the
folders in PYTHONPATH, then the packages of the user, and then the packages of the environment.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

EVERY_TORCH = """
import sys
from pathlib import Path
found = [Path(entry, name) for entry in sys.path for name in ("torch", "torch.py")]
found = [path for path in found if path.is_file() or (path / "__init__.py").is_file()]
first = found[0].parent.name + "/" + found[0].name
print(f"{len(found)} torch packages on sys.path, and Python imports {first}")
"""


def python(code: str, pythonpath: str | None = None) -> str:
    """Run code, and return the last line of its output, without the path at its end."""
    env = dict(os.environ)
    if pythonpath is not None:
        env["PYTHONPATH"] = os.pathsep.join([pythonpath, env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1].partition(" (")[0]


def main() -> None:
    installed = metadata.version("torch").partition("+")[0]

    Path("torch.py").write_text("# my notes on torch\n")
    print("with a file torch.py next to the program")
    output = python("import torch; torch.ones(1)")
    print(f"  {output}")
    assert output == "AttributeError: module 'torch' has no attribute 'ones'"
    place = python("import torch; print(torch.__file__)")
    print(f"  torch.__file__ ends with torch.py: {place.endswith('torch.py')}")
    Path("torch.py").unlink()  # the fix: rename the file

    Path("old/torch").mkdir(parents=True)
    Path("old/torch/__init__.py").write_text("__version__ = '1.13.1'\n")
    print("with PYTHONPATH=old, a folder with an older torch")
    version = python("import torch; print(torch.__version__)", "old")
    print(f"  torch {version}")
    print(f"  {python(EVERY_TORCH, 'old')}")
    assert version == "1.13.1" != installed
    # PYTHONPATH is searched before all installed packages
    assert python("import sys; print(sys.path[1])", "old").endswith("old")

    again = python("import torch; print(torch.__version__.partition('+')[0])")  # the fix
    print(f"without both\n  Python imports the installed torch: {again == installed}")
    assert again == installed


if __name__ == "__main__":
    main()
