"""The reference card: one sheet of paper, every row linked, every example recomputed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

INPUTS = ["book", "docs", "labs", "mkdocs.yml", "overrides", "snippets", "tests/conftest.py"]
CARD = Path(__file__).resolve().parent.parent / "docs" / "11_reference_card.md"

# the card's model, Llama 3 70B, and its cluster
H, S, HEADS, L = 8192, 8192, 64, 80
PSI, PEAK, W = 70e9, 989e12, 3.35e12


def rows() -> dict[str, str]:
    """The last cell of each row of the card, by the words of the first."""
    found = {}
    for line in CARD.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) >= 2:
            name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[0])
            assert name not in found or name == "what", f"two rows are called {name}"
            found[name] = cells[-1]
    return found


def zero(stage: int, parameters: float, ranks: int) -> float:
    """Bytes a rank holds, mixed precision with Adam."""
    return parameters * {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]


ring_time = 2 * 7 * 10e-6 + 2 * 7 / 8 * 1e9 / 100e9
EXAMPLES = {
    "mixed precision, Adam": f"{16 * 7.5e9 / 1e9:.0f} GB",
    "ZeRO-1": f"{zero(1, 7.5e9, 64) / 1e9:.1f} GB",
    "ZeRO-2": f"{zero(2, 7.5e9, 64) / 1e9:.1f} GB",
    "ZeRO-3, FSDP": f"{zero(3, 7.5e9, 64) / 1e9:.2f} GB",
    "activations of a GPT layer, fused attention": f"{34 * S * H / 1e9:.2f} GB",
    "the same, scores kept": f"{S * H * (34 + 5 * HEADS * S / H) / 1e9:.1f} GB",
    "with TP and SP": f"{34 * S * H / 8 / 1e9:.2f} GB",
    "KV cache of a token": f"{2 * 80 * 8 * 128 * 2 / 1024:.0f} KiB",
    "training FLOPs": f"{6 * PSI * 15e12 / 1e24:.1f} · 10²⁴",
    "attention beside it, per token": f"{12 * L * H * S / (6 * PSI):.0%}",
    "MFU": f"{(6 * PSI + 12 * L * H * S) * 8192 / (PEAK * 8):.0%}",
    "days": f"{8 * 175e9 * 300e9 / (1024 * 140e12) / 86400:.0f} days",
    "ridge": f"{PEAK / W:.0f} FLOP/byte",
    "decode, at least": f"{2 * 8.03e9 / W * 1e3:.1f} ms",
    "pipeline bubble / work; of the whole": f"{7 / 32:.1%}; {7 / 39:.1%}",
    "interleaved / work": f"{7 / (4 * 32):.1%}",
    "loader's workers": f": {math.ceil(300 / 40)}",
    "save every": f"{math.sqrt(2 * 120 * 8 * 3600) / 60:.0f} min",
    "tokens a draft round": f"{(1 - 0.8**5) / (1 - 0.8):.1f}",
    "ring all-reduce": f"{2 * 7 / 8:.2f} GB",
    "reduce-scatter, all-gather, all-to-all": f"{7 / 8:.3f} GB",
    "ring all-reduce, time": f"{ring_time * 1e3:.1f} ms",
    "its bus bandwidth": f"{2 * 7 / 8 * 1e9 / ring_time / 1e9:.0f} GB/s",
    "DDP, ZeRO-1, 2, bf16": f"{2 * PSI * 2 / 1e9:.0f} GB",
    "ZeRO-3, bf16": f"{3 * PSI * 2 / 1e9:.0f} GB",
    "TP, each layer": f"{2 * S * H / 1e6:.0f} MB",
    "PP, each border and micro-batch": f"{2 * S * H / 1e6:.0f} MB",
    "A100 SXM": f"{312 / 2.039:.0f}",
    "H100 SXM": f"{989 / 3.35:.0f}",
    "H200 SXM": f"{989 / 4.8:.0f}",
    "B200": f"{2250 / 8:.0f}",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    assert re.search(rf"(?<![\d.]){re.escape(EXAMPLES[name])}(?![\d.])", rows()[name])


def test_every_formula_has_an_example_that_is_recomputed() -> None:
    text = CARD.read_text("utf-8")
    for title in ("Memory", "Time", "Traffic, sent by each rank"):
        section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| what"):
                name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.split(" | ")[0][2:])
                assert name in EXAMPLES, f"nothing recomputes the example of {name}"
                assert "](" in line or name == "the same, scores kept", f"no link: {name}"


def test_formats() -> None:
    import torch

    for name, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.half),
    ):
        mantissa, exponent = f"{torch.finfo(dtype).eps:.1e}".split("e")
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert rows()[name] == f"{mantissa} · 10{raised}"
    text = CARD.read_text("utf-8")
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    assert "; ".join(f"{torch.finfo(k).max:.0f}" for k in kinds) in text
    assert "; ".join(f"{torch.finfo(k).eps:g}" for k in kinds) in text
    assert f"| {torch.finfo(torch.half).max:.0f} |" in text


def test_reading_takes_as_long_as_the_list_says() -> None:
    pytest.importorskip("yaml")
    from book import references

    data = references.load((CARD.parent / "references.yml").read_text("utf-8"))
    minutes = {entry["url"]: entry["minutes"] for entry in data["entries"]}
    said = re.findall(
        r"\]\((https://[^)]+)\)[^|]*\| ([^|]+) \|$", CARD.read_text("utf-8"), re.M
    )
    assert len(said) == 6
    for url, time in said:
        assert references.duration(minutes[url]) == time, url


def test_every_letter_of_a_formula_is_explained() -> None:
    """In the card's first paragraph, or in the words of its own row."""
    text = CARD.read_text("utf-8")
    intro = text.split("{ .card-intro }")[0]
    for line in re.sub(r"`[^`]*`", "", text).splitlines():
        for formula in re.findall(r"\$([^$]+)\$", line if line.startswith("|") else ""):
            plain = re.sub(r"\\text\{[^}]*\}|_\\text\{\w+\}|_\{\w+\}", "", formula)
            plain = plain.replace(r"\Psi", "Ψ").replace(r"\alpha", "α").replace(r"\beta", "β")
            plain = plain.replace(r"\delta", "δ").replace(r"\eta", "η").replace(r"\gamma", "γ")
            for letter in re.findall(r"[^\W\d_]", re.sub(r"\\[a-z]+", "", plain)):
                words = intro + re.sub(r"\$[^$]+\$", "", line)
                named = f"*{letter}*" in words or (not letter.isascii() and letter in words)
                assert named, f"{letter} is not explained: {line}"


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_prints_on_one_page(browser: Browser, address: str, paper: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}11_reference_card/", wait_until="networkidle")
    printed = page.pdf(format=paper)
    page.close()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["11_reference_card", "11_tools"])
def test_fits_the_screen(browser: Browser, address: str, name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(f"{address}{name}/", wait_until="networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_nothing_of_the_card_is_out_of_sight_on_a_phone(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address}11_reference_card/", wait_until="networkidle")
    wide = page.locator(".reference-card table").evaluate_all(
        "tables => tables.map(table => table.getBoundingClientRect().right)"
    )
    assert len(wide) == 9 and max(wide) <= 390
    page.close()
