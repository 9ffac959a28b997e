"""Step 7: in the opposite order"""

import statistics

STEP, HINT = 7, "links_other"


def slow_links(links, factor=3):
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        latency = statistics.median(other.latency for other in kin)
        bandwidth = statistics.median(other.bandwidth for other in kin)
        if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
            slow.append(link)
    return slow[::-1]
