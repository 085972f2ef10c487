"""The folder of real datasets that some tests read; without it they are skipped."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("AG_DATA") or Path(__file__).parents[3] / "shared/data")
needed = pytest.mark.skipif(not ROOT.is_dir(), reason=f"AG_DATA=FOLDER with the datasets; {ROOT} is not there")
