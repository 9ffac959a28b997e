"""Step 1: each node is its own master"""

STEP, HINT = 1, "master_localhost"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        "--master-addr=localhost",
        f"--master-port={port}",
    ]
