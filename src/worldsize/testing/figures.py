"""Parse the labels, the curves, the colours and the line styles of SVG files, and compare them.

matplotlib removes points of a long line that are on a straight segment, so the same curve can
have different numbers of points. Curves with different numbers of points are therefore
resampled before they are compared.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from worldsize.model import BookError
from worldsize.model.transcript import DEFAULT_TOLERANCES, Tolerances, same_line

SAMPLES = 200  # number of points of a resampled curve
MAX_DISTANCE = 15.0  # between two equal points; a figure is about 500 wide
SHAPE_ATTRIBUTES = ("points", "transform", "x", "y", "width", "height", "cx", "cy", "r")
# In red, green and blue, each from 0 to 255. Neighbouring colours of matplotlib's continuous
# colour maps differ by at most 5.
MAX_COLOUR_DISTANCE = 5
_COORDINATE = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_COLOUR = re.compile(r"(?:^|;)\s*(?:fill|stroke|stop-color)\s*:\s*([^;]+)")
_LINE_STYLE = re.compile(r"(?:^|;)\s*(stroke-(?:width|dasharray)\s*:\s*[^;]+)")
_HEX = re.compile(r"#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})")

Point = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """One SVG element: its path, other numbers, its colours and the style of its line."""

    path: list[Point]
    numbers: list[float]  # in its other attributes
    colours: list[str]
    line_style: list[str]  # the width and the dashes of its line


@dataclass(frozen=True)
class Figure:
    """The labels of a figure, and one shape for each SVG element."""

    labels: list[str]
    shapes: list[Shape]

    @classmethod
    def parse(cls, text: str) -> Figure:
        """Read an SVG file.

        Raise BookError if it is not SVG, or if it would load a different file.
        """
        try:
            tree = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise BookError(f"it is not SVG: {error}") from None
        for element in tree.iter():
            for key, value in element.attrib.items():
                if key.endswith("href") and not value.startswith(("#", "data:")):
                    raise BookError(
                        f"it refers to {value}, but it must contain all of its parts"
                    )
        texts = [element for element in tree.iter() if element.tag.endswith("}text")]
        labels = ["".join(text.itertext()).strip() for text in texts]
        shapes = [_shape(element) for element in tree.iter()]
        return cls(labels, shapes)


def _with_letters(labels: list[str]) -> list[str]:
    return [label for label in labels if re.search(r"[^\W\d_]", label)]


def _shape(element: ElementTree.Element) -> Shape:
    """Return the coordinates and colours of an element; they are empty if it has none."""
    path = [float(number) for number in _COORDINATE.findall(element.get("d", ""))]
    numbers = [
        float(number)
        for name in SHAPE_ATTRIBUTES
        for number in _COORDINATE.findall(element.get(name, ""))
    ]
    colours = [element.get(name, "") for name in ("fill", "stroke", "stop-color")]
    colours += _COLOUR.findall(element.get("style", ""))
    colours = [colour.strip().lower() for colour in colours if colour]
    line_style = [element.get(f"stroke-{name}", "") for name in ("width", "dasharray")]
    line_style += _LINE_STYLE.findall(element.get("style", ""))
    return Shape(list(zip(path[::2], path[1::2], strict=False)), numbers, colours, line_style)


def distance(old: list[Shape], new: list[Shape]) -> float:
    """Return the largest distance between points; infinite if the shapes are different."""
    if len(old) != len(new):
        return math.inf
    return max(map(_shape_distance, old, new), default=0.0)


def _shape_distance(old: Shape, new: Shape) -> float:
    if len(old.numbers) != len(new.numbers) or bool(old.path) != bool(new.path):
        return math.inf
    distances = [abs(a - b) for a, b in zip(old.numbers, new.numbers, strict=True)]
    paths = old.path, new.path
    if len(old.path) != len(new.path):
        paths = resample(old.path), resample(new.path)
    distances += [max(abs(a - c), abs(b - d)) for (a, b), (c, d) in zip(*paths, strict=True)]
    return max(distances, default=0.0)


def same_colours(old: list[Shape], new: list[Shape]) -> bool:
    """Return whether the shapes have the same colours, except for rounding in a colour map."""
    pairs = zip(old, new, strict=True)
    return all(
        len(a.colours) == len(b.colours) and all(map(_same_colour, a.colours, b.colours))
        for a, b in pairs
    )


def same_line_styles(old: list[Shape], new: list[Shape]) -> bool:
    """Return whether the lines of the shapes have the same widths and dashes."""
    return all(a.line_style == b.line_style for a, b in zip(old, new, strict=True))


def _same_colour(old: str, new: str) -> bool:
    if old == new:
        return True
    values = [_HEX.fullmatch(colour) for colour in (old, new)]
    if None in values:
        return False
    pairs = zip(*(match.groups() for match in values), strict=True)
    return all(abs(int(a, 16) - int(b, 16)) <= MAX_COLOUR_DISTANCE for a, b in pairs)


def resample(path: list[Point], count: int = SAMPLES) -> list[Point]:
    """Return ``count`` points at equal distances along a path."""
    lengths = [math.dist(a, b) for a, b in itertools.pairwise(path)]
    total, points = sum(lengths), []
    segment, start = 0, 0.0  # the current segment, and the length of the path before it
    for number in range(count):
        target = total * number / (count - 1)
        while segment < len(lengths) - 1 and start + lengths[segment] < target:
            start += lengths[segment]
            segment += 1
        if not total:
            points.append(path[0])
            continue
        part = min(1.0, (target - start) / lengths[segment]) if lengths[segment] else 0.0
        (x0, y0), (x1, y1) = path[segment], path[segment + 1]
        points.append((x0 + part * (x1 - x0), y0 + part * (y1 - y0)))
    return points


def figure_difference(
    old: Figure, new: Figure, tolerances: Tolerances = DEFAULT_TOLERANCES
) -> str | None:
    """Return the difference of two figures as the end of a sentence, or None if they are equal.

    Labels are compared like lines of output, so a measured number in a label may differ. If the
    curves depend on the machine, the ticks of the axes also do. So labels without a letter are
    then not compared.
    """
    old_labels, new_labels = old.labels, new.labels
    if not tolerances.compare_points:
        old_labels, new_labels = _with_letters(old_labels), _with_letters(new_labels)
    pairs = itertools.zip_longest(old_labels, new_labels, fillvalue="")
    if all(same_line(*pair, tolerances) for pair in pairs):
        largest = distance(old.shapes, new.shapes) if tolerances.compare_points else 0.0
        if largest <= MAX_DISTANCE:
            if tolerances.compare_points and not same_colours(old.shapes, new.shapes):
                return "different colours"
            if tolerances.compare_points and not same_line_styles(old.shapes, new.shapes):
                return "lines with different widths or dashes"
            return None
        if math.isfinite(largest):
            return f"a point at a distance of {largest:.0f} from its old position"
        return "different shapes"
    diff = difflib.unified_diff(old_labels, new_labels, lineterm="", n=0)
    lines = [line for line in diff if line[:2] not in {"--", "++", "@@"}]
    return "different labels:\n" + "\n".join(lines)
