"""Two things with the name torch: a file of your own, and a second installation.

Python takes the first one on sys.path: the script's folder, then PYTHONPATH, then the user's
packages, then the environment's.
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
print(len(found), "on sys.path, the first is", found[0].parent.name + "/" + found[0].name)
"""


def python(code: str, pythonpath: str | None = None) -> str:
    """The last line that this Python says to some code, cut before hints that name a path."""
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
    print("with a file torch.py beside the program")
    said = python("import torch; torch.ones(1)")
    print(f"  {said}")
    assert said == "AttributeError: module 'torch' has no attribute 'ones'"
    place = python("import torch; print(torch.__file__)")
    print(f"  torch.__file__ ends with torch.py: {place.endswith('torch.py')}")
    Path("torch.py").unlink()  # the fix: rename it

    Path("old/torch").mkdir(parents=True)
    Path("old/torch/__init__.py").write_text("__version__ = '1.13.1'\n")
    print("with PYTHONPATH=old, where an older torch lies")
    version = python("import torch; print(torch.__version__)", "old")
    print(f"  torch {version}")
    print(f"  {python(EVERY_TORCH, 'old')}")
    assert version == "1.13.1" != installed
    assert python("import sys; print(sys.path[1])", "old").endswith("old")  # before all else

    again = python("import torch; print(torch.__version__.partition('+')[0])")  # the fix
    print(f"with both gone\n  the installed torch again: {again == installed}")
    assert again == installed


if __name__ == "__main__":
    main()
