"""Step 7: all links are compared with one median"""

import statistics

STEP, HINT = 7, "all_kinds"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        latency = statistics.median(other.latency for other in links)
        bandwidth = statistics.median(other.bandwidth for other in links)
        if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
            slow.append(link)
    return slow
