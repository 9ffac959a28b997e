"""Pack the built site into a zip file whose pages open from a disk, without a server.

If a page is opened from a disk, a browser does not find the `index.html` of a folder, and the
page cannot load modules, workers or data from other files. In the zip file, every link
therefore names a file. A module is a data URL, which contains everything that the module
imports and fetches. The theme's search settings are a script, which also contains the text of
all sections.
"""

from __future__ import annotations

import base64
import json
import re
import zipfile
from pathlib import Path

FILE = "book/world-size.zip"
EXCLUDED = re.compile(r"book/|llms|sitemap|404|search/text|assets/javascripts/[lw]|.*\.map$")
TYPES = {".js": "text/javascript", ".json": "application/json"}
# in a module: the names of other files in its folder
OTHER_FILE = re.compile(r'new URL\("([^"]+)", ?import\.meta\.url\)|"\./([^"]+)"')
# in a page: links to a folder, folders to which sections have moved, preloaded modules, the
# copy button, small instruments, traces, and modules
FOLDER = re.compile(r' href="(?=[^"#?])(?:[^":#?]*/)?(?:\.\.?)?(?=["#?])')
MOVED = re.compile(r'\n"\S+/(?=": ")')
PRELOAD = re.compile(r'<link rel="modulepreload"[^>]*>\n')
COPY = re.compile(r'<div class="md-content__button copy-page">.*?</div>\n', re.DOTALL)
EMBEDDED = re.compile(r'(<div class="instrument embedded"[^>]* data-instrument="(\w+)")')
TRACE = re.compile(r'(?<= data-trace=")[./]*([^"]+)')
MODULE = re.compile(r'(<script type="module" src=")[./]*([^"]+)')


def data_url(file: Path) -> str:
    """Return a data URL with a module or a JSON file, and with the files that a module uses."""
    text = file.read_text("utf-8")
    text = OTHER_FILE.sub(lambda m: f'"{data_url(file.with_name(m[1] or m[2]))}"', text)
    return f"data:{TYPES[file.suffix]};base64,{base64.b64encode(text.encode()).decode()}"


def offline_page(html: str, site: Path) -> str:
    """Return the HTML of a page for the zip file."""
    html = FOLDER.sub(lambda m: f"{m[0].rstrip('/')}/index.html", html)
    html = PRELOAD.sub("", MOVED.sub(r"\g<0>index.html", html))
    folder = site / "assets/instruments"
    html = EMBEDDED.sub(
        lambda m: f'{m[1]} data-module="{data_url(folder / f"{m[2]}.js")}"', html
    )
    html = TRACE.sub(lambda m: data_url(site / "traces" / m[1]), html)
    return MODULE.sub(lambda m: m[1] + data_url(site / m[2]), COPY.sub("", html))


def search_settings(folder: Path) -> str:
    """Return the script that the theme loads if a page is opened from a disk."""
    index = json.loads((folder / "search_index.json").read_text("utf-8"))
    for address, *section in json.loads((folder / "text.json").read_text("utf-8")):
        index["docs"].append([re.sub("#|$", r"index.html\g<0>", address, count=1), *section])
    return f"var __index={json.dumps(index, ensure_ascii=False)}"


def pack(site: Path, to: Path) -> None:
    """Write a built site into the zip file `to`."""
    with zipfile.ZipFile(to, "w") as zipped:
        for file in sorted(site.rglob("*")):
            name = file.relative_to(site).as_posix()
            if EXCLUDED.match(name) or file.is_dir():
                continue
            content = file.read_bytes()
            if file.suffix == ".html":
                content = offline_page(content.decode(), site)
            elif name == "search/search_index.json":
                name, content = "search/search_index.js", search_settings(file.parent)
            elif name.startswith("assets/javascripts/bundle"):
                worker = f'new Worker("{data_url(site / "assets/search.js")}")'
                content = content.decode().replace("new Worker(e)", worker)
            info = zipfile.ZipInfo.from_file(file, f"world-size/{name}")
            zipped.writestr(info, content, zipfile.ZIP_DEFLATED)
