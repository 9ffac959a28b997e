"""Step 2: every buffer has memory of its own"""

STEP, HINT = 2, "no_reuse"


def plan(nodes: list[Node], sizes: dict[int, int], keep: set[int]) -> dict[int, int]:
    offsets, seen, top = {}, set(), 0
    for node in nodes:
        seen |= set(node.inputs)
        if node.output not in seen:
            seen.add(node.output)
            offsets[node.output] = top
            top += sizes[node.output]
    return offsets
