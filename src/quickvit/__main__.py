"""`python -m quickvit`, the same as the command `quickvit`."""

import sys

from quickvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
