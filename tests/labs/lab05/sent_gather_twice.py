"""Step 5: every collective as an all-reduce"""

STEP, HINT = 5, "sent_once"


def bytes_sent(kind, size, ranks):
    once = (ranks - 1) / ranks * size
    return 2 * once
