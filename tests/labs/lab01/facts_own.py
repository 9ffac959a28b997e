"""Step 4: the list is never filled"""

STEP, HINT = 4, "facts_own"


def gather_facts(mine, world):
    return [mine] * world
