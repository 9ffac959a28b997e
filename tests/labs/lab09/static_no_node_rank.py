"""Step 1: every agent believes it is node 0"""

STEP, HINT = 1, "node_rank"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
