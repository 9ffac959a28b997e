"""Step 7: p - i forwards to warm up"""

STEP, HINT = 7, "warm_up_long"


def one_f_one_b(pipe):
    warm_up = min(pipe.grid.pp - pipe.grid.stage, pipe.m)
    for k in range(warm_up):
        pipe.forward(k)
    for k in range(pipe.m - warm_up):
        pipe.forward(warm_up + k)
        pipe.backward(k)
    for k in range(pipe.m - warm_up, pipe.m):
        pipe.backward(k)
