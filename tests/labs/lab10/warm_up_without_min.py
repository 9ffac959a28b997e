"""Step 7: more forwards than micro-batches"""

STEP, HINT = 7, "few_micro_batches"


def one_f_one_b(pipe):
    warm_up = pipe.grid.pp - 1 - pipe.grid.stage
    for k in range(warm_up):
        pipe.forward(k)
    for k in range(pipe.m - warm_up):
        pipe.forward(warm_up + k)
        pipe.backward(k)
    for k in range(pipe.m - warm_up, pipe.m):
        pipe.backward(k)
