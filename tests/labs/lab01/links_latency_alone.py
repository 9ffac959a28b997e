"""Step 7: bandwidth is not looked at"""

import statistics

STEP, HINT = 7, "no_bandwidth"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        if link.latency > factor * statistics.median(other.latency for other in kin):
            slow.append(link)
    return slow
