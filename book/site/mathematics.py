"""Formulas drawn while the site is built: inline SVG to look at, MathML to listen to.

`$…$` and `$$…$$` are found by pymdownx.arithmatex and drawn by ziamath with its own font, so
a page needs neither a script nor a mathematics font, and nothing moves while it loads. A
formula which cannot be drawn as written stops the build.
"""

import functools
import html
import re
import xml.etree.ElementTree as ET

import ziamath
from markdown.treeprocessors import Treeprocessor
from mkdocs.exceptions import BuildError  # printed with the page's name, without a trace
from ziamath.tex import tex2mml

UNITS = 400  # the drawing's units per em: whole numbers are fine enough, and short

ziamath.config.svg2 = False  # glyphs as paths: no ids that a second formula would repeat
ziamath.config.precision = 3


class FormulaError(BuildError):
    """A formula that cannot be drawn as it is written."""

    def __init__(self, tex: str, why: str) -> None:
        super().__init__(f"formula cannot be drawn: {why}\n    {tex}")


@functools.cache
def draw(tex: str, display: bool = False) -> str:
    """Return the HTML of one formula: an SVG hidden from screen readers, MathML for them."""
    if re.sub(r"\\.", "", tex).count("{") != re.sub(r"\\.", "", tex).count("}"):
        raise FormulaError(tex, "its braces do not match")
    try:
        mathml = tex2mml(tex, inline=not display)
        ink = ziamath.Latex(tex, size=UNITS, color="currentColor", inline=not display, margin=0)
        drawing = ink.svgxml()
    except Exception as error:
        raise FormulaError(tex, f"{type(error).__name__} {error}".strip()) from error
    for text in ET.fromstring(mathml).itertext():
        if "\\" in text:  # latex2mathml passes on a command that it does not know as text
            raise FormulaError(tex, f"{text} is not known")
        for letter in text:
            if not letter.isspace() and ink.font.glyphindex(letter) == 0:
                raise FormulaError(tex, f"the font has no {letter}")

    left, top, width, height = (round(float(n)) for n in drawing.attrib["viewBox"].split())
    style = f"width:{width / UNITS:.3g}em;height:{height / UNITS:.3g}em"
    if not display:
        style += f";vertical-align:{ink.getyofst() / UNITS:.3g}em"
    return (
        f'<svg aria-hidden="true" focusable="false" viewBox="{left} {top} {width} {height}" '
        f'style="{style}">{_strokes(drawing)}</svg>{mathml}'
    )


def _strokes(drawing: ET.Element) -> str:
    """Return the ink of ziamath's drawing: all of one colour in one path, in whole units."""
    path, rest = [], []
    for shape in drawing:
        if shape.get("fill") != "currentColor" or shape.tag not in ("path", "rect"):
            rest.append(ET.tostring(shape, encoding="unicode"))
        elif shape.tag == "path":
            path.append(_shorten(shape.attrib["d"]))
        else:
            x, y, width, height = (
                float(shape.attrib[k]) for k in ("x", "y", "width", "height")
            )
            path.append(f"M{x:.0f} {y:.0f}h{width:.0f}v{max(1, round(height))}h{-width:.0f}z")
    return f'<path d="{"".join(path)}"/>{"".join(rest)}'


def _shorten(path: str) -> str:
    """Return a glyph's outline with relative whole numbers: half as long, and as sharp."""
    out, x, y = [], 0, 0
    for command, numbers in re.findall(r"([MLQZ])([^MLQZ]*)", path):
        points = [round(float(n)) for n in numbers.split()]
        if command == "M":
            out.append(f"M{points[0]} {points[1]}")
        elif command == "Z":
            out.append("z")
        else:
            steps = [n - (y if i % 2 else x) for i, n in enumerate(points)]
            if any(steps):
                out.append(command.lower() + " ".join(map(str, steps)).replace(" -", "-"))
        if points:
            x, y = points[-2:]
    return "".join(out)


class Drawer(Treeprocessor):
    """Put the drawings in the place of what arithmatex has found."""

    def run(self, root: ET.Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex":
                tex = html.unescape(element.text or "")
                display = tex.startswith("\\[")
                element.set("class", "formula")
                if display:  # a search result would show it as a heap of letters
                    element.set("data-search-exclude", "")
                element.text = self.md.htmlStash.store(draw(tex[2:-2].strip(), display))
