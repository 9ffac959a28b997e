"""Reproduces "Could not find a version that satisfies the requirement torch".

The name of a wheel ends with three tags: the Python, its binary interface and the system. pip
ignores a file whose tags do not fit, so the list of versions in its message is empty.
"""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path


def put_wheel(tags: str) -> None:
    """Write a wheel of an empty package torch with these tags, as the only file in `wheels`."""
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
    """Let pip search for torch only in `wheels`. Return its exit status and error lines."""
    command = "pip --isolated download --no-index --find-links wheels --no-deps -d got torch"
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--disable-pip-version-check"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PIP_CONFIG_FILE": os.devnull},  # ignore settings of this machine
    )  # fmt: skip
    return done.returncode, [x for x in done.stderr.splitlines() if x.startswith("ERROR")]


def main() -> None:
    if importlib.util.find_spec("pip") is None:
        sys.exit("This environment has no pip. Install it with: python -m ensurepip")
    from pip._vendor.packaging.tags import sys_tags

    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    known = set(sys_tags())  # the tags that fit this Python
    pythons = {f"{tag.interpreter}-{tag.abi}" for tag in known}
    systems = {tag.platform for tag in known}
    here = next(sys_tags()).platform
    for tags, fits, meaning in (
        (f"cp36-cp36m-{here}", False, "for Python 3.6"),
        (f"{ours}-none-plan9_x86_64", False, "for a different system"),
        (f"{ours}-none-any", True, "for this Python on any system"),
    ):
        python, _, system = tags.rpartition("-")
        assert (python in pythons) == ("3.6" not in meaning)
        assert (system in systems) == ("different" not in meaning)
        put_wheel(tags)
        assert len(list(Path("wheels").iterdir())) == 1
        status, errors = pip_download()
        print(f"a wheel {meaning}: {'pip accepts it' if status == 0 else 'pip fails'}")
        for line in errors:
            print(f"  {line}")
        assert (status == 0) == fits == (not errors)


if __name__ == "__main__":
    main()
