"""``python -m cotuned.service`` is the command ``cotuned``."""

import sys

from .cli import main

sys.exit(main())
