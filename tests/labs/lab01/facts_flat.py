"""Step 4: the facts of this rank alone"""

STEP, HINT = 4, "facts_shape"


def gather_facts(mine, world):
    return [mine]
