"""Step 2: at the bottom or on top, in no gap between"""

STEP, HINT = 2, "first_gap"


def plan(nodes: list[Node], sizes: dict[int, int], keep: set[int]) -> dict[int, int]:
    last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
    last |= dict.fromkeys(keep, len(nodes))
    seen, offsets = set(), {}
    for i, node in enumerate(nodes):
        seen |= set(node.inputs)
        if node.output in seen:
            continue
        seen.add(node.output)
        living = [(o, o + sizes[n]) for n, o in offsets.items() if last[n] >= i]
        bottom = min((start for start, _ in living), default=0)
        top = max((end for _, end in living), default=0)
        offsets[node.output] = 0 if bottom >= sizes[node.output] else top
    return offsets
