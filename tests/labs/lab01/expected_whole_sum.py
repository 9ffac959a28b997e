"""Step 3: a reduce-scatter that scatters nothing"""

STEP, HINT = 3, "whole_sum"


def expected(name, table, rank, root):
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total if rank == root else None,
        "all-reduce": total,
        "reduce-scatter": total,
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
