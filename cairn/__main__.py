"""`python -m cairn`: the same as the command `cairn`."""

import sys

from cairn.cli.main import main

sys.exit(main())
