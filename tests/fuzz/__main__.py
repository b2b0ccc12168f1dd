"""`python -m tests.fuzz`: see running.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

if "atheris" in sys.argv or "--engine=atheris" in sys.argv:
    from fuzz.covering import instrumented

    with instrumented():
        from fuzz.running import main
else:
    from fuzz.running import main

if __name__ == "__main__":
    sys.exit(main())
