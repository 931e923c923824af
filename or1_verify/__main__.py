"""Makes ``python -m or1_verify`` the command ``or1-verify``."""

import sys

from or1_verify.command import main

if __name__ == "__main__":
    sys.exit(main())
