"""Step 7: numbers in place of bytes"""

STEP, HINT = 7, "sent_size"


def bytes_sent(numbers, ranks, wire):
    return 2 * (ranks - 1) / ranks * numbers
