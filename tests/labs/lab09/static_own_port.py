"""Step 1: a port for each node"""

STEP, HINT = 1, "port"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port + node}",
    ]
