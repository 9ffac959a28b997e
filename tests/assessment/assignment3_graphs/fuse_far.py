"""Step 3: a node joins a kernel of long ago"""

STEP, HINT = 3, "reordered"


def fuse(nodes: list[Node]) -> list[list[Node]]:
    kernels: list[list[Node]] = []
    for node in nodes:
        for kernel in kernels:
            made = {n.output for n in kernel}
            if node.pointwise and kernel[0].pointwise and made & set(node.inputs):
                kernel.append(node)
                break
        else:
            kernels.append([node])
    return kernels
