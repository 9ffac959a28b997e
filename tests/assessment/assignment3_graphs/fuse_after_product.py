"""Step 3: a chain that begins with a product"""

STEP, HINT = 3, "product_fused"


def fuse(nodes):
    ks = []
    for node in nodes:
        if ks and node.pointwise and ks[-1][-1].output in node.inputs:
            ks[-1].append(node)
        else:
            ks.append([node])
    return ks
