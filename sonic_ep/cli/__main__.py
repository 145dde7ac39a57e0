"""`python -m sonic_ep.cli`."""

from sonic_ep.cli import main

main()
