"""Tests of the reference card: it fits on one page, and every example is recomputed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS, open_complete

from worldsize.model.page import read

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = SITE_WITHOUT_COMMENTS
CARD = Path(__file__).resolve().parent.parent / "docs" / "11_reference_card.md"

# the model of the card (Llama 3 70B), its GPU, and a message of 1 GB between eight ranks
MODEL = {r"\Psi": 70e9, "L": 80, "h": 8192, "s": 8192, "a": 64, "b": 1, "g": 2}
GPU = {"P": 989e12, "W": 3.35e12}
PAPER = {r"\Psi": 7.5e9, "N": 64}  # ZeRO, Figure 1
RING = {"n": 8, "S": 1e9, r"\alpha": 10e-6, r"\beta": 1 / 100e9}
RING_TIME = 2 * 7 * 10e-6 + 2 * 7 / 8 * 1e9 / 100e9


def rows() -> dict[str, list[str]]:
    """Return the cells of each row of all tables of the card, by the text of the first cell."""
    found = {}
    for line in CARD.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) >= 2:
            name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[0])
            assert name not in found or name == "what", f"two rows have the name {name}"
            found[name] = cells
    return found


def compute(tex: str, **values: float) -> float:
    """Return the value of a formula of the card for these values of its letters."""
    for command, sign in ((r"\frac", "⅟"), (r"\sqrt", "√"), (r"\cdot", " "), (r"\,", " ")):
        tex = tex.replace(command, sign)
    tex = tex.replace(r"\lceil", "⌈").replace(r"\rceil", "⌉")
    for name in sorted(values, key=len, reverse=True):
        tex = tex.replace(name, f"({values[name]:.20f})")
    while "{" in tex:
        before = tex
        tex = re.sub(r"⅟\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", tex)
        tex = re.sub(r"√\{([^{}]*)\}", r"((\1)**0.5)", tex)
        tex = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", tex)
        assert tex != before, f"this test cannot compute {tex}"
    tex = re.sub(r"⌈(.*)⌉", r"-(-(\1)//1)", tex)
    tex = re.sub(r"(?<=[\d)])\s*(?=\()|(?<=\))\s*(?=\d)", "*", tex)
    assert not re.search(r"[^-+*/().\d\s]", tex), f"this test cannot compute {tex}"
    return eval(tex)


# for each row: the values of its letters, a factor, and the format of each example
EXAMPLES = {
    "mixed precision, Adam": (PAPER, 1e-9, "{:.0f} GB"),
    "ZeRO-1": (PAPER, 1e-9, "{:.1f} GB"),
    "ZeRO-2": (PAPER, 1e-9, "{:.1f} GB"),
    "ZeRO-3, FSDP": (PAPER, 1e-9, "{:.2f} GB"),
    "activations of a GPT layer with fused attention": (MODEL, 1e-9, "{:.2f} GB"),
    "the same, with stored scores": (MODEL, 1e-9, "{:.1f} GB"),
    "activations with TP and SP": ({"t": 34 * 8192 * 8192 / 8}, 1e-9, "{:.2f} GB"),
    "KV cache per token": (MODEL | {"a_{kv}": 8, "d": 128}, 1 / 1024, "{:.0f} KiB"),
    "training FLOPs": (MODEL | {"T": 15e12}, 1e-24, "{:.1f} · 10²⁴"),
    "attention, per token": (MODEL, 100 / (6 * 70e9), "{:.0f}%"),
    "MFU": (MODEL | GPU | {"N": 1, "T": 8192, r"\text{time}": 8}, 100, "{:.0f}%"),
    "duration": (
        {r"\Psi": 175e9, "T": 300e9, "N": 1024, "X": 140e12}, 1 / 86400, "{:.0f} days"
    ),
    "ridge point": (GPU, 1, "{:.0f} FLOP/byte"),
    "decode step, lower bound": (MODEL | GPU | {r"\Psi": 7.50e9}, 1e3, "{:.1f} ms"),
    "pipeline bubble relative to work; to the step": ({"p": 8, "m": 32}, 100, "{:.1f}%; {:.1f}%"),
    "interleaved bubble relative to work": ({"p": 8, "m": 32, "v": 4}, 100, "{:.1f}%"),
    "data-loader workers": (
        {r"t_\text{load}": 0.3, r"t_\text{step}": 0.04}, 1, ": {:.0f}"
    ),
    "time between checkpoints": ({r"\delta": 2 * 60, "M": 8 * 3600}, 1 / 60, "{:.0f} min"),
    "tokens per round of drafts": ({r"\eta": 0.8, r"\gamma": 4}, 1, "{:.1f}"),
    "ring all-reduce": (RING, 1e-9, "{:.2f} GB"),
    "reduce-scatter, all-gather, all-to-all": (RING, 1e-9, "{:.3f} GB"),
    "ring all-reduce, time": (RING, 1e3, "{:.1f} ms"),
    "its bus bandwidth": (RING | {r"\text{time}": RING_TIME}, 1e-9, "{:.0f} GB/s"),
    "DDP, ZeRO-1; ZeRO-2 if *m* = 1; bf16": (MODEL, 2e-9, "{:.0f} GB"),
    "ZeRO-3; bf16": (MODEL, 2e-9, "{:.0f} GB"),
    "TP, per layer": (MODEL, 1e-6, "{:.0f} MB"),
    "PP, per cut and micro-batch": (MODEL, 1e-6, "{:.0f} MB"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_formula_gives_the_number_of_its_example(name: str) -> None:
    values, factor, form = EXAMPLES[name]
    _, cell, example = rows()[name]
    results = [compute(tex, **values) * factor for tex in re.findall(r"\$([^$]+)\$", cell)
               if all(letter in values for letter in re.findall(r"\\Psi|[A-Z]", tex))]  # fmt: skip
    expected = form.format(*results)
    assert re.search(rf"(?<![\d.]){re.escape(expected)}(?![\d.])", example), (expected, example)


@pytest.mark.parametrize("name", ["A100 SXM", "H100 SXM", "H200 SXM", "B200"])
def test_the_ridge_point_is_flops_divided_by_bandwidth(name: str) -> None:
    _, flops, _, bandwidth, ridge = rows()[name]
    assert ridge == f"{float(flops) * 1e3 / float(bandwidth):.0f}"


def test_every_formula_has_an_example_that_is_recomputed() -> None:
    for anchor in ("memory", "time", "traffic-sent-by-each-rank"):
        for line in read(CARD).text(anchor).splitlines():
            if line.startswith("| ") and not line.startswith("| what"):
                name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.split(" | ")[0][2:])
                assert name in EXAMPLES, f"add {name} to EXAMPLES: no test recomputes it"
                assert "](" in line or name == "the same, with stored scores", (
                    f"add a link to the row {name}"
                )


def test_the_limits_of_formats_equal_those_of_torch() -> None:
    import torch

    for name, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.half),
    ):
        mantissa, exponent = f"{torch.finfo(dtype).eps:.1e}".split("e")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert rows()[name][-1] == f"{mantissa} · 10{raised}"
    text = CARD.read_text("utf-8")
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    assert "; ".join(f"{torch.finfo(k).max:.0f}" for k in kinds) in text
    assert "; ".join(f"{torch.finfo(k).eps:g}" for k in kinds) in text
    assert f"| {torch.finfo(torch.half).max:.0f} |" in text


def test_reading_times_equal_those_of_the_reading_list() -> None:
    pytest.importorskip("mkdocs")
    from worldsize.site import references

    known = references.load((CARD.parent / "references.yml").read_text("utf-8"))
    minutes = {entry.url: entry.minutes for entry in known.entries}
    listed = re.findall(
        r"\]\((https://[^)]+)\)[^|]*\| ([^|]+) \|$", CARD.read_text("utf-8"), re.M
    )
    assert listed
    for url, time in listed:
        assert references.duration(minutes[url]) == time, url


def test_every_letter_of_a_formula_is_explained() -> None:
    """The first paragraph of the card or the text of the row must name each letter."""
    text = CARD.read_text("utf-8")
    intro = text.split("{ .card-intro }")[0]
    for line in re.sub(r"`[^`]*`", "", text).splitlines():
        for formula in re.findall(r"\$([^$]+)\$", line if line.startswith("|") else ""):
            symbols = re.sub(r"\\text\{[^}]*\}|_\\text\{\w+\}|_\{\w+\}", "", formula)
            symbols = (
                symbols.replace(r"\Psi", "Ψ").replace(r"\alpha", "α").replace(r"\beta", "β")
            )
            symbols = (
                symbols.replace(r"\delta", "δ").replace(r"\eta", "η").replace(r"\gamma", "γ")
            )
            for letter in re.findall(r"[^\W\d_]", re.sub(r"\\[a-z]+", "", symbols)):
                words = intro + re.sub(r"\$[^$]+\$", "", line)
                named = f"*{letter}*" in words or (not letter.isascii() and letter in words)
                assert named, f"{letter} is not explained: {line}"


@pytest.fixture(scope="module")
def card(browser: Browser, site_url: str) -> Iterator[Page]:
    page = browser.new_page()
    open_complete(page, f"{site_url}11_reference_card/")
    yield page
    page.close()


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_card_prints_on_one_page(card: Page, paper: str) -> None:
    printed = card.pdf(format=paper)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


def assert_fits_the_screen(page: Page) -> None:
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_card_fits_the_screen(card: Page) -> None:
    assert_fits_the_screen(card)


@pytest.mark.parametrize("name", ["11_tools", "11_profiling_tools"])
def test_the_pages_about_tools_fit_the_screen(
    browser: Browser, site_url: str, name: str
) -> None:
    page = browser.new_page()
    open_complete(page, f"{site_url}{name}/")
    assert_fits_the_screen(page)
    page.close()


def test_the_tables_of_the_card_are_completely_visible_on_a_phone(card: Page) -> None:
    card.set_viewport_size({"width": 390, "height": 900})
    edges = card.locator(".reference-card table").evaluate_all(
        "tables => tables.map(table => table.getBoundingClientRect().right)"
    )
    assert edges and max(edges) <= 390
