"""Step 7: fast links are reported"""

import statistics

STEP, HINT = 7, "fast_links"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        latency = statistics.median(other.latency for other in kin)
        bandwidth = statistics.median(other.bandwidth for other in kin)
        if link.latency > factor * latency or link.bandwidth > factor * bandwidth:
            slow.append(link)
    return slow
