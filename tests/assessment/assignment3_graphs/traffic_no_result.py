"""Step 3: the result is not stored"""

STEP, HINT = 3, "result_lost"


def traffic(kernels: list[list[Node]], sizes: dict[int, int], keep: set[int]) -> int:
    total = 0
    for i, kernel in enumerate(kernels):
        made, loads = set(), set()
        for node in kernel:
            loads |= set(node.inputs) - made
            made.add(node.output)
        later = {n for other in kernels[i + 1 :] for node in other for n in node.inputs}
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & later)
    return total
