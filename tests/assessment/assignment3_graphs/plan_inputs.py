"""Step 2: inputs have an offset, too"""

STEP, HINT = 2, "inputs_planned"


def plan(nodes: list[Node], sizes: dict[int, int], keep: set[int]) -> dict[int, int]:
    offsets, top = {}, 0
    for node in nodes:
        for number in (*node.inputs, node.output):
            if number not in offsets:
                offsets[number] = top
                top += sizes[number]
    return offsets
