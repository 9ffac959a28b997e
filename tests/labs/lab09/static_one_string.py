"""Step 1: one string for all"""

STEP, HINT = 1, "words_kind"


def static_words(node, nodes, ranks, master, port):
    return (
        f"--nnodes={nodes} --node-rank={node} --nproc-per-node={ranks}"
        f" --master-addr={master} --master-port={port}"
    )
