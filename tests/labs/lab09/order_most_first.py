"""Step 6: the most first"""

STEP, HINT = 6, "order_reversed"


def axis_order(sent):
    return sorted(sent, key=sent.get, reverse=True)
