"""Write the viewer of traces into labs/rank_trace.py, so that readers need only one file.

    python docs/assets/pack_viewer.py

Run this command after a change to docs/assets/instruments/trace_viewer.js or trace_viewer.css.
A test compares the packed viewer with these two files.
"""

import base64
import re
import zlib
from pathlib import Path

from worldsize.site.minify import minify

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/assets/instruments"
RECORDER = ROOT / "labs/rank_trace.py"
PACKED = re.compile(r'^VIEWER = """\n(.*?)"""', re.MULTILINE | re.DOTALL)


def viewer() -> str:
    """Return the module and the style sheet of the viewer as they are packed."""
    module = minify((FOLDER / "trace_viewer.js").read_text("utf-8"))
    style = (FOLDER / "trace_viewer.css").read_text("utf-8")
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    style = re.sub(r"\n\s*", "\n", style).strip()
    return f"{module}\0{style}\n"


def main() -> None:
    """Replace the packed viewer in the recorder."""
    packed = base64.b85encode(zlib.compress(viewer().encode(), 9)).decode()
    lines = "\n".join(packed[i : i + 92] for i in range(0, len(packed), 92))
    text = RECORDER.read_text("utf-8")
    RECORDER.write_text(PACKED.sub(lambda _: f'VIEWER = """\n{lines}\n"""', text), "utf-8")


if __name__ == "__main__":
    main()
