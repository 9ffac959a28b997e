"""Written: a build writes what differs from what the site's folder has, and removes the rest.

MkDocs would empty the folder first, then write each page and copy each file: a third of what
a save takes until it is seen. Here the site of the build before stays until it is replaced,
and stays whole where a page cannot be made.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mkdocs import utils
from mkdocs.structure.files import Files


def write(content: bytes, path: str) -> None:
    """Write a file of the site, unless it is there as it shall be."""
    with suppress(OSError):
        if Path(path).read_bytes() == content:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(content)


def copy(source: str, path: str) -> None:
    """Copy a file to the site, unless it is there as it shall be."""
    write(Path(source).read_bytes(), path)


def remove_others(site: str, files: Files) -> None:
    """Remove what is none of these files, before they are written, but nothing hidden."""
    own = {file.abs_dest_path for file in files if file.inclusion.is_included()}
    own |= {f"{each.removesuffix('.html')}.md" for each in own if each.endswith(".html")}
    for folder, _, names in os.walk(site, topdown=False):
        if folder.startswith(os.path.join(site, ".")):
            continue
        for name in names:
            path = os.path.join(folder, name)
            if path not in own and not name.startswith("."):
                os.unlink(path)
        with suppress(OSError):  # another file is in it
            os.rmdir(folder)


utils.write_file, utils.copy_file = write, copy
utils.clean_directory = lambda site: None  # `remove_others` does that, later
