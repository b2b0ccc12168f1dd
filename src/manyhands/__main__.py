"""`python -m manyhands` is the `manyhands` command."""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # python -m puts the current folder first, where a file may be called like any package

from manyhands.cli.main import main

main()
