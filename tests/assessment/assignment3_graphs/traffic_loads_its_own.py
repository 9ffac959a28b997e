"""Step 3: what the kernel made is loaded again"""

STEP, HINT = 3, "loads_made"


def traffic(kernels: list[list[Node]], sizes: dict[int, int], keep: set[int]) -> int:
    total = 0
    for i, kernel in enumerate(kernels):
        made = {node.output for node in kernel}
        loads = {n for node in kernel for n in node.inputs}
        later = {n for other in kernels[i + 1 :] for node in other for n in node.inputs}
        stored = made & (later | keep) | made & loads
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in stored)
    return total
