"""Step 3: a product joins, too"""

STEP, HINT = 3, "product_fused"


def fuse(nodes: list[Node]) -> list[list[Node]]:
    kernels: list[list[Node]] = []
    for node in nodes:
        if kernels and {n.output for n in kernels[-1]} & set(node.inputs):
            kernels[-1].append(node)
        else:
            kernels.append([node])
    return kernels
