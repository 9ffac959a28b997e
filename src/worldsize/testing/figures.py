"""Figures: the labels and the curves of an SVG file, and how far two figures are apart.

matplotlib leaves out points of a long line that lie on a straight segment, so the same curve
can have different numbers of points. Curves with different numbers of points are therefore
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

SAMPLES = 200  # points, at equal distances along a curve
MAX_DISTANCE = 15.0  # between two points that count as equal; figures are some 500 wide
SHAPE_ATTRIBUTES = ("points", "transform", "x", "y", "width", "height", "cx", "cy", "r")
_COORDINATE = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")

Point = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """The coordinates of one SVG element: its path, and the numbers of its other attributes."""

    path: list[Point]
    numbers: list[float]


@dataclass(frozen=True)
class Figure:
    """The labels of a figure that contain a letter, and the shapes that are not text."""

    labels: list[str]
    shapes: list[Shape]

    @classmethod
    def parse(cls, text: str) -> Figure:
        """Read an SVG file.

        Raises BookError where it is not SVG, or where it would load a file from elsewhere.
        """
        try:
            tree = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise BookError(f"it is not SVG: {error}") from None
        for element in tree.iter():
            for key, value in element.attrib.items():
                if key.endswith("href") and not value.startswith(("#", "data:")):
                    raise BookError(f"it refers to {value}")
        texts = [each for each in tree.iter() if each.tag.endswith("}text")]
        labels = ["".join(each.itertext()).strip() for each in texts]
        shapes = [_shape(each) for each in tree.iter() if not each.tag.endswith("}text")]
        return cls([label for label in labels if re.search(r"[^\W\d_]", label)], shapes)


def _shape(element: ElementTree.Element) -> Shape:
    path = [float(number) for number in _COORDINATE.findall(element.get("d", ""))]
    numbers = [
        float(number)
        for name in SHAPE_ATTRIBUTES
        for number in _COORDINATE.findall(element.get(name, ""))
    ]
    return Shape(list(zip(path[::2], path[1::2], strict=False)), numbers)


def distance(old: list[Shape], new: list[Shape]) -> float:
    """Return the largest distance between points of two figures; infinite for other shapes."""
    if len(old) != len(new):
        return math.inf
    return max(map(_shape_distance, old, new), default=0.0)


def _shape_distance(old: Shape, new: Shape) -> float:
    if len(old.numbers) != len(new.numbers) or bool(old.path) != bool(new.path):
        return math.inf
    far = [abs(a - b) for a, b in zip(old.numbers, new.numbers, strict=True)]
    paths = old.path, new.path
    if len(old.path) != len(new.path):
        paths = resample(old.path), resample(new.path)
    far += [max(abs(a - c), abs(b - d)) for (a, b), (c, d) in zip(*paths, strict=True)]
    return max(far, default=0.0)


def resample(path: list[Point], count: int = SAMPLES) -> list[Point]:
    """Return ``count`` points at equal distances along a path."""
    lengths = [math.dist(a, b) for a, b in itertools.pairwise(path)]
    total, points = sum(lengths), []
    segment, passed = 0, 0.0
    for number in range(count):
        target = total * number / (count - 1)
        while segment < len(lengths) - 1 and passed + lengths[segment] < target:
            passed += lengths[segment]
            segment += 1
        if not total:
            points.append(path[0])
            continue
        part = min(1.0, (target - passed) / lengths[segment]) if lengths[segment] else 0.0
        (x0, y0), (x1, y1) = path[segment], path[segment + 1]
        points.append((x0 + part * (x1 - x0), y0 + part * (y1 - y0)))
    return points


def figure_difference(
    old: Figure, new: Figure, tolerances: Tolerances = DEFAULT_TOLERANCES
) -> str | None:
    """Return what differs between two figures, as the end of a sentence; None if nothing.

    Labels are compared like lines of output, so a measured number may differ in both.
    """
    labels = itertools.zip_longest(old.labels, new.labels, fillvalue="")
    if all(same_line(*pair, tolerances) for pair in labels):
        far = distance(old.shapes, new.shapes) if tolerances.compare_points else 0.0
        if far <= MAX_DISTANCE:
            return None
        return f"a point {far:.0f} away" if math.isfinite(far) else "other lines"
    diff = difflib.unified_diff(old.labels, new.labels, lineterm="", n=0)
    words = [line for line in diff if line[:2] not in {"--", "++", "@@"}]
    return "other words:\n" + "\n".join(words)
