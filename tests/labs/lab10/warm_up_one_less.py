"""Step 7: p - 2 - i forwards to warm up"""

STEP, HINT = 7, "warm_up_short"


def one_f_one_b(pipe):
    warm_up = min(max(pipe.grid.pp - 2 - pipe.grid.stage, 0), pipe.m)
    for k in range(warm_up):
        pipe.forward(k)
    for k in range(pipe.m - warm_up):
        pipe.forward(warm_up + k)
        pipe.backward(k)
    for k in range(pipe.m - warm_up, pipe.m):
        pipe.backward(k)
