"""Draw formulas while the site is built: as inline SVG, with MathML for screen readers.

pymdownx.arithmatex finds `$…$` and `$$…$$`, and ziamath draws them with its own font. A page
therefore needs neither a script nor a mathematics font, and nothing moves while it loads. A
page contains the outline of each glyph only once, and all its formulas refer to it. A formula
that cannot be drawn stops the build.
"""

import copy
import functools
import html
import re
import xml.etree.ElementTree as ET

import ziamath
from markdown.postprocessors import Postprocessor
from markdown.treeprocessors import Treeprocessor
from mkdocs.exceptions import BuildError  # MkDocs prints it without a traceback
from ziamath.tex import tex2mml

UNITS = 400  # units of a drawing per em, so that whole numbers are precise enough
# units above and below the baseline: the room that book.css gives a formula in a line of text
ABOVE, BELOW = 300, 100
INK = ("currentColor", "black")  # the text colour; ziamath draws some lines only in black
SIZE = 12  # the font size in which ziamath stores the outlines of its symbols
USE = '<use href="#glyph '  # the outline follows, until `Glyphs` replaces it by an id

ziamath.config.svg2 = True  # draw each glyph as a symbol, and refer to it with <use>
ziamath.config.precision = 4


class FormulaError(BuildError):
    """A formula cannot be drawn."""

    def __init__(self, tex: str, why: str) -> None:
        super().__init__(f"a formula cannot be drawn: {why}\n    {tex}")


@functools.cache
def draw(tex: str, display: bool = False) -> str:
    """Return the HTML of a formula: an SVG that screen readers skip, and MathML for them.

    The HTML contains the outline of each glyph. `Glyphs` then moves the outlines to the top of
    the page, each of them once. Raise FormulaError if the formula cannot be drawn.
    """
    if re.sub(r"\\.", "", tex).count("{") != re.sub(r"\\.", "", tex).count("}"):
        raise FormulaError(tex, "its braces do not match")
    try:
        mathml = ET.fromstring(tex2mml(tex, inline=not display))
        spoken = _spoken(mathml)
        mathml.set("mathcolor", INK[0])
        # remove the inner <mrow>, which doubles the work and which only line breaks need
        if r"\\" not in tex:
            mathml[:] = mathml[0]
        ink = ziamath.Math(mathml, size=UNITS, margin=0)
        drawing = ink.svgxml()
    except Exception as error:
        raise FormulaError(tex, f"{type(error).__name__} {error}".strip()) from error
    for text in mathml.itertext():
        if "\\" in text:  # latex2mathml turns an unknown command into text
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
    """Return MathML as HTML, without namespaces and attributes for the visual layout."""
    math = copy.deepcopy(mathml)
    for element in math.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in ("stretchy", "minsize", "maxsize"):
            element.attrib.pop(name, None)
    if math.get("display") == "inline":
        del math.attrib["display"]
    if [each.tag for each in math] == ["mrow"]:  # <math> itself works like an <mrow>
        math[:] = list(math[0])
    return ET.tostring(math, encoding="unicode")


def _strokes(drawing: ET.Element) -> str:
    """Return the shapes of a drawing as SVG in whole units.

    Glyphs refer to their outlines, and all straight lines are one path.
    """
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
            if outline:  # a space has no outline
                offsets = {"x": round(x - left * scale), "y": round(y - top * scale)}
                position = "".join(f' {key}="{n}"' for key, n in offsets.items() if n)
                ink.append(f'{USE}{outline}"{position}{colour}/>')
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
    """Return the outline of a glyph in relative whole numbers, a third as long and as sharp."""
    out, last = [], ""
    x, y = 0, 0
    control = None  # the control point of the curve that ends here

    def step(command: str, *numbers: int) -> None:
        nonlocal last
        arguments = " ".join(map(str, numbers)).replace(" -", "-")
        if command != last or command == "M":
            out.append(command)
        elif not arguments.startswith("-"):
            out.append(" ")
        out.append(arguments)
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
                step("t", dx, dy)  # a smooth continuation of the last curve
                control = mirrored
            elif any((dx, dy, bend[0] - x, bend[1] - y)):
                step("q", bend[0] - x, bend[1] - y, dx, dy)
                control = tuple(bend)
        x, y = to_x, to_y
    return "".join(out)


class Drawer(Treeprocessor):
    """A processor that replaces the formulas that arithmatex has found by their drawings."""

    def run(self, root: ET.Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex":
                tex = html.unescape(element.text or "")
                display = tex.startswith("\\[")
                element.set("class", "formula")
                element.text = self.md.htmlStash.store(draw(tex[2:-2].strip(), display))


class Glyphs(Postprocessor):
    """A processor that moves the outlines of glyphs to the top of the page, each of them once.

    The ids of outlines contain a capital letter, so they differ from the ids of headings.
    """

    def run(self, text: str) -> str:
        ids: dict[str, str] = {}  # by the outline

        def with_id(match: re.Match[str]) -> str:
            return f'<use href="#{ids.setdefault(match[1], f"G{len(ids)}")}"'

        text = re.sub(f'{USE}([^"]+)"', with_id, text)
        if not ids:
            return text
        paths = (f'<path id="{each}" d="{outline}"/>' for outline, each in ids.items())
        return f'<div hidden><svg aria-hidden="true">{"".join(paths)}</svg></div>\n{text}'
