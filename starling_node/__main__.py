"""`python -m starling_node`: as the command `starling`."""

from starling_node import main

main()
