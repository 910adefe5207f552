"""scripts/sanitize_kernels.sh selects tests of every file that runs kernels, and few of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_test_file_has_a_few_sanitized_cases() -> None:
    script = (ROOT / "scripts" / "sanitize_kernels.sh").read_text()
    (selection,) = re.findall(r"pytest .*(-m \w+)$", script, re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "tests/kernels", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    result = subprocess.run([*command, *selection.split()], cwd=ROOT, text=True, capture_output=True, check=True)
    numbers = dict(re.findall(r"^tests/kernels/(\w+)\.py: (\d+)$", result.stdout, re.MULTILINE))
    files = {path.stem for path in (ROOT / "tests" / "kernels").glob("test_*.py") if "mark.gpu" in path.read_text()}
    assert set(numbers) == files
    assert all(int(number) <= 24 for number in numbers.values()), numbers
