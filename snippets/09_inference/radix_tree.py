"""A radix tree of prefixes finds the longest part of a prompt that is in the cache.

The edges have runs of tokens as labels. A new prompt follows the tree as far as it agrees, and
an edge is split where two prompts differ. The tree is compared with a search through all
earlier prompts, and with blocks of four tokens that are found by a hash. Draws radix_tree.svg.
"""

from dataclasses import dataclass, field

BLOCK = 4
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
PROMPTS = [  # a token is a word here
    "You are a polite assistant . Translate to French : good morning",
    "You are a polite assistant . Translate to German : good night",
    "You are a polite assistant . Summarize this text : ...",
    "You are a polite assistant . Translate to German : good morning",
    "You are a strict reviewer . Read this code : ...",
]


# --8<-- [start:tree]
@dataclass
class Node:
    """A node, and the tokens on the edge that leads to it."""

    edge: list[str] = field(default_factory=list)
    children: dict[str, "Node"] = field(default_factory=dict)  # by the first token of the edge
    last_use: int = 0


def common(a: list[str], b: list[str]) -> int:
    """How many tokens at the start of `a` and `b` are equal."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def insert(root: Node, tokens: list[str], now: int) -> int:
    """Add a prompt to the tree. Returns how many of its tokens were there already."""
    node, found = root, 0
    while found < len(tokens):
        child = node.children.get(tokens[found])
        if child is None:
            node.children[tokens[found]] = Node(tokens[found:], {}, now)
            return found
        same = common(child.edge, tokens[found:])
        if same < len(child.edge):  # split the edge where the two prompts differ
            rest = Node(child.edge[same:], child.children, child.last_use)
            child.edge, child.children = child.edge[:same], {rest.edge[0]: rest}
        child.last_use = now
        node, found = child, found + same
    return found


def leaves(node: Node) -> list[tuple[Node, Node]]:
    """All leaves below `node`, each with its parent."""
    found = []
    for child in node.children.values():
        found += leaves(child) if child.children else [(node, child)]
    return found


def evict(root: Node) -> list[str]:
    """Remove the leaf that was used least recently. Returns the tokens of its edge."""
    parent, leaf = min(leaves(root), key=lambda pair: pair[1].last_use)
    del parent.children[leaf.edge[0]]
    return leaf.edge


# --8<-- [end:tree]


def stored(node: Node) -> int:
    """Tokens in the whole tree below `node`."""
    return len(node.edge) + sum(map(stored, node.children.values()))


def found_in_blocks(tokens: list[str], known: set[tuple[str, ...]]) -> int:
    """Tokens in the known blocks of a prompt, from its start; adds its new blocks."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    found = max((end for end in ends if tuple(tokens[:end]) in known), default=0)
    known.update(tuple(tokens[:end]) for end in ends)
    return found


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw_node(node: Node, x: float, y: float) -> tuple[list[str], float]:
    """The edges below `node`, which is at (x, y); also the y of the next free row."""
    parts, row = [], y
    for child in node.children.values():
        words = " ".join(child.edge)
        width = 7.3 * len(words) + 26
        leaf = not child.children
        colour = BLUE if leaf else GREEN
        parts.append(
            f'<path d="M{x} {y}V{row}H{x + width}" fill="none" stroke="{colour}" '
            'stroke-width="1.8"/>'
        )
        parts.append(draw_text(x + 10, row - 7, words, INK, 14))
        parts.append(f'<circle cx="{x + width}" cy="{row}" r="5" fill="{colour}"/>')
        if leaf:
            used = f"prompt {child.last_use}"
            parts.append(draw_text(x + width + 12, row + 5, used, MUTED, 13))
            row += 46
        else:
            below, row = draw_node(child, x + width, row)
            parts += below
    return parts, row


def draw(root: Node) -> str:
    parts, height = draw_node(root, 16, 40)
    view = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height:.0f}" '
    start = f'<circle cx="16" cy="40" r="5" fill="{ORANGE}"/>'
    start += draw_text(4, 18, "root", MUTED, 13)
    family = 'font-family="system-ui, sans-serif">'
    return "\n".join([view + family, start, *parts, "</svg>", ""])


def main() -> None:
    root, known, before = Node(), set(), []
    print("prompt   tokens   found by the tree   found in blocks of 4")
    for number, prompt in enumerate(PROMPTS, 1):
        tokens = prompt.split()
        found, blocks = insert(root, tokens, number), found_in_blocks(tokens, known)
        print(f"{number:6} {len(tokens):8} {found:19} {blocks:22}")
        assert found == max((common(tokens, other) for other in before), default=0)
        assert blocks == found - found % BLOCK, "blocks find the same, in whole blocks"
        before.append(tokens)
        prefixes = {tuple(other[:n]) for other in before for n in range(1, len(other) + 1)}
        assert stored(root) == len(prefixes), "each prefix is stored exactly once"
    assert sum(map(len, before)) > 1.5 * stored(root), "nothing was shared"
    print(f"{sum(map(len, before))} tokens in the prompts, {stored(root)} in the tree")
    with open("radix_tree.svg", "w", encoding="utf-8") as file:
        file.write(draw(root))
    total = stored(root)
    first = evict(root)
    print(f"evicted first: {' '.join(first)}")
    assert first == ["French", ":", "good", "morning"], "the oldest leaf, not the shared edge"
    assert stored(root) == total - len(first)
    assert insert(root, PROMPTS[0].split(), 6) == common(PROMPTS[0].split(), PROMPTS[1].split())
    part = PROMPTS[2].split()[:-2]  # this prompt ends inside an edge: it does not use the rest
    assert insert(root, part, 7) == len(part)
    assert [evict(root) for _ in range(3)] == [["night"], [":", "..."], ["morning"]]


if __name__ == "__main__":
    main()
