"""Step 2: a result is overwritten"""

STEP, HINT = 2, "overlap"


def plan(nodes: list[Node], sizes: dict[int, int], keep: set[int]) -> dict[int, int]:
    last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
    seen, offsets = set(), {}
    for i, node in enumerate(nodes):
        seen |= set(node.inputs)
        if node.output in seen:
            continue
        seen.add(node.output)
        place = 0
        for start, n in sorted((o, n) for n, o in offsets.items() if last[n] >= i):
            if start - place >= sizes[node.output]:
                break
            place = max(place, start + sizes[n])
        offsets[node.output] = place
    return offsets
