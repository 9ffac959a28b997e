"""Step 1: there is no compiler"""

STEP, HINT = 1, "compiler"


def build(folder: str) -> Callable:
    raise FileNotFoundError(2, "No such file or directory", "g++")
