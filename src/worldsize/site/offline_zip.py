"""Packed: the built site as a zip that opens from a disk, without a server or a network.

There a browser opens no folder's `index.html`, and lets a page load no module, worker or table
that lies in another file. So each link of the zip names a file, the address of a module has in
it all that the module imports and fetches, and the theme's script of search settings the text.
"""

from __future__ import annotations

import base64
import json
import re
import zipfile
from pathlib import Path

FILE = "book/world-size.zip"
LEFT_OUT = re.compile(r"book/|llms|sitemap|404|search/text|assets/javascripts/[lw]|.*\.map$")
TYPES = {".js": "text/javascript", ".json": "application/json"}
BESIDE = re.compile(r'new URL\("([^"]+)", import\.meta\.url\)|"\./([^"]+)"')  # in a module
# in a page: what leads to a folder, now or because a section moved there; what it loads
FOLDER = re.compile(r' href="(?=[^"#?])(?:[^":#?]*/)?(?:\.\.?)?(?=["#?])')
MOVED = re.compile(r'\n"\S+/(?=": ")')
PRELOAD = re.compile(r'<link rel="modulepreload"[^>]*>\n')
COPY = re.compile(r'<div class="md-content__button copy-page">.*?</div>\n', re.DOTALL)
MODULE = re.compile(r'(<script type="module" src=")[./]*([^"]+)')


def whole(file: Path) -> str:
    """An address that has in it a module and all it imports and fetches, or a table."""
    text = file.read_text("utf-8")
    text = BESIDE.sub(lambda m: f'"{whole(file.with_name(m[1] or m[2]))}"', text)
    return f"data:{TYPES[file.suffix]};base64,{base64.b64encode(text.encode()).decode()}"


def page(html: str, site: Path) -> str:
    html = FOLDER.sub(lambda m: f"{m[0].rstrip('/')}/index.html", html)
    html = PRELOAD.sub("", MOVED.sub(r"\g<0>index.html", html))
    return MODULE.sub(lambda m: m[1] + whole(site / m[2]), COPY.sub("", html))


def settings(folder: Path) -> str:
    """What the theme loads where nothing is served."""
    found = json.loads((folder / "search_index.json").read_text("utf-8"))
    for address, *section in json.loads((folder / "text.json").read_text("utf-8")):
        found["docs"].append([re.sub("#|$", r"index.html\g<0>", address, count=1), *section])
    return f"var __index={json.dumps(found, ensure_ascii=False)}"


def pack(site: Path, to: Path) -> None:
    """Write a built site as the zip `to`."""
    with zipfile.ZipFile(to, "w") as zipped:
        for file in sorted(site.rglob("*")):
            name = file.relative_to(site).as_posix()
            if LEFT_OUT.match(name) or file.is_dir():
                continue
            content = file.read_bytes()
            if file.suffix == ".html":
                content = page(content.decode(), site)
            elif name == "search/search_index.json":
                name, content = "search/search_index.js", settings(file.parent)
            elif name.startswith("assets/javascripts/bundle"):
                worker = f'new Worker("{whole(site / "assets/search.js")}")'
                content = content.decode().replace("new Worker(e)", worker)
            about = zipfile.ZipInfo.from_file(file, f"world-size/{name}")
            zipped.writestr(about, content, zipfile.ZIP_DEFLATED)
