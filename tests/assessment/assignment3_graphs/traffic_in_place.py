"""Step 3: what is written in place is not loaded"""

STEP, HINT = 3, "loads_late"


def traffic(kernels, sizes, keep):
    total = 0
    for i, k in enumerate(kernels):
        made = {n.output for n in k}
        loads = {i for n in k for i in n.inputs} - made
        later = {n for o in kernels[i + 1 :] for node in o for n in node.inputs}
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & (keep | later))
    return total
