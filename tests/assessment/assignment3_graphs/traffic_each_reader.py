"""Step 3: every node loads for itself"""

STEP, HINT = 3, "loads_twice"


def traffic(kernels: list[list[Node]], sizes: dict[int, int], keep: set[int]) -> int:
    total = 0
    for i, kernel in enumerate(kernels):
        made = set()
        for node in kernel:
            total += sum(sizes[n] for n in node.inputs if n not in made)
            made.add(node.output)
        later = {n for other in kernels[i + 1 :] for node in other for n in node.inputs}
        total += sum(sizes[n] for n in made & (later | keep))
    return total
