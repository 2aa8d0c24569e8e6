"""hyco-export: make the phone's drafting artifacts of HyCo (arXiv 2610.21436) and prove them end to end."""

__version__ = "0.1.0"
