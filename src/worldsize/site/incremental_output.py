"""Functions that write a file of the site only if it differs from the existing file.

MkDocs empties the folder of the site, then writes every page and copies every file. This takes
a third of the time between saving a page and seeing it. With these functions, the old files
stay until the build replaces them. They also stay if a page causes an error. The
module `prerender` makes MkDocs use them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mkdocs.structure.files import Files


def write(content: bytes, path: str) -> None:
    """Write a file, unless it already has this content."""
    with suppress(OSError):
        if Path(path).read_bytes() == content:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(content)


def copy(source: str, path: str) -> None:
    """Copy a file, unless the copy already has the same content."""
    write(Path(source).read_bytes(), path)


def remove_others(site: str, files: Files) -> None:
    """Remove every file that does not belong to the site, except hidden files and folders."""
    own = {file.abs_dest_path for file in files if file.inclusion.is_included()}
    own |= {f"{each.removesuffix('.html')}.md" for each in own if each.endswith(".html")}
    for folder, _, names in os.walk(site, topdown=False):
        if folder.startswith(os.path.join(site, ".")):
            continue
        for name in names:
            path = os.path.join(folder, name)
            if path not in own and not name.startswith("."):
                os.unlink(path)
        with suppress(OSError):  # the folder is not empty
            os.rmdir(folder)
