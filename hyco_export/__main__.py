"""`python -m hyco_export` is `hyco-export`."""

from hyco_export.cli import main

main()
