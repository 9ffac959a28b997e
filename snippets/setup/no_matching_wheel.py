"""Could not find a version that satisfies the requirement torch: no wheel for this Python.

A wheel's name ends with three tags: the Python, its binary interface, the system. pip does not
see a file whose tags do not fit, so the list of versions that it prints is empty.
"""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path


def put_wheel(tags: str) -> None:
    """Leave one wheel in the folder `wheels`: an empty package torch with these tags."""
    folder = Path("wheels")
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    info = "torch-2.13.0.dist-info"
    with zipfile.ZipFile(folder / f"torch-2.13.0-{tags}.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tags}\n")
        wheel.writestr(f"{info}/RECORD", "")


def pip_download() -> tuple[int, list[str]]:
    """Ask pip for torch out of that folder alone; its status, and its lines of error."""
    command = "pip --isolated download --no-index --find-links wheels --no-deps -d got torch"
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--disable-pip-version-check"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PIP_CONFIG_FILE": os.devnull},  # a machine may have constraints
    )  # fmt: skip
    return done.returncode, [x for x in done.stderr.splitlines() if x.startswith("ERROR")]


def main() -> None:
    if importlib.util.find_spec("pip") is None:
        sys.exit("this Python has no pip: python -m ensurepip")
    from pip._vendor.packaging.tags import sys_tags

    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    known = set(sys_tags())  # what pip looks for here
    pythons = {f"{tag.interpreter}-{tag.abi}" for tag in known}
    systems = {tag.platform for tag in known}
    here = next(sys_tags()).platform
    for tags, fits, meaning in (
        (f"cp36-cp36m-{here}", False, "for Python 3.6"),
        (f"{ours}-none-plan9_x86_64", False, "for another system"),
        (f"{ours}-none-any", True, "for this Python on any system"),
    ):
        python, _, system = tags.rpartition("-")
        assert (python in pythons) == ("3.6" not in meaning)
        assert (system in systems) == ("another" not in meaning)
        put_wheel(tags)
        assert len(list(Path("wheels").iterdir())) == 1
        status, errors = pip_download()
        print(f"a wheel {meaning}: {'installs' if status == 0 else 'pip says'}")
        for line in errors:
            print(f"  {line}")
        assert (status == 0) == fits == (not errors)


if __name__ == "__main__":
    main()
