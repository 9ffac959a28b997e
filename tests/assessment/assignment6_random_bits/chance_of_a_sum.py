"""Step 4: x + u is rounded"""

STEP, HINT = 4, "moves_integers"


def round_by_chance(x, seed, offset):
    return (x + uniform(seed, offset, 0, x.numel()).view_as(x)).floor()
