"""Step 1: the number of ranks for that of nodes"""

STEP, HINT = 1, "nnodes"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes * ranks}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
