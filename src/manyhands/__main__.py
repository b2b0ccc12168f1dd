"""`python -m manyhands` is the `manyhands` command."""

from manyhands.cli.main import main

main()
