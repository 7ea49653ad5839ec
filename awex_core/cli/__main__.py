"""``python -m awex_core.cli`` is ``awex``."""

import sys

from awex_core.cli import main

sys.exit(main())
