"""Step 3: only what is kept is stored"""

STEP, HINT = 3, "not_stored"


def traffic(kernels, sizes, keep):
    total = 0
    for k in kernels:
        made = {n.output for n in k}
        loads = {i for n in k for i in n.inputs} - made
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & keep)
    return total
