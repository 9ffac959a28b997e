"""Formulas drawn while the site is built: inline SVG to look at, MathML to listen to.

`$…$` and `$$…$$` are found by pymdownx.arithmatex and drawn by ziamath with its own font, so
a page needs neither a script nor a mathematics font, and nothing moves while it loads. The
outline of a glyph stands once on a page, and the page's formulas use it. A formula which
cannot be drawn as written stops the build.
"""

import copy
import functools
import html
import re
import xml.etree.ElementTree as ET

import ziamath
from markdown.postprocessors import Postprocessor
from markdown.treeprocessors import Treeprocessor
from mkdocs.exceptions import BuildError  # printed with the page's name, without a trace
from ziamath.tex import tex2mml

UNITS = 400  # the drawing's units per em: whole numbers are fine enough, and short
ABOVE, BELOW = 300, 100  # of the base line: what book.css gives a formula within a line of text
INK = ("currentColor", "black")  # of a line over a formula, black is all that ziamath knows
SIZE = 12  # in which ziamath has the outlines of its symbols
USE = '<use href="#glyph '  # and the outline itself, until `Glyphs` gives it a name

ziamath.config.svg2 = True  # each glyph as a symbol, and as uses of it
ziamath.config.precision = 4


class FormulaError(BuildError):
    """A formula that cannot be drawn as it is written."""

    def __init__(self, tex: str, why: str) -> None:
        super().__init__(f"formula cannot be drawn: {why}\n    {tex}")


@functools.cache
def draw(tex: str, display: bool = False) -> str:
    """Return the HTML of one formula: an SVG hidden from screen readers, MathML for them.

    In it stands each glyph's outline, which `Glyphs` then puts on the page but once.
    """
    if re.sub(r"\\.", "", tex).count("{") != re.sub(r"\\.", "", tex).count("}"):
        raise FormulaError(tex, "its braces do not match")
    try:
        mathml = ET.fromstring(tex2mml(tex, inline=not display))
        spoken = _spoken(mathml)
        mathml.set("mathcolor", INK[0])
        if r"\\" not in tex:  # a row within <math> doubles the work, and only lines need it
            mathml[:] = mathml[0]
        ink = ziamath.Math(mathml, size=UNITS, margin=0)
        drawing = ink.svgxml()
    except Exception as error:
        raise FormulaError(tex, f"{type(error).__name__} {error}".strip()) from error
    for text in mathml.itertext():
        if "\\" in text:  # latex2mathml passes on a command that it does not know as text
            raise FormulaError(tex, f"{text} is not known")
        for letter in text:
            if not letter.isspace() and ink.font.glyphindex(letter) == 0:
                raise FormulaError(tex, f"the font has no {letter}")

    left, top, width, height = (round(float(n)) for n in drawing.attrib["viewBox"].split())
    if display:
        style = f' style="height:{height / UNITS:.3g}em"'
    elif top < -ABOVE or top + height > BELOW:
        low = f"{-(top + height) / UNITS:.3g}"
        style = f' style="height:{height / UNITS:.3g}em;vertical-align:{low}em"'
    else:
        top, height, style = -ABOVE, ABOVE + BELOW, ""
    return (
        f'<svg aria-hidden="true" viewBox="{left} {top} {width} {height}"{style}>'
        f"{_strokes(drawing)}</svg>{spoken}"
    )


def _spoken(mathml: ET.Element) -> str:
    """Return MathML as HTML has it, without what is for the eye alone."""
    math = copy.deepcopy(mathml)
    for element in math.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in ("stretchy", "minsize", "maxsize"):
            element.attrib.pop(name, None)
    if math.get("display") == "inline":
        del math.attrib["display"]
    if [each.tag for each in math] == ["mrow"]:  # as <math> is one itself
        math[:] = list(math[0])
    return ET.tostring(math, encoding="unicode")


