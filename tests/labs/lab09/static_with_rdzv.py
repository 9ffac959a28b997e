"""Step 1: a rendezvous backend besides"""

STEP, HINT = 1, "static_elastic"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
        "--rdzv-backend=c10d",
    ]
