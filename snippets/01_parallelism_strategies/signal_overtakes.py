"""A picture of a signal that overtakes the data, and of two protocols that prevent this.

The sender puts the words A and B through two channels of a network card, and then a signal
through a third channel. Time runs from top to bottom, and the slowest channel carries A. In the
first panel the receiver reads A too early. In the second panel, a fence delays the signal. In
the third panel, each put carries a signal, and the receiver waits for two signals.
Draws signal_overtakes.svg.
"""

INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"A": "#0b6e99", "B": "#15803d", "signal": "#c2410c"}
SENT = {"A": 0.0, "B": 1.0, "signal": 2.0}  # the sender issues one put after the other
LATENCY = {"A": 6.0, "B": 2.0, "signal": 2.0}  # of the channel that carries the put
WIDTH, HEIGHT, PANEL, TOP, STEP = 744, 340, 248, 62, 30


def arrivals(protocol: str) -> dict[str, float]:
    """When each put arrives, and when the receiver has all signals that it waits for."""
    time = {name: SENT[name] + LATENCY[name] for name in ("A", "B")}
    if protocol == "signal with each put":
        return time | {"signal": max(time.values())}  # the second of two signals
    signal = SENT["signal"] + LATENCY["signal"]
    if protocol == "fence, then signal":
        signal = max(signal, *time.values())  # the network keeps the order
    return time | {"signal": signal}


def old_words(time: dict[str, float]) -> list[str]:
    """The words that are still old when the receiver has its signal."""
    return [name for name in ("A", "B") if time[name] > time["signal"]]


def text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "middle") -> str:
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def height(time: float) -> float:
    return TOP + 14 + STEP * time


def panel(left: float, protocol: str, time: dict[str, float]) -> list[str]:
    x0, x1 = left + 58, left + 154
    parts = [text(left, 18, protocol, INK, 14, "start")]
    for x, name in ((x0, "sender"), (x1, "receiver")):
        parts.append(text(x, 44, name, MUTED, 14))
        parts.append(f'<path d="M{x} {TOP - 8} V{HEIGHT - 34}" stroke="{MUTED}" fill="none"/>')
    for name in ("A", "B", "signal"):
        if name == "signal" and protocol == "signal with each put":
            continue  # it is part of each put
        dashes = "6 4" if name == "signal" else "none"
        y0, y1, colour = height(SENT[name]), height(time[name]), COLOURS[name]
        if name == "signal":
            y1 += 10 * (y1 == height(max(time["A"], time["B"])))  # just after the last word
        parts.append(
            f'<path d="M{x0} {y0:g} L{x1 - 2} {y1:g}" stroke="{colour}" stroke-width="3" '
            f'fill="none" stroke-dasharray="{dashes}"/>'
        )
        parts.append(f'<circle cx="{x1}" cy="{y1:g}" r="5" fill="{colour}"/>')
        word = f"{name} + signal" if protocol == "signal with each put" else name
        parts.append(text(x0 - 6, y0 + 4, name, colour, 14, "end"))
        parts.append(text(x1 + 10, y1 + 5 + 6 * (name == "signal"), word, colour, 14, "start"))
    read = height(time["signal"]) + 30
    old = old_words(time)
    parts.append(f'<rect x="{x1 - 6}" y="{read:g}" width="12" height="12" fill="{INK}"/>')
    parts.append(text(x1 + 10, read + 11, "read", INK, 14, "start"))
    words = f"{', '.join(old)} is old" if old else "A and B are new"
    parts.append(text(left, HEIGHT - 12, f"When it reads, {words}.", INK, 14, "start"))
    return parts


def main() -> None:
    protocols = ("put, put, signal", "fence, then signal", "signal with each put")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">'
    ]
    for index, protocol in enumerate(protocols):
        time = arrivals(protocol)
        old = old_words(time)
        assert old == (["A"] if protocol == "put, put, signal" else [])
        assert time["signal"] <= max(time["A"], time["B"])  # no protocol waits longer
        assert (time["A"], time["B"]) == (6, 3)  # a protocol does not change the channels
        print(f"{protocol:20}  reads after {time['signal']:g} steps, old: {old or 'nothing'}")
        parts += panel(2 + index * PANEL, protocol, time)
    with open("signal_overtakes.svg", "w", encoding="utf-8") as file:
        file.write("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
