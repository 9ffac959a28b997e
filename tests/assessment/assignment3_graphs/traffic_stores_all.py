"""Step 3: everything is stored"""

STEP, HINT = 3, "stores_dead"


def traffic(kernels: list[list[Node]], sizes: dict[int, int], keep: set[int]) -> int:
    total = 0
    for kernel in kernels:
        made, loads = set(), set()
        for node in kernel:
            loads |= set(node.inputs) - made
            made.add(node.output)
        total += sum(sizes[n] for n in loads | made)
    return total
