"""Step 7: half of an all-reduce"""

STEP, HINT = 7, "sent_twice"


def bytes_sent(numbers, ranks, wire):
    return (ranks - 1) / ranks * numbers * wire.itemsize
