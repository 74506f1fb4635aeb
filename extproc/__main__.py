"""``python -m extproc`` is the ``extproc`` command."""

from extproc.cli import main

main()
