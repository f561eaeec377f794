"""`python -m safehold` is the command `safehold`."""

from __future__ import annotations

import sys

from safehold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
