"""Step 1: an option that torchrun has not"""

STEP, HINT = 1, "not_an_option"


def static_words(node, nodes, ranks, master, port):
    return [
        f"--num-nodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
