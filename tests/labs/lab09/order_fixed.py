"""Step 6: what everybody says"""

STEP, HINT = 6, "order_fixed"


def axis_order(sent):
    return [axis for axis in ("pp", "dp", "tp") if axis in sent]
