"""Step 1: the ranks of all nodes on each"""

STEP, HINT = 1, "nproc"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={nodes * ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
