"""Reproduces "No module named 'torch'": a different Python runs than the one that has torch.

There are two causes. `python` may be a different Python than the one whose pip installed torch.
And `torchrun` is a script that begins with the path of a Python, which may be the wrong one.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def last_line(command: list[str | Path], path: str) -> str:
    """Run a command as a shell with this PATH would, and return the last line of its output."""
    # with these two variables, the other Python would find our torch
    hidden = ("PYTHONPATH", "PYTHONHOME")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        command, env=env | {"PATH": path}, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def python_of(script: str) -> Path:
    """Return the Python in the first line of a script."""
    return Path(Path(script).read_text().splitlines()[0].removeprefix("#!"))


def main() -> None:
    venv.create("other", with_pip=False, symlinks=True)  # an environment without torch
    folder = Path("other/bin").absolute()
    path = os.pathsep.join([str(folder), os.environ["PATH"]])  # as after `activate`
    activated = os.environ | {"PATH": path}
    os.environ["PYTHONPATH"] = sysconfig.get_path("purelib")  # last_line must ignore this
    output = last_line([folder / "python", "-c", "import torch"], path)
    print(f"python -c 'import torch'\n  {output}")
    assert output == "ModuleNotFoundError: No module named 'torch'"

    # pip writes such a script when it installs torch
    (folder / "torchrun").write_text(
        f"#!{folder}/python\nfrom torch.distributed.run import main\nmain()\n"
    )
    (folder / "torchrun").chmod(0o755)
    found = shutil.which("torchrun", path=path)
    output = last_line([found, "--help"], path)
    print(f"torchrun --help\n  {output}")
    same = python_of(found) == Path(sys.executable)
    print(f"  torchrun starts the Python of this program: {same}")
    assert output == "ModuleNotFoundError: No module named 'torch'"
    assert python_of(found) == folder / "python"

    # the fix: choose one Python, and start everything as a module of it
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"],
        capture_output=True, text=True, check=True, env=activated,
    )  # fmt: skip
    assert done.stdout.startswith("usage:")
    print("python -m torch.distributed.run --help\n  torchrun prints its help")


if __name__ == "__main__":
    main()