def _strokes(drawing: ET.Element) -> str:
    """Return the ink of ziamath's drawing: uses of outlines, lines in one path, whole units."""
    symbols = {f"#{each.get('id')}": each for each in drawing.iter("symbol")}
    ink, lines = [], []
    for shape in drawing:
        if shape.tag == "symbol":
            continue
        colour = "" if shape.get("fill") in INK else f' fill="{shape.get("fill")}"'
        if shape.tag == "use":
            symbol = symbols[shape.attrib["href"]]
            x, y, height = (float(shape.attrib[key]) for key in ("x", "y", "height"))
            left, top, _, whole = (float(n) for n in symbol.attrib["viewBox"].split())
            scale = round(height / whole * SIZE / UNITS, 3) * UNITS / SIZE
            parts = (part.get("d", "") for part in symbol.iter("path"))
            outline = _outline("".join(parts), scale)
            if outline:  # a space has none
                at = {"x": round(x - left * scale), "y": round(y - top * scale)}
                place = "".join(f' {key}="{n}"' for key, n in at.items() if n)
                ink.append(f'{USE}{outline}"{place}{colour}/>')
        elif shape.tag == "rect" and not colour:
            x, y, width, height = (
                round(float(shape.attrib[key])) for key in ("x", "y", "width", "height")
            )
            lines.append(f"M{x} {y}h{width}v{max(1, height)}h{-width}z")
        else:
            ink.append(ET.tostring(shape, encoding="unicode"))
    return "".join(ink) + (f'<path d="{"".join(lines)}"/>' if lines else "")


@functools.cache
def _outline(path: str, scale: float) -> str:
    """Return a glyph's outline with relative whole numbers: a third as long, and as sharp."""
    out, last = [], ""
    x, y = 0, 0
    control = None  # of the curve that ends here

    def step(command: str, *numbers: int) -> None:
        nonlocal last
        said = " ".join(map(str, numbers)).replace(" -", "-")
        if command != last or command == "M":
            out.append(command)
        elif not said.startswith("-"):
            out.append(" ")
        out.append(said)
        last = command

    for command, numbers in re.findall(r"([MLQZ])([^MLQZ]*)", path):
        points = [round(float(n) * scale) for n in numbers.split()]
        *bend, to_x, to_y = points or [x, y]
        dx, dy = to_x - x, to_y - y
        mirrored = control and (2 * x - control[0], 2 * y - control[1])
        control = None
        if command == "M":
            step("M", to_x, to_y)
        elif command == "Z":
            step("z")
        elif command == "L" and dx and dy:
            step("l", dx, dy)
        elif command == "L" and dx:
            step("h", dx)
        elif command == "L" and dy:
            step("v", dy)
        elif command == "Q":
            if mirrored and max(abs(mirrored[0] - bend[0]), abs(mirrored[1] - bend[1])) <= 1:
                step("t", dx, dy)  # goes on as it came
                control = mirrored
            elif any((dx, dy, bend[0] - x, bend[1] - y)):
                step("q", bend[0] - x, bend[1] - y, dx, dy)
                control = tuple(bend)
        x, y = to_x, to_y
    return "".join(out)


class Drawer(Treeprocessor):
    """Put the drawings in the place of what arithmatex has found."""

    def run(self, root: ET.Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex":
                tex = html.unescape(element.text or "")
                display = tex.startswith("\\[")
                element.set("class", "formula")
                element.text = self.md.htmlStash.store(draw(tex[2:-2].strip(), display))


class Glyphs(Postprocessor):
    """Put each outline once, and before all else, on the page whose formulas use it.

    Its id is the page's own, and has a capital, which no heading's has.
    """

    def run(self, text: str) -> str:
        names: dict[str, str] = {}

        def named(match: re.Match[str]) -> str:
            return f'<use href="#{names.setdefault(match[1], f"G{len(names)}")}"'

        text = re.sub(f'{USE}([^"]+)"', named, text)
        if not names:
            return text
        paths = (f'<path id="{name}" d="{outline}"/>' for outline, name in names.items())
        return f'<div hidden><svg aria-hidden="true">{"".join(paths)}</svg></div>\n{text}'
