"""No module named 'torch': another Python than the one that torch was installed for.

Two ways to get there: `python` is not the one whose pip you called, and `torchrun`, which is a
script whose first line names a Python, comes from another environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def last_line(command: list[str | Path], path: str) -> str:
    """The last line that a command says, as a shell with this PATH would start it."""
    hidden = ("PYTHONPATH", "PYTHONHOME")  # with these, the other Python would find our torch
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        command, env=env | {"PATH": path}, capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def starts(script: str) -> Path:
    """The Python that a script's first line names."""
    return Path(Path(script).read_text().splitlines()[0].removeprefix("#!"))


def main() -> None:
    venv.create("other", with_pip=False, symlinks=True)  # an environment without torch
    folder = Path("other/bin").absolute()
    path = os.pathsep.join([str(folder), os.environ["PATH"]])  # as after `activate`
    activated = os.environ | {"PATH": path}
    os.environ["PYTHONPATH"] = sysconfig.get_path("purelib")  # the worst case, for last_line
    said = last_line([folder / "python", "-c", "import torch"], path)
    print(f"python -c 'import torch'\n  {said}")
    assert said == "ModuleNotFoundError: No module named 'torch'"

    # what pip writes for torchrun, wherever it installs torch
    (folder / "torchrun").write_text(
        f"#!{folder}/python\nfrom torch.distributed.run import main\nmain()\n"
    )
    (folder / "torchrun").chmod(0o755)
    found = shutil.which("torchrun", path=path)
    said = last_line([found, "--help"], path)
    print(f"torchrun --help\n  {said}")
    same = starts(found) == Path(sys.executable)
    print(f"  its first line names this Python: {same}")
    assert said == "ModuleNotFoundError: No module named 'torch'"
    assert starts(found) == folder / "python"

    # the fix: name the Python once, and start everything as a module of it
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"],
        capture_output=True, text=True, check=True, env=activated,
    )  # fmt: skip
    assert done.stdout.startswith("usage:")
    print("python -m torch.distributed.run --help\n  it starts")


if __name__ == "__main__":
    main()
