"""Step 1: the first rank of the node for its number"""

STEP, HINT = 1, "node_rank_of_rank"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node * ranks}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
