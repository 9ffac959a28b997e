"""Make the JavaScript of the instruments smaller: remove its comments and unneeded spaces.

Strings, templates and regular expressions do not change. The modules contain no semicolons at
the ends of lines, so a line break can end a statement. It is removed only if the sign before or
after it already shows that the statement continues or ends.

The package rjsmin does not fit, because the modules contain templates inside templates. It
treats the inner template as code, and removes spaces from the text that a reader sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mkdocs.structure.files import File

INSTRUMENTS = re.compile(r"assets/instruments/\w+\.js")
LITERAL = re.compile(
    r"""
      (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<string> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
    | (?P<template> ` )
    | (?P<slash> / )
    | (?P<open> \{ ) | (?P<close> \} )
    """,
    re.VERBOSE | re.DOTALL,
)
REGULAR_EXPRESSION = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[\n])+/\w*")
BEFORE_EXPRESSION = re.compile(r"(?:^|[(,=:\[!&|?{};>]|\breturn)\s*$")
# The spaces in `a - -b` stay, because `--` is a different operator.
BESIDE_SIGN = re.compile(r" *([^\w\s$\"'`#@\\+-]) *|(?<![+-]) *([+-])(?! *[+-]) *")
# Line breaks that no statement needs: the sign before or after them shows that it continues or
# ends.
INSIDE_STATEMENT = re.compile(r"(?<=[({\[,?:=&|])\n+|\n+(?=[)}\],?:.&|])")


def minify(module: str) -> str:
    """Return the text of a JavaScript module without comments and unneeded spaces."""
    text, _ = _code(module, 0, inside_template=False)
    return re.sub(r"\n+", "\n", text).strip() + "\n"


def minify_instruments(files: Iterable[File]) -> None:
    """Replace the content of the modules of the instruments in the built site."""
    for file in files:
        if INSTRUMENTS.fullmatch(file.src_uri):
            file.content_string = minify(file.content_string)


def _code(text: str, start: int, inside_template: bool) -> tuple[str, int]:
    """Return code that begins at `start`, and the position of its end.

    Inside a template, the code ends at the brace that closes `${`. Otherwise, it ends at the
    end of the text.
    """
    out, depth, position = [], 0, start
    plain = ""  # the code after the last literal

    def flush() -> None:
        nonlocal plain
        out.append(_without_spaces(plain))
        plain = ""

    while found := LITERAL.search(text, position):
        plain += text[position : found.start()]
        kind, position = found.lastgroup, found.end()
        if kind == "open":
            depth, plain = depth + 1, plain + "{"
        elif kind == "close":
            if inside_template and depth == 0:
                flush()
                return "".join(out), position
            depth, plain = depth - 1, plain + "}"
        elif kind == "string":
            flush()
            out.append(found[0])
        elif kind == "template":
            flush()
            literal, position = _template(text, position)
            out.append(literal)
        elif kind == "slash":
            before = plain if plain.strip() else "".join(out[-1:]) + plain
            if BEFORE_EXPRESSION.search(before):
                flush()
                expression = REGULAR_EXPRESSION.match(text, found.start())
                out.append(expression[0])
                position = expression.end()
            else:
                plain += "/"
    plain += text[position:]
    flush()
    return "".join(out), len(text)


def _template(text: str, position: int) -> tuple[str, int]:
    """Return a template from its first character on, and the position after its end."""
    out = ["`"]
    while text[position] != "`":
        if text.startswith("${", position):
            code, position = _code(text, position + 2, inside_template=True)
            out.append(f"${{{code.strip()}}}")
        else:
            size = 2 if text[position] == "\\" else 1
            out.append(text[position : position + size])
            position += size
    return "".join([*out, "`"]), position + 1


def _without_spaces(code: str) -> str:
    """Return code without literals and without the spaces that separate nothing."""
    code = INSIDE_STATEMENT.sub("", re.sub(r"[ \t]*\n[ \t]*", "\n", code))
    return BESIDE_SIGN.sub(lambda sign: sign[1] or sign[2], code)
