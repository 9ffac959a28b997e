"""What check.py knows: a runner shared by all, and one module of steps for each lab.

The graders of the assessment lie in a folder of their own, and are found under the same name.
"""

from pathlib import Path

ASSESSMENT = Path(__file__).resolve().parents[2] / "assessment"
__path__.append(str(ASSESSMENT / "graders"))
