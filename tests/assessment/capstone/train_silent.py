"""The run keeps its progress to itself."""

STEP, HINT = 10, "untold"

INSTEAD = {'    say(f"{line}  ≈': '    print(f"{line}  ≈'}
