"""A first patch to PyTorch: two new tests fail, the patch changes a message, and they pass.

If the lengths do not add up, the error of `random_split` does not give their sum. Fractions
that add up to slightly more than 1 get the same message, which mentions only lengths
(pytorch/pytorch issue 128116). The program applies the patch to a copy of the installed file.
"""

import contextlib
import difflib
import importlib.util
import io
import pathlib
import sys
import tempfile
import unittest
from types import ModuleType

import torch
import torch.utils.data.dataset as installed

OLD = """\
        raise ValueError(
            "Sum of input lengths does not equal the length of the input dataset!"
        )
"""
NEW = """\
        raise ValueError(
            "Sum of input lengths does not equal the length of the input dataset! "
            f"The lengths add up to {sum(lengths)}, the dataset has "
            f"{len(dataset)} elements. "  # type: ignore[arg-type]
            "Fractions must add up to 1, and not to more."
        )
"""
WRONG = {  # parts of the patch, each with a mistake
    "Sum of input lengths": "Sum of the lengths",
    "{sum(lengths)}": "{sum(lengths):g}",  # prints the sum of such fractions as 1
    "{len(dataset)}": "{len(lengths)}",
    "Fractions must": "They must",
}


def tests(module: ModuleType) -> type[unittest.TestCase]:
    """Return tests of `module`: three of the old behaviour and two of the new message.

    In PyTorch they would be in test/test_dataloader.py.
    """

    class TestRandomSplit(unittest.TestCase):
        def test_lengths(self) -> None:
            self.assertEqual(
                [len(part) for part in module.random_split(range(10), [3, 7])], [3, 7]
            )

        def test_fractions(self) -> None:
            parts = module.random_split(range(10), [0.5, 0.5])
            self.assertEqual(sorted(i for part in parts for i in part), list(range(10)))

        def test_old_words_stay(self) -> None:
            with self.assertRaisesRegex(ValueError, "Sum of input lengths does not equal"):
                module.random_split(range(10), [3, 8])

        def test_message_says_both_numbers(self) -> None:
            with self.assertRaisesRegex(ValueError, "add up to 11, the dataset has 10"):
                module.random_split(range(10), [3, 8])

        def test_message_names_fractions(self) -> None:
            with self.assertRaisesRegex(ValueError, r"1\.0000000000000002.*Fractions must"):
                module.random_split(range(10), [0.5, 0.5000000000000002])

    return TestRandomSplit


def module_from(source: str) -> ModuleType:
    """Write the source to a file and return it as a module."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "dataset.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("patched_dataset", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def run(what: str, module: ModuleType) -> set[str]:
    """Run the tests of `module`, print which tests fail, and return their names."""
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(tests(module))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    failed = [test.id().rsplit(".", 1)[-1] for test, _ in result.failures + result.errors]
    print(f"{what}: {result.testsRun - len(failed)} of {result.testsRun} tests pass")
    for name in failed:
        print(f"  FAIL {name}")
    return set(failed)


def main() -> int:
    source = pathlib.Path(installed.__file__).read_text()
    if source.count(OLD) != 1:
        print("the patch does not fit random_split of this torch", file=sys.stderr)
        return 1
    new = {"test_message_says_both_numbers", "test_message_names_fractions"}
    assert run("before", installed) == new  # a new test that passes now would prove nothing
    with contextlib.redirect_stdout(io.StringIO()):
        whole = ModuleType("whole")  # a wrong random_split for whole lengths only
        assert len(run("no random_split", whole)) == 5  # every test uses this module
        whole.random_split = lambda data, lengths: torch.tensor(data).split(lengths)
        assert "test_fractions" in run("whole lengths alone", whole)
        for right, wrong in WRONG.items():  # the tests find a mistake in each part of the patch
            assert NEW.count(right) == 1
            assert run(
                "a wrong patch", module_from(source.replace(OLD, NEW.replace(right, wrong)))
            )
    patched = source.replace(OLD, NEW)
    name = "torch/utils/data/dataset.py"
    lines = difflib.unified_diff(
        source.splitlines(), patched.splitlines(), f"a/{name}", f"b/{name}", lineterm="", n=1
    )
    for line in lines:
        print("@@" if line.startswith("@@") else line)  # versions differ in line numbers
    assert not run("after", module_from(patched))
    return 0


if __name__ == "__main__":
    sys.exit(main())
