"""Tooltips for terms: `docs/glossary.md` is their one source.

On the glossary page each term gets an id. On every other page the first use of a term in each
section becomes an `<abbr>` whose title is the first sentence of the term's definition. A page
with a sense of its own for some says so: ``<!-- not of the glossary: node, capacity -->``.
The line ``<!-- all terms by letter -->`` becomes an index of the glossary, and the line
``<!-- letters of all terms -->`` a row of links to its letters.
"""

import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

GLOSSARY = Path(__file__).parent.parent / "docs" / "glossary.md"
NEVER_INSIDE = {"a", "abbr", "code", "pre", "th", "h1", "h2", "h3", "h4", "h5", "h6", "summary"}


@functools.lru_cache(maxsize=2)
def _parse(text: str) -> dict[str, str]:
    terms = {}
    for names, definition in re.findall(r"^(\S.*)\n:   (.+(?:\n    .+)*)", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(definition.split()))
        plain = re.sub(r"[`*$]", "", plain)
        sentence = re.match(r".*?[.](?= |$)", plain)
        for name in names.split(" / "):
            terms[name] = sentence[0] if sentence else plain
    return terms


def terms() -> dict[str, str]:
    """Return each term of the glossary with the first sentence of its definition."""
    return _parse(GLOSSARY.read_text(encoding="utf-8"))


def slug(term: str) -> str:
    latin = term.lower().replace("α", "alpha").replace("β", "beta").replace("+", "p")
    return re.sub(r"[^a-z0-9]+", "-", latin).strip("-")


def by_letter() -> dict[str, list[tuple[str, str]]]:
    """Return, for each first letter, the terms with the slugs of their entries."""
    found: dict[str, list[tuple[str, str]]] = {}
    entries = re.findall(r"^(\S.*)\n:   ", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    for names in (entry.split(" / ") for entry in entries):
        for name in names:
            first = slug(name)[0].upper()
            letter = first if first.isalpha() else "0–9"
            found.setdefault(letter, []).append((name, slug(names[0])))
    return {
        letter: sorted(found[letter], key=lambda term: slug(term[0]))
        for letter in sorted(found)
    }


class _Index(Preprocessor):
    """Puts a list of links for each letter in the place of the comment that asks for it."""

    def run(self, lines: list[str]) -> list[str]:
        result = []
        for line in lines:
            place = re.match(r"( *)<!-- (all terms by letter|letters of all terms) -->$", line)
            if not place:
                result.append(line)
            elif place[2] == "letters of all terms":
                letters = (f"[{letter}](#terms-{slug(letter)})" for letter in by_letter())
                result += [" ".join(letters), "{: .terms-letters }"]
            else:
                for letter, terms_there in by_letter().items():
                    links = [f"- [{name}](#{to})" for name, to in terms_there]
                    head = f"**{letter}**{{: #terms-{slug(letter)} }}"
                    result += [
                        place[1] + each if each else "" for each in (head, "", *links, "")
                    ]
        return result


class _OwnSense(Preprocessor):
    """Takes the comment that names the terms with another sense on this page."""

    names: frozenset[str] = frozenset()

    def run(self, lines: list[str]) -> list[str]:
        found = [re.match(r"<!-- not of the glossary: (.+) -->$", line) for line in lines]
        listed = ", ".join(match[1] for match in found if match)
        self.names = frozenset(name.strip().lower() for name in listed.split(",") if name)
        return [line for line, match in zip(lines, found, strict=True) if not match]


class _Tooltips(Treeprocessor):
    def __init__(self, md: Markdown, own_sense: _OwnSense) -> None:
        super().__init__(md)
        self.own_sense = own_sense

    def run(self, root: ET.Element) -> None:
        lists = [e for e in root.iter("div") if e.get("class") == "glossary"]
        for name in (name for each in lists for name in each.iter("dt")):
            name.set("id", slug("".join(name.itertext()).split(" / ")[0]))
        if lists:
            return
        known = {name.lower(): (name, meaning) for name, meaning in terms().items()}
        if unknown := self.own_sense.names - known.keys():
            raise ValueError(f"not in the glossary anyway: {', '.join(sorted(unknown))}")
        self.terms = {name: known[name] for name in known.keys() - self.own_sense.names}
        longest_first = sorted(self.terms, key=len, reverse=True)
        words = "|".join(re.escape(name) for name in longest_first)
        # a term may stand in the plural, and must not be a part of a longer, hyphenated word
        self.pattern = re.compile(rf"(?<![\w-])({words})(?:e?s)?(?![\w-])", re.IGNORECASE)
        self.seen: set[str] = set()
        if self.terms:
            self._walk(root)

    def _walk(self, element: ET.Element) -> None:
        if element.tag in ("h1", "h2"):
            self.seen.clear()
        if element.tag in NEVER_INSIDE or element.get("class") in ("formula", "page-facts"):
            return
        self._mark(element, None)
        for child in list(element):
            self._walk(child)
            self._mark(element, child)

    def _mark(self, parent: ET.Element, after: ET.Element | None) -> None:
        """Mark the terms in the text of `parent` that stands behind its child `after`."""
        text = parent.text if after is None else after.tail
        if not text or isinstance(text, AtomicString):
            return
        place = 0 if after is None else list(parent).index(after) + 1
        pieces, last = [], 0
        for match in self.pattern.finditer(text):
            name, meaning = self.terms[match[1].lower()]
            if meaning in self.seen or (name != name.lower() and match[1] != name):
                continue  # explained already, perhaps by another name; or "zeros", not ZeRO
            self.seen.add(meaning)
            pieces.append((text[last : match.start()], match[0], meaning))
            last = match.end()
        if not pieces:
            return
        before, previous = pieces[0][0], None
        if after is None:
            parent.text = before
        else:
            after.tail = before
        for number, (lead, word, meaning) in enumerate(pieces):
            if previous is not None:
                previous.tail = lead
            previous = ET.Element("abbr", {"title": meaning})
            previous.text = AtomicString(word)
            parent.insert(place + number, previous)
        previous.tail = text[last:]


class GlossaryExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        own_sense = _OwnSense(md)
        md.preprocessors.register(own_sense, "glossary", 26)
        md.preprocessors.register(_Index(md), "glossary-index", 26.5)
        md.treeprocessors.register(_Tooltips(md, own_sense), "glossary", 8)


def makeExtension(**kwargs) -> GlossaryExtension:
    return GlossaryExtension(**kwargs)
