"""Step 1: a name made from the number"""

STEP, HINT = 1, "master"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr=node{node}",
        f"--master-port={port}",
    ]
