"""Step 1: the option of one machine"""

STEP, HINT = 1, "standalone"


def static_words(node, nodes, ranks, master, port):
    return [
        "--standalone",
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
