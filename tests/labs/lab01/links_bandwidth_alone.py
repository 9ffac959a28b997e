"""Step 7: latency is not looked at"""

import statistics

STEP, HINT = 7, "no_latency"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        if link.bandwidth < statistics.median(other.bandwidth for other in kin) / factor:
            slow.append(link)
    return slow
