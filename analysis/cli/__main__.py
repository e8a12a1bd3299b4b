"""`python -m analysis.cli` is `shrinkage`; torchrun can start it so."""

from analysis.cli import main

main()
