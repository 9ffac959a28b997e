"""Step 3: what has nothing in common is fused"""

STEP, HINT = 3, "stranger"


def fuse(nodes: list[Node]) -> list[list[Node]]:
    kernels: list[list[Node]] = []
    for node in nodes:
        if node.pointwise and kernels and kernels[-1][0].pointwise:
            kernels[-1].append(node)
        else:
            kernels.append([node])
    return kernels
