"""Step 7: the mean"""

import statistics

STEP, HINT = 7, "mean_link"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        latency = statistics.mean(other.latency for other in kin)
        bandwidth = statistics.mean(other.bandwidth for other in kin)
        if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
            slow.append(link)
    return slow
